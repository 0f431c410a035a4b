"""Judging a backend: random layers, poisoned surroundings, and the error that a product may have.

The rule: against fp64 on the dequantized operands a backend errs at most twice what PyTorch errs in
the same output type. FP8 units that keep a short accumulator get an allowance on top, derived from
the number of sums it holds. For authors of backends: `check` is the whole conformance of one call.

Many processes test on one GPU, so what a layer keeps there is its 16-bit and FP8 operands and the
exact product; all else is made in parts of `_PART` elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from anyfp8 import reference
from anyfp8.device import Device
from anyfp8.gemm.base import Backend, CanonicalWeight, Config, canonical_weight
from anyfp8.problem import DTYPE_NAMES, DTYPES, Problem, QTensor, Scheme

# fraction bits below the largest term that Hopper's and Ada's FP8 accumulators keep, and how many
# products enter one sum (DeepSeek-V3 technical report, section 3.5.2)
_SHORT_BITS = 13
_PRODUCTS = 32

# elements of a temporary: 64 MiB in fp64
_PART = 1 << 23


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

    @cached_property
    def prepared(self) -> CanonicalWeight:
        """The canonical weight in front of 0xFF bytes."""
        plain = canonical_weight(self.weight, self.scheme)
        tensors = {"codes": poisoned_tail(plain.codes), "scale": plain.scale}
        if plain.scale.ndim:
            tensors["scale"] = poisoned_tail(plain.scale)
        return plain.replaced(tensors)


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

    w = normal(n, k).mul_(torch.exp(normal(n, 1))).mul_(torch.exp(0.3 * normal(1, k))).div_(k**0.5)
    weight = _by_rows(
        w,
        lambda part: reference.quantize_weight(part, scheme),
        apart=scheme.weight != "tensor",
        step=scheme.block[0] if scheme.block else 1,
    )
    del w
    x = normal(m, k).mul_(torch.exp(0.5 * normal(m, 1))).to(dtype)
    static = torch.tensor(0.02, device=device)
    q = None
    if m and scheme.activation != "none":
        q = _by_rows(
            x,
            lambda part: _quantized(part, scheme, static),
            apart=scheme.activation in ("token", "group"),
        )
    return Layer(scheme, x, q, weight, normal(n).to(dtype))


def _quantized(x: torch.Tensor, scheme: Scheme, static: torch.Tensor) -> QTensor:
    q = reference.quantize_activation(x, scheme, static)
    assert q is not None
    return q


def _by_rows(
    matrix: torch.Tensor,
    quantize: Callable[[torch.Tensor], QTensor],
    apart: bool,
    step: int = 1,
) -> QTensor:
    """quantize(matrix), some rows at a time where `apart` says that no scale spans all rows."""
    rows, columns = matrix.shape
    if not apart or rows * columns <= _PART:
        return quantize(matrix)
    parts = [quantize(matrix[at]) for at in _parts(rows, columns, step)]
    data = torch.cat([part.codes for part in parts]).view(parts[0].data.dtype)
    return replace(parts[0], data=data, scale=torch.cat([part.scale for part in parts]))


def _parts(rows: int, columns: int, step: int = 1) -> Iterator[slice]:
    """Slices of rows: `_PART` elements or fewer, whole multiples of `step`."""
    size = max(_PART // columns // step, 1) * step
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


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

    `product` lacks the bias, so that two oracles can share it. `batches` has (rms, worst) of
    PyTorch's product of the first M rows alone: its libraries may split K then and add up in 16
    bits, which errs more than the product of all rows.
    """

    product: torch.Tensor
    bias: torch.Tensor | None
    rms_error: float
    worst_error: float
    batches: Mapping[int, tuple[float, float]] = field(default_factory=dict)

    @property
    def exact(self) -> torch.Tensor:
        """The exact products, bias included."""
        return _biased(self.product, self.bias)

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
    product: torch.Tensor | None = None,
) -> Oracle:
    """The products that `check` compares with, for all rows of a layer.

    Args:
        batches: numbers of rows whose own product is judged too, where PyTorch multiplies in 16
            bits.
        product: of another oracle for the same layer and kind, to be shared.
    """
    added = layer.bias.double() if bias else None
    exact = _exact_product(layer, quantized) if product is None else product
    narrow = None if quantized else _weight(layer)

    def errors(m: int) -> tuple[float, float]:
        found = Found(exact.device)
        if narrow is None:
            # an fp32 product, whose own error is far below the output's, may be made in parts
            x = _activations(layer, quantized)
            for columns, w in _weight_parts(layer):
                y = x @ w.T
                y = y + layer.bias[columns].float() if bias else y
                found.add(
                    y.to(out_dtype), exact[:, columns], None if added is None else added[columns]
                )
        else:
            # libraries choose how to add up by the shape: 16-bit products are PyTorch's own, whole
            y = layer.x[:m] @ narrow.T
            for rows in _parts(m, len(narrow)):
                part = y[rows].float()
                part = part + layer.bias.float() if bias else part
                found.add(part.to(out_dtype), exact[:m][rows], added)
        _, rms, _, worst, _ = found.read()
        return rms, worst

    smaller = () if quantized else (m for m in batches if 0 < m < len(exact))
    whole = errors(len(exact))
    return Oracle(exact, added, *whole, {m: errors(m) for m in smaller})


class Found:
    """What `check` asks about y - exact, gathered part by part without a copy to the host."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(3, dtype=torch.float64, device=device)
        self._peaks = torch.zeros(2, dtype=torch.float64, device=device)
        self._count = 0

    def add(self, y: torch.Tensor, product: torch.Tensor, bias: torch.Tensor | None) -> None:
        for rows in _parts(*y.shape):
            exact = _biased(product[rows], bias)
            difference = (y[rows].double() - exact).abs_()
            sums = (~y[rows].isfinite()).sum(), difference.square().sum(), exact.square().sum()
            self._sums += torch.stack([one.double() for one in sums])
            peaks = torch.stack([difference.amax(), exact.abs().amax()])
            self._peaks = torch.maximum(self._peaks, peaks)
        self._count += y.numel()

    def read(self) -> tuple[float, float, float, float, float]:
        """Elements that are not finite, rms of the difference and of exact, largest of the two."""
        bad, error, size, worst, largest = torch.cat([self._sums, self._peaks]).tolist()
        count = self._count
        return bad, (error / count) ** 0.5, (size / count) ** 0.5, worst, largest


def _biased(product: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return product if bias is None else product + bias


def _activations(layer: Layer, quantized: bool) -> torch.Tensor:
    """x in fp32, as it is multiplied."""
    if quantized and layer.q is not None:
        return reference.dequantize(layer.q)
    return layer.x.float()


def _weight_parts(layer: Layer) -> Iterator[tuple[slice, torch.Tensor]]:
    """Rows of the weight, dequantized to fp32: few enough that a product with them is small too."""
    m, n, k = layer.shape
    weight, height = layer.weight, layer.weight.block[0] if layer.weight.block else 1
    for rows in _parts(n, max(k, m), height):
        scale = weight.scale
        if weight.block:
            scale = scale[rows.start // height : -(-rows.stop // height)]
        elif scale.ndim:
            scale = scale[rows]
        yield rows, reference.dequantize(replace(weight, data=weight.data[rows], scale=scale))


def _weight(layer: Layer) -> torch.Tensor:
    """The weight in the activations' dtype."""
    w = layer.x.new_empty(layer.shape[1:])
    for rows, part in _weight_parts(layer):
        w[rows] = part
    return w


def _exact_product(layer: Layer, quantized: bool) -> torch.Tensor:
    m, n, _ = layer.shape
    x = _activations(layer, quantized).double()
    exact = x.new_empty(m, n)
    for columns, w in _weight_parts(layer):
        exact[:, columns] = x @ w.double().T
    return exact


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
    weight = layer.prepared
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
    found = Found(y.device)
    found.add(y, wanted.product[:m], wanted.bias)
    # one copy to the host: a suite makes a hundred thousand of these calls
    bad, error, size, worst, largest = found.read()
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


def problem_of(
    layer: Layer, out_dtype: torch.dtype, bias: bool, accumulate: str = "fast"
) -> Problem:
    """The problem that all rows of a layer are."""
    m, n, k = layer.shape
    names = DTYPE_NAMES[layer.x.dtype], DTYPE_NAMES[out_dtype]
    return Problem("linear", layer.scheme, m, n, k, *names, bias, accumulate)
