"""One layer's random operands and the exact product, on which every candidate is judged.

Rows, columns, blocks and groups all have scales of their own, so that a kernel that mixes two up is
wrong by tens of percent. Made in parts of rows: a large weight in fp32 would not fit beside itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from anyfp8 import reference
from anyfp8.gemm.base import Backend, CanonicalWeight, PreparedWeight, canonical_weight
from anyfp8.linear.dispatch import quantize_activation
from anyfp8.problem import DTYPES, QTensor, Scheme

# elements of the weight that are in fp32 at a time
_PART = 1 << 26
# a static scale: rows of x reach about 30, and few are clipped
_STATIC = 0.05
# relative error that a short accumulator adds for each sum of 32 products: see testing_gemm
_PER_SUM = 2.0**-14


@dataclass(frozen=True, eq=False)
class Exact:
    """The product of dequantized operands [M, N] fp32; relative rms error of rounding it."""

    y: torch.Tensor
    rounding: float


class Data:
    """Copies of one weight, activations for up to `m` rows, and exact products.

    Attributes:
        x: [m, K] 16-bit. copies: of the weight, so many that each call finds the L2 cold.
    """

    def __init__(
        self, scheme: Scheme, n: int, k: int, m: int, dtype: str, place: str, copies: int, seed: int
    ) -> None:
        self.scheme, self.n, self.k, self.m = scheme, n, k, m
        self.dtype, self.place = dtype, torch.device(place)
        self._generator = torch.Generator(device=self.place).manual_seed(seed)
        columns = torch.exp(0.3 * self._normal(1, -(-k // 32)))
        self._columns = columns.repeat_interleave(32, 1)[:, :k]
        x = self._normal(m, k) * torch.exp(0.5 * self._normal(m, 1))
        groups = torch.exp(0.5 * self._normal(m, -(-k // (scheme.group or k))))
        x *= groups.repeat_interleave(scheme.group or k, 1)[:, :k]
        self.x = x.to(DTYPES[dtype])
        self.input_scale = torch.tensor(_STATIC, device=self.place)
        first = self._weight()
        codes = [first.codes] + [first.codes.clone() for _ in range(copies - 1)]
        self.weights = [QTensor(c.view(first.data.dtype), first.scale, first.block) for c in codes]
        self._kept: dict[object, Any] = {}

    def quantized(self, m: int) -> QTensor:
        """The first m rows as a layer quantizes them."""
        return self._once(("x", m), lambda: self.quantize(m))

    def quantize(self, m: int) -> QTensor:
        static = self.input_scale if self.scheme.activation == "tensor" else None
        return quantize_activation(self.x[:m], self.scheme, static)

    def prepared(self, owner: Backend, layout: str) -> list[PreparedWeight]:
        """The copies as a backend stores them; of other layouts than the canonical one, the last
        asked for is kept."""
        if layout == "canonical":
            made = lambda: [canonical_weight(w, self.scheme) for w in self.weights]  # noqa: E731
            return self._once("canonical", made)
        if ("other", owner.name) not in self._kept:
            for key in [k for k in self._kept if isinstance(k, tuple) and k[0] == "other"]:
                del self._kept[key]
        return self._once(
            ("other", owner.name),
            lambda: [owner.prepare(w, self.scheme, self.dtype) for w in self.weights],
        )

    def judge(self, y: torch.Tensor, m: int, quantized: bool, accumulate: str) -> str:
        """What is wrong with a product of the first m rows, "" when nothing is.

        At most twice the error of rounding the exact product, plus what a short accumulator adds;
        twice that in any one row and, where there are many, in any one column.
        """
        exact = self._exact(m, quantized)
        want = exact.y[:m]
        if y.shape != want.shape or y.dtype != self.x.dtype:
            return f"gives {tuple(y.shape)} {y.dtype}, not {tuple(want.shape)} {self.x.dtype}"
        difference = y.float() - want
        lost = int((~difference.isfinite()).sum())
        if lost:
            return f"gives {lost} elements that are not finite"
        held = 0 if not quantized else self.k if accumulate == "fast" else min(self.k, 128)
        bound = 2 * exact.rounding + -(-held // 32) * _PER_SUM
        error = float(difference.norm() / want.norm())
        if error > bound:
            return f"errs by {error:.2e}, allowed {bound:.2e}"
        for axis, name in ((1, "row"), (0, "column")):
            if axis == 0 and m < 64:
                continue
            each = difference.norm(dim=axis) / want.norm(dim=axis)
            worst = int(each.argmax())
            if each[worst] > 2 * bound:
                return (
                    f"errs by {float(each[worst]):.2e} in {name} {worst}, allowed {2 * bound:.2e}"
                )
        return ""

    def _exact(self, m: int, quantized: bool) -> Exact:
        scheme = self.scheme
        # only one scale for all rows depends on how many they are
        own = m if quantized and (scheme.activation, scheme.dynamic) == ("tensor", True) else self.m
        return self._once(("exact", own, quantized), lambda: self._multiplied(own, quantized))

    def _multiplied(self, m: int, quantized: bool) -> Exact:
        x = reference.dequantize(self.quantize(m)) if quantized else self.x[:m].float()
        y = torch.empty(m, self.n, device=self.place)
        stored = canonical_weight(self.weights[0], self.scheme)
        for rows in self._parts():
            # fp32 sums err by 1e-6, which is nothing beside rounding to 16 bits
            y[:, rows] = x @ reference.dequantize(_rows_of(stored, rows, self.scheme)).T
        difference = y.to(self.x.dtype).float() - y
        return Exact(y, float(difference.norm() / y.norm()))

    def _once(self, key: object, make: Callable[[], Any]) -> Any:
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def _weight(self) -> QTensor:
        scheme, n, k = self.scheme, self.n, self.k
        codes = torch.empty(n, k, dtype=torch.uint8, device=self.place)
        scales = []
        for rows in self._parts():
            w = self._normal(rows.stop - rows.start, k) * self._columns / k**0.5
            w *= torch.exp(self._normal(len(w), 1))
            if scheme.weight == "tensor":
                q = reference.quantize_per_tensor(w, torch.tensor(0.02, device=self.place))
                scales = [q.scale]
            else:
                q = reference.quantize_weight(w, scheme)
                scales.append(q.scale)
            codes[rows] = q.codes
        block = scheme.block
        scale = scales[0] if scheme.weight == "tensor" else torch.cat(scales)
        return QTensor(codes.view(torch.float8_e4m3fn), scale, block)

    def _parts(self) -> Iterator[slice]:
        step = self.scheme.block[0] if self.scheme.block else 128
        rows = max(1, _PART // (self.k * step)) * step
        for start in range(0, self.n, rows):
            yield slice(start, min(start + rows, self.n))

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator, device=self.place)


def _rows_of(stored: CanonicalWeight, rows: slice, scheme: Scheme) -> QTensor:
    scale = stored.scale
    if scheme.block is not None:
        scale = scale[rows.start // scheme.block[0] : -(-rows.stop // scheme.block[0])]
    elif scheme.weight == "channel":
        scale = scale[rows]
    return QTensor(stored.codes[rows].view(torch.float8_e4m3fn), scale, scheme.block)
