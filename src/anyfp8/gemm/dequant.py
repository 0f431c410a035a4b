"""y = x · dequantize(w)ᵀ + bias: the backend that refuses nothing and runs anywhere.

The CPU uses it always, a GPU as the last resort. Where memory allows, the weight is dequantized
once at load to the activations' dtype and only that copy is kept: encode(bf16(q · s) / s) gives the
code q back bit for bit, which `prepare` verifies; where it does not hold, the codes stay as well.

The surprise: given quantized activations it computes what a GPU's FP8 units would (scales after the
product, in fp32), so a machine without a GPU can measure what quantizing activations costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from anyfp8 import fp8, reference
from anyfp8.gemm.base import Backend, CanonicalWeight, Config, PreparedWeight, canonical_weight
from anyfp8.problem import DTYPES, Problem, QTensor, Scheme

if TYPE_CHECKING:
    from anyfp8.device import Device

# rows dequantized at a time when a call dequantizes: bounds the scratch
_CHUNK_BYTES = 64 << 20
# and at a time when the copy is made at load: small, so that the peak is the copy
_PREPARE_BYTES = 2 << 20


@dataclass(frozen=True)
class DequantConfig(Config):
    """memory: "load" keeps a 16- or 32-bit copy, "per_call" keeps the codes and decodes each call.

    row_by_row: multiply each row of x alone, so that a row's bits do not depend on M.
    """

    memory: str = "load"
    row_by_row: bool = False


@dataclass(frozen=True, eq=False)
class DenseWeight(PreparedWeight):
    """A dequantized weight [N, K], its scales, and its codes where they cannot be recomputed."""

    w: torch.Tensor
    scale: torch.Tensor
    scheme: Scheme
    codes: torch.Tensor | None = None

    @property
    def layout(self) -> str:
        return "dense"

    @property
    def shape(self) -> tuple[int, int]:
        return (self.w.shape[0], self.w.shape[1])

    def canonical(self) -> QTensor:
        codes = _encoded(self.w, self.scale, self.scheme) if self.codes is None else self.codes
        return QTensor(codes.view(torch.float8_e4m3fn), self.scale, self.scheme.block)

    def tensors(self) -> dict[str, torch.Tensor]:
        kept = {"w": self.w, "scale": self.scale}
        return kept if self.codes is None else kept | {"codes": self.codes}

    def replaced(self, tensors: dict[str, torch.Tensor]) -> DenseWeight:
        return DenseWeight(tensors["w"], tensors["scale"], self.scheme, tensors.get("codes"))


class Dequant(Backend):
    name = "dequant"
    kind = "weight_only"
    layout = "dense"
    reads = ("any",)
    config_class = DequantConfig
    batch_invariant = True

    def why_not(self, problem: Problem, device: Device) -> str | None:
        return None

    def layout_of(self, config: Config) -> str:
        assert isinstance(config, DequantConfig)
        return "dense" if config.memory == "load" else "canonical"

    def default_config(self, problem: Problem, device: Device) -> DequantConfig:
        # a GPU that comes here holds a layout that other backends read too
        return DequantConfig("load" if device.vendor == "cpu" else "per_call")

    def prepare(self, weight: QTensor, scheme: Scheme, x_dtype: str) -> DenseWeight:
        plain = canonical_weight(weight, scheme)
        w = torch.empty(plain.shape, dtype=DTYPES[x_dtype], device=plain.codes.device)
        same = True
        # rows at a time: whole fp32 copies would be several times what stays
        for rows, part in _row_parts(plain, _PREPARE_BYTES):
            w[rows] = reference.dequantize(part, w.dtype)
            same &= torch.equal(_encoded(w[rows], part.scale, scheme), part.codes)
        return DenseWeight(w, plain.scale, scheme, None if same else plain.codes)

    def restored(
        self, layout: str, tensors: Sequence[torch.Tensor], problem: Problem
    ) -> PreparedWeight:
        if layout != self.layout:
            return super().restored(layout, tensors, problem)
        w, scale, *codes = tensors
        return DenseWeight(w, scale, problem.scheme, codes[0] if codes else None)

    def run(
        self,
        x: torch.Tensor | QTensor,
        prepared: PreparedWeight,
        problem: Problem,
        config: Config,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Backend.run`; a QTensor x is multiplied as FP8 hardware would, in fp32."""
        assert isinstance(config, DequantConfig)
        out_dtype = DTYPES[problem.out_dtype]
        if isinstance(x, QTensor):
            y = _emulated(x, prepared.canonical(), bias, out_dtype)
        elif isinstance(prepared, DenseWeight):
            y = _linear(x, prepared.w, bias, out_dtype, config.row_by_row)
        else:
            plain = canonical_weight(prepared.canonical(), prepared.scheme)
            y = _chunked(x, plain, bias, out_dtype, config.row_by_row)
        return y if out is None else out.copy_(y)


def _encoded(w: torch.Tensor, scale: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    if scheme.block is not None:
        scale = reference.expand_scale(scale, scheme.block, w.shape)
    return fp8.encode(w.float() / scale)


def _linear(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    row_by_row: bool = False,
) -> torch.Tensor:
    """x [M, K] · w [N, K]ᵀ + bias, rounded once to out_dtype where torch's product allows it.

    cuBLAS splits K where N is a chunk's and adds the parts up in the output's type: in 16 bits they
    would err about three times as much as one rounding, so the output is fp32 first.
    """
    if row_by_row:
        rows = [_linear(row, w, bias, out_dtype) for row in x.split(1)]
        return torch.cat(rows) if rows else x.new_empty((0, w.shape[0]), dtype=out_dtype)
    # ROCm's torch also says cuda, and has no such product
    cublas = x.is_cuda and torch.version.cuda is not None
    if cublas and x.dtype == w.dtype != torch.float32 and x.shape[0]:
        y = torch.mm(x, w.t(), out_dtype=torch.float32)
        return (y if bias is None else y + bias.float()).to(out_dtype)
    if out_dtype == torch.float32 or x.dtype != w.dtype:
        x, w = x.float(), w.float()
    if bias is not None and bias.dtype != x.dtype:
        # a bias that x's dtype cannot hold is added in fp32, and only then
        narrow = bias.to(x.dtype)
        if not torch.equal(narrow.to(bias.dtype), bias):
            return (torch.nn.functional.linear(x, w).float() + bias.float()).to(out_dtype)
        bias = narrow
    return torch.nn.functional.linear(x, w, bias).to(out_dtype)


def _chunked(
    x: torch.Tensor,
    prepared: CanonicalWeight,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    row_by_row: bool,
) -> torch.Tensor:
    """Dequantize a bounded number of rows of w at a time and multiply by them."""
    y = x.new_empty((x.shape[0], prepared.shape[0]), dtype=out_dtype)
    for rows, part in _row_parts(prepared, _CHUNK_BYTES):
        w = reference.dequantize(part, x.dtype)
        y[:, rows] = _linear(x, w, None if bias is None else bias[rows], out_dtype, row_by_row)
    return y


def _row_parts(weight: CanonicalWeight, most: int) -> Iterator[tuple[slice, QTensor]]:
    """Slices of rows and the weight's parts there, `most` bytes in fp32 where a block allows it."""
    n, k = weight.shape
    block = weight.scheme.block
    step = max(1, most // (4 * k))
    # whole blocks of rows, so that a part's scales are whole rows of the scale
    step = step if block is None else max(step // block[0], 1) * block[0]
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        scale = weight.scale
        if block is not None:
            scale = scale[start // block[0] : -(-rows.stop // block[0])]
        elif scale.ndim:
            scale = scale[rows]
        yield rows, QTensor(weight.codes[rows], scale, block)


def _emulated(
    x: QTensor, w: QTensor, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """Product of the codes in fp32, scales after it; inside it where they vary along K."""
    if x.block is None and w.block is None:
        y = fp8.decode(x.codes) @ fp8.decode(w.codes).T
        y = y * x.scale * w.scale.reshape(-1)
    else:
        y = reference.dequantize(x) @ reference.dequantize(w).T
    if bias is not None:
        y = y + bias.float()
    return y.to(out_dtype)


BACKEND = Dequant()
