"""[..., K] as at most [outer, inner, K] by strides, and the checks that every quantizer makes.

Kernels walk two levels of rows, which covers contiguous tensors, slices of the last dimension and
transposed [heads, tokens, K]. What has more independent levels is walked level by level, one launch
each: never by a hidden copy. The one copy made is of an x whose last dimension is not contiguous.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from anyfp8 import fp8
from anyfp8.errors import InputError

# the y axis of a CUDA grid
MAX_OUTER = 65535


@dataclass(frozen=True)
class Rows:
    """Two levels of rows; `strides[i]` holds (outer, inner) strides of tensor i, in elements."""

    outer: int
    inner: int
    strides: tuple[tuple[int, int], ...]


@functools.lru_cache(maxsize=4096)
def fold(shape: tuple[int, ...], *strides: tuple[int, ...]) -> Rows | None:
    """Merge leading dimensions that lie evenly in every tensor; None where three levels remain."""
    levels: list[tuple[int, tuple[int, ...]]] = []
    for size, steps in zip(shape, zip(*strides, strict=True), strict=True):
        if size == 1:
            continue
        if levels and levels[-1][1] == tuple(size * step for step in steps):
            levels[-1] = (levels[-1][0] * size, steps)
        else:
            levels.append((size, steps))
    if len(levels) > 2:
        return None
    flat = (1, (0,) * len(strides))
    levels = [flat] * (2 - len(levels)) + levels
    if levels[0][0] > MAX_OUTER:
        levels.reverse()
    if levels[0][0] > MAX_OUTER:
        return None
    (outer, far), (inner, near) = levels
    return Rows(outer, inner, tuple(zip(far, near, strict=True)))


def each_fold(
    tensors: Sequence[torch.Tensor], leading: int, call: Callable[[Rows, list[torch.Tensor]], None]
) -> None:
    """Call with the folded rows of tensors that share `leading` dimensions; once where they fold.

    Args:
        tensors: the first gives the shape; all are indexed by the same leading dimensions.
        leading: how many dimensions count rows.
    """
    shape = tuple(tensors[0].shape[:leading])
    if math.prod(shape) == 0:
        return
    rows = fold(shape, *(t.stride()[:leading] for t in tensors))
    if rows is not None:
        call(rows, list(tensors))
        return
    for i in range(shape[0]):
        each_fold([t[i] for t in tensors], leading - 1, call)


def check_input(what: str, x: torch.Tensor) -> torch.Tensor:
    """x ready for a kernel: dtype and shape checked, last dimension contiguous (copied if not).

    Raises:
        InputError: x is no fp32, bf16 or fp16 tensor, has no dimension, or K = 0.
    """
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise InputError(
            f"cannot {what}",
            got=f"x of dtype {x.dtype}, shape {tuple(x.shape)}",
            want="torch.bfloat16, torch.float16 or torch.float32",
            hint="x.to(torch.bfloat16)",
        )
    if x.ndim == 0 or x.shape[-1] == 0:
        raise InputError(
            f"cannot {what}",
            got=f"x of shape {tuple(x.shape)}",
            want="at least one dimension and K >= 1 columns (no rows at all are fine)",
            hint="there is nothing to scale in an empty row; skip the layer",
        )
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def check_floor(what: str, floor: float) -> None:
    """The smallest amax that counts. Raises InputError unless 1e-30 <= floor < inf."""
    if not 1e-30 <= floor < math.inf:
        raise InputError(
            f"cannot {what}",
            got=f"eps={floor}",
            want="1e-30 <= eps < inf, so that the scale and its inverse are normal fp32 numbers",
            hint="leave eps at its default of 1e-10",
        )


def check_scale(what: str, scale: torch.Tensor, device: torch.device) -> None:
    """A static scale. Its value is checked when a checkpoint is loaded, not per call.

    Raises:
        InputError: not one fp32 element on x's device.
    """
    if scale.dtype != torch.float32 or scale.numel() != 1 or scale.device != device:
        raise InputError(
            f"cannot {what}",
            got=f"scale of shape {tuple(scale.shape)}, {scale.dtype}, on {scale.device}",
            want=f"one element, torch.float32, on {device}",
            hint="torch.tensor(scale, dtype=torch.float32, device=x.device)",
        )


def codes_of(data: torch.Tensor) -> torch.Tensor:
    """The bytes of FP8 data; kernels never see an FP8 pointer, which SM80 cannot compile."""
    return data if data.dtype == torch.uint8 else data.view(torch.uint8)


def data_dtype(fmt: fp8.Format) -> torch.dtype:
    """The torch dtype of the format's data, or uint8 where this torch has none."""
    return getattr(torch, f"float8_{fmt.name}", torch.uint8)


def check_out(
    what: str,
    name: str,
    out: torch.Tensor,
    shape: Sequence[int],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    unit_last_stride: bool = False,
) -> None:
    """An `out=` tensor. Raises InputError for a wrong shape, dtype, device or layout."""
    wrong = tuple(out.shape) != tuple(shape) or out.dtype not in dtypes or out.device != device
    if not wrong and unit_last_stride:
        wrong = out.shape[-1] > 1 and out.stride(-1) != 1
    if wrong or _overlaps(out):
        raise InputError(
            f"cannot {what}",
            got=f"{name} of shape {tuple(out.shape)}, {out.dtype}, on {out.device}, "
            f"strides {tuple(out.stride())}",
            want=f"shape {tuple(shape)}, {' or '.join(str(d) for d in dtypes)}, on {device}"
            + (", last stride 1" if unit_last_stride else "")
            + ", no element written twice",
            hint=f"leave {name} out and it is allocated",
        )


def _overlaps(out: torch.Tensor) -> bool:
    reach = 1
    for stride, size in sorted(zip(out.stride(), out.shape, strict=True)):
        if size == 1:
            continue
        if stride < reach:
            return out.numel() > 1
        reach = stride * (size - 1) + reach
    return False


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def threads_of(rows: int, columns: int, num_warps: int) -> int:
    """Threads that share a row of a [rows, columns] tile of 16-bit values, as Triton deals it out.

    A thread takes up to 16 neighbouring columns, the bytes of one store; threads go along rows
    first.
    """
    threads = 32 * num_warps
    together = max(2, min(16, rows * columns // threads))
    return max(1, min(threads, columns // together))
