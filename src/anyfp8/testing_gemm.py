"""Judging a backend: random layers, poisoned surroundings, and the error that a product may have.

The rule: against fp64 on the dequantized operands a backend errs at most twice what PyTorch errs in
the same output type. FP8 units that keep a short accumulator get an allowance on top, derived from
the number of sums it holds. For authors of backends: `check` is the whole conformance of one call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch

from anyfp8 import reference
from anyfp8.device import Device
from anyfp8.gemm.base import Backend, CanonicalWeight, Config, canonical_weight
from anyfp8.problem import DTYPE_NAMES, DTYPES, Problem, QTensor, Scheme

# fraction bits below the largest term that Hopper's and Ada's FP8 accumulators keep, and how many
# products enter one sum (DeepSeek-V3 technical report, section 3.5.2)
_SHORT_BITS = 13
_PRODUCTS = 32


@dataclass(frozen=True, eq=False)
class Layer:
    """One random layer: weight, bias and activations, with the exact product of each kind.

    Attributes:
        x: [M, K] 16-bit activations. q: the same quantized, or None for weight-only schemes.
        weight: canonical. bias: [N].
    """

    scheme: Scheme
    x: torch.Tensor
    q: QTensor | None
    weight: QTensor
    bias: torch.Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        n, k = self.weight.codes.shape
        return self.x.shape[0], n, k


def random_layer(
    scheme: Scheme,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Layer:
    """A layer whose rows, columns and blocks all have different scales."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    w = normal(n, k) * torch.exp(normal(n, 1)) * torch.exp(0.3 * normal(1, k)) / k**0.5
    x = normal(m, k) * torch.exp(0.5 * normal(m, 1))
    weight = reference.quantize_weight(w, scheme)
    x = x.to(dtype)
    static = torch.tensor(0.02, device=device)
    q = reference.quantize_activation(x, scheme, static) if m else None
    return Layer(scheme, x, q, weight, normal(n).to(dtype))


def poisoned(tensor: torch.Tensor, columns: int = 16, rows: int = 3) -> torch.Tensor:
    """The same values as a view into memory that holds 0xFF (NaN) all around."""
    m, k = tensor.shape
    width = tensor.element_size()
    stride = -(-(k + columns) * width // 16) * 16 // width
    around = torch.full((m + rows, stride * width), 0xFF, dtype=torch.uint8, device=tensor.device)
    inside = around.view(tensor.dtype)[:m, :k]
    inside.copy_(tensor)
    return inside


def poisoned_tail(tensor: torch.Tensor, extra: int = 4096) -> torch.Tensor:
    """The same contiguous tensor in front of 0xFF bytes."""
    size = tensor.numel() * tensor.element_size()
    memory = torch.full((size + extra,), 0xFF, dtype=torch.uint8, device=tensor.device)
    inside = memory[:size].view(tensor.dtype).view(tensor.shape)
    return inside.copy_(tensor)


@dataclass(frozen=True, eq=False)
class Oracle:
    """Exact products of a layer [M, N] in fp64, and how much PyTorch errs over all of them.

    `batches` has (rms, worst) of PyTorch's product of the first M rows alone: its libraries may
    split K then and add up in 16 bits, which errs more than the product of all rows.
    """

    exact: torch.Tensor
    rms_error: float
    worst_error: float
    batches: Mapping[int, tuple[float, float]] = field(default_factory=dict)

    def errors(self, m: int) -> tuple[float, float]:
        """(rms, worst) that PyTorch errs by on the first m rows."""
        rms, worst = self.batches.get(m, (0.0, 0.0))
        return max(rms, self.rms_error), max(worst, self.worst_error)


def oracle(
    layer: Layer,
    quantized: bool,
    bias: bool,
    out_dtype: torch.dtype,
    batches: Iterable[int] = (),
) -> Oracle:
    """The products that `check` compares with, for all rows of a layer.

    Args:
        batches: numbers of rows whose own product is judged too, where PyTorch multiplies in 16
            bits.
    """
    w = reference.dequantize(layer.weight)
    x = layer.x.float()
    if quantized and layer.q is not None:
        x = reference.dequantize(layer.q)
    exact = x.double() @ w.double().T
    if bias:
        exact = exact + layer.bias.double()

    def errors(m: int) -> tuple[float, float]:
        if quantized:
            y = x[:m] @ w.T
        else:
            y = (layer.x[:m] @ w.to(layer.x.dtype).T).float()
        y = y + layer.bias.float() if bias else y
        difference = y.to(out_dtype).double() - exact[:m]
        return _rms(difference), difference.abs().amax().item()

    smaller = () if quantized else (m for m in batches if 0 < m < len(exact))
    return Oracle(exact, *errors(len(exact)), {m: errors(m) for m in smaller})


def allowance(backend: Backend, problem: Problem, device: Device) -> float:
    """Relative error that a short accumulator adds: 2^-13 at most for each sum of 32 products.

    Weight-only backends need none: PyTorch's product, which the rule doubles, has the weight
    rounded to 16 bits too, and that rounding errs about as much as the output's.
    """
    if backend.kind != "w8a8":
        return 0.0
    held = problem.k if problem.accumulate == "fast" else min(problem.k, 128)
    return -(-held // _PRODUCTS) * 2.0 ** -(_SHORT_BITS + 1)


def check(
    backend: Backend,
    layer: Layer,
    wanted: Oracle,
    problem: Problem,
    device: Device,
    config: Config | None = None,
    rows: int | None = None,
) -> str | None:
    """Run the first `rows` rows of a layer and complain, or return None.

    The output starts as NaN and everything around the operands is 0xFF.
    """
    m = layer.x.shape[0] if rows is None else rows
    problem = replace(problem, m=m)
    config = config or backend.default_config(problem, device)
    weight = _prepared(layer)
    x: torch.Tensor | QTensor = poisoned(layer.x[:m]) if m else layer.x[:0]
    if backend.kind == "w8a8":
        assert layer.q is not None
        scale = layer.q.scale if layer.q.scale.ndim == 0 else layer.q.scale[:m]
        codes = poisoned(layer.q.codes[:m]) if m else layer.q.codes[:0]
        x = QTensor(codes.view(layer.q.data.dtype), scale, layer.q.block)
    dtype = DTYPES[problem.out_dtype]
    out = torch.full((m, problem.n), float("nan"), dtype=dtype, device=layer.x.device)
    bias = layer.bias if problem.bias else None
    y = backend.run(x, weight, problem, config, bias, out)
    if y.shape != out.shape or y.dtype != dtype:
        return f"{config}: shape {tuple(y.shape)} {y.dtype}"
    if m == 0:
        return None
    exact = wanted.exact[:m]
    difference = (y.double() - exact).abs()
    # one copy to the host: a suite makes a hundred thousand of these calls
    bad, error, size, worst, largest = torch.stack(
        [
            (~y.isfinite()).sum().double(),
            difference.square().mean().sqrt(),
            exact.square().mean().sqrt(),
            difference.amax(),
            exact.abs().amax(),
        ]
    ).tolist()
    if bad:
        return f"m={m} {config}: {bad:.0f} elements are not finite"
    short = allowance(backend, problem, device)
    # on a few elements torch may happen to err by nothing: half a unit in the last place is allowed
    unit = torch.finfo(dtype).eps / 2 if y.numel() < 4096 else 0.0
    rms_error, worst_error = wanted.errors(m)
    bound = 2 * rms_error + (unit + short) * size
    if error > bound:
        return f"m={m} {config}: rms error {error:.3e}, allowed {bound:.3e}"
    limit = 2 * worst_error + (unit + 4 * short) * largest
    if worst > limit:
        return f"m={m} {config}: largest error {worst:.3e}, allowed {limit:.3e}"
    return None


@lru_cache(maxsize=1)
def _prepared(layer: Layer) -> CanonicalWeight:
    plain = canonical_weight(layer.weight, layer.scheme)
    tensors = {"codes": poisoned_tail(plain.codes), "scale": plain.scale}
    if plain.scale.ndim:
        tensors["scale"] = poisoned_tail(plain.scale)
    return plain.replaced(tensors)


def _rms(error: torch.Tensor) -> float:
    return error.square().mean().sqrt().item()


def problem_of(
    layer: Layer, out_dtype: torch.dtype, bias: bool, accumulate: str = "fast"
) -> Problem:
    """The problem that all rows of a layer are."""
    m, n, k = layer.shape
    names = DTYPE_NAMES[layer.x.dtype], DTYPE_NAMES[out_dtype]
    return Problem("linear", layer.scheme, m, n, k, *names, bias, accumulate)
