"""x · Wᵀ with its exact answer: the random operands that a GEMM benchmark times and judges.

One weight [N, K] in every quantization that a contender asks for, as many copies as make the L2
cold, and activations for the largest M. The surprise: channel scales are rounded to bf16 before the
weight is encoded, so that libraries which keep scales in bf16 compute with the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from anyfp8 import reference
from anyfp8.problem import QTensor

BLOCK = (128, 128)
GROUP = 128
_MAX = 448.0
_FP8 = torch.float8_e4m3fn

# what a contender may add to the error of rounding twice: a short accumulator by 2^-14 for each sum
# of 32 products that it holds (as in the conformance suite), another quantizer by codes that fall
# on the other side of a tie
_PER_SUM = 2.0**-14
OTHER_QUANTIZER = 2e-3

Item = TypeVar("Item")


@dataclass(frozen=True, eq=False)
class Exact:
    """The product of dequantized operands: fp64 sums kept in fp32 [M, N].

    Attributes:
        rounding: relative rms error of rounding it to bf16, which is what torch's product errs.
    """

    y: torch.Tensor
    rounding: float


class Operands:
    """Weight copies, activations and exact products of one (N, K); each is made when first asked.

    Attributes:
        x: [M, K] bf16, rows of different sizes.
        copies: copies of each weight.
    """

    def __init__(
        self, n: int, k: int, m: int, place: torch.device | str, seed: int, copies: int
    ) -> None:
        self.n, self.k, self.copies = n, k, copies
        self.place = torch.device(place)
        generator = torch.Generator(device=self.place).manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=self.place)

        self.x = (normal(m, k) * torch.exp(0.5 * normal(m, 1))).bfloat16()
        self._w = (normal(n, k) * torch.exp(0.3 * normal(n, 1)) * 0.02).bfloat16()
        self._made: dict[object, Any] = {}

    def weights(self, kind: str) -> list[QTensor]:
        """Copies of the weight with "tensor", "channel" or "block" scales.

        All copies share one scale tensor.
        """
        return self._once(("weights", kind), lambda: self._quantized_weights(kind))

    def dense(self) -> list[torch.Tensor]:
        """Copies [N, K] bf16 of the channel-quantized weight, dequantized."""
        first = self.weights("channel")[0]
        return self._once("dense", lambda: self._copies(_dequantized(first).bfloat16()))

    def activations(self, kind: str) -> QTensor:
        """x quantized with "tensor" (one scale for all M), "token" or "group" scales."""
        return self._once(("x", kind), lambda: self._quantized_x(kind))

    @property
    def input_scale(self) -> torch.Tensor:
        """fp32 []: what calibration would have found."""
        return self.activations("tensor").scale

    def exact(self, weight: str, activation: str) -> Exact:
        """Exact product for all rows.

        Args:
            weight: a kind of `weights`, or "dense". activation: a kind of `activations`, or "none".
        """
        return self._once(("exact", weight, activation), lambda: self._exact(weight, activation))

    def _once(self, key: object, make: Callable[[], Item]) -> Item:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _copies(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor] + [tensor.clone() for _ in range(self.copies - 1)]

    def _quantized_weights(self, kind: str) -> list[QTensor]:
        w, block = self._w.float(), None
        if kind == "tensor":
            scale = (w.abs().amax() / _MAX).reshape(())
            codes = (w / scale).to(_FP8)
        elif kind == "channel":
            # upwards, so that rounding it to bf16 saturates nothing
            scale = (w.abs().amax(1, keepdim=True) / _MAX * (1 + 2**-7)).bfloat16().float()
            codes = (w / scale).to(_FP8)
        else:
            block = BLOCK
            rows, columns = self.n // BLOCK[0], self.k // BLOCK[1]
            tiles = w.view(rows, BLOCK[0], columns, BLOCK[1])
            scale = (tiles.abs().amax((1, 3)) / _MAX).contiguous()
            codes = (tiles / scale[:, None, :, None]).to(_FP8).view(self.n, self.k)
        return [QTensor(copy.view(_FP8), scale, block) for copy in self._copies(codes.contiguous())]

    def _quantized_x(self, kind: str) -> QTensor:
        # the specification's bytes, which our quantizers give too
        if kind == "tensor":
            return reference.quantize_per_tensor(self.x)
        if kind == "token":
            return reference.quantize_per_token(self.x)
        return reference.quantize_per_group(self.x, GROUP)

    def _exact(self, weight: str, activation: str) -> Exact:
        w = self.dense()[0].float() if weight == "dense" else _dequantized(self.weights(weight)[0])
        x = self.x.float() if activation == "none" else _dequantized(self.activations(activation))
        y = (x.double() @ w.double().T).float()
        return Exact(y, _relative(y.bfloat16().float() - y, y))


def rows_of(q: QTensor, m: int) -> QTensor:
    """The first m rows."""
    scale = q.scale if q.scale.ndim == 0 else q.scale[:m]
    return QTensor(q.data[:m], scale, q.block)


def slack(accumulate: str, k: int, own_quantizer: bool) -> float:
    """Relative error that an accumulator ("fast", "fp32_128", "fp32") and a quantizer may add."""
    held = {"fast": k, "fp32_128": min(k, 128), "fp32": 0}[accumulate]
    return -(-held // 32) * _PER_SUM + (OTHER_QUANTIZER if own_quantizer else 0.0)


def judge(y: torch.Tensor, exact: Exact, m: int, allowed: float) -> tuple[float, str]:
    """The relative rms error of an output, and what is wrong with it ("" when nothing is).

    Twice the error of rounding to bf16 plus `allowed`, over all; twice that in any one row, and in
    any one column where rows are many, so that one lost row or tile is found among thousands.
    """
    want = exact.y[:m]
    if y.shape != want.shape or y.dtype != torch.bfloat16:
        return float("nan"), f"shape {tuple(y.shape)} {y.dtype}, not {tuple(want.shape)} bf16"
    difference = y.float() - want
    error = _relative(difference, want)
    if not bool(difference.isfinite().all()):
        return error, f"{int((~difference.isfinite()).sum())} elements are not finite"
    bound = 2 * exact.rounding + allowed
    if error > bound:
        return error, f"relative error {error:.3e}, allowed {bound:.3e}"
    for axis, name in ((1, "row"), (0, "column")):
        if axis == 0 and m < 64:
            continue
        each = difference.norm(dim=axis) / want.norm(dim=axis)
        worst = int(each.argmax())
        if each[worst] > 2 * bound:
            found = f"relative error {float(each[worst]):.3e} in {name} {worst}"
            return error, f"{found}, allowed {2 * bound:.3e}"
    return error, ""


def _dequantized(q: QTensor) -> torch.Tensor:
    values = q.data.view(_FP8).float()
    if q.block is None:
        return values * q.scale
    rows, columns = q.block
    m, k = values.shape
    tiles = values.view(m // rows, rows, k // columns, columns)
    return (tiles * q.scale[:, None, :, None]).view(m, k)


def _relative(difference: torch.Tensor, want: torch.Tensor) -> float:
    return float(difference.norm() / want.norm())
