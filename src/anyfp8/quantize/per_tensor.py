"""q = encode(x / s) with one scale for all of x: given (static), or computed from x (dynamic).

Who uses it: ModelOpt and static compressed-tensors checkpoints give the scale; MLA and KV caches
compute it. The surprise: x is read twice when the scale is computed, but there is no atomic and no
buffer to clear: each program of the first pass leaves its maximum, each of the second reduces them
all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from anyfp8 import fp8, reference
from anyfp8.errors import InputError
from anyfp8.problem import QTensor
from anyfp8.quantize.launch import Launch, Target, target_of
from anyfp8.quantize.plan import planned
from anyfp8.quantize.rows import (
    Rows,
    check_floor,
    check_input,
    check_out,
    check_scale,
    codes_of,
    data_dtype,
    each_fold,
    next_power_of_2,
)

WHAT = "quantize per tensor"
# programs of the first pass, and so partial maxima: 4 on each of 128 SMs
MAX_PARTS = 512


@dataclass(frozen=True)
class TileConfig:
    """The tile of a program: `rows` × `block_k` elements, `num_warps`."""

    rows: int
    block_k: int
    num_warps: int


def tile_config(elements: int, m: int, k: int) -> TileConfig:
    """8,192 elements a program; 1,024 where that would leave SMs idle."""
    tile = 8192 if elements >= 1 << 21 else 1024
    block_k = tile if m == 1 else min(next_power_of_2(k), tile)
    rows = min(next_power_of_2(m), tile // block_k)
    return TileConfig(rows, block_k, max(1, min(8, rows * block_k // 1024)))


def per_tensor(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    *,
    fmt: fp8.Format = fp8.E4M3FN,
    eps: float = fp8.AMAX_FLOOR,
    out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    nan_to_zero: bool = False,
    pdl: bool = False,
) -> QTensor:
    """Quantize with one scale; scale = max(finite amax, eps) / max of the format where not given.

    On a GPU by Triton kernels, whatever the row strides; on CPU tensors by `reference` (the same
    bytes), unless Triton's interpreter is active. Only an x whose last stride is not 1 is copied.

    Args:
        x: [..., K] bf16, fp16 or fp32.
        scale: one fp32 element: x ≈ q · scale. Its value is the loader's to check: 0 or NaN here
            gives garbage, not an error, because reading it would stall the GPU.
        fmt: of the codes. eps: smallest amax that counts.
        out: [..., K] of the format's dtype or uint8, last stride 1.
        out_scale: one fp32 element to receive the computed scale; only where `scale` is None.
        nan_to_zero: a NaN element becomes 0 instead of the NaN code.
        pdl: launch while the previous kernel drains (SM90+; ignored elsewhere).

    Returns:
        QTensor with data [..., K] and scale [] (the tensor given, reshaped, if one was).

    Raises:
        InputError: dtype, K = 0, a scale or `out` that does not fit, eps out of range.
    """
    options = (fmt, eps, nan_to_zero, pdl)
    # both are refused by the full path
    given = out_scale if scale is None else scale
    origin = (scale is None, out_scale is None)
    return planned(
        (per_tensor, *origin, *options),
        (x,),
        out,
        given,
        lambda: _full(x, scale, out, out_scale, *options),
    )


def _full(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    out: torch.Tensor | None,
    out_scale: torch.Tensor | None,
    fmt: fp8.Format,
    eps: float,
    nan_to_zero: bool,
    pdl: bool,
) -> QTensor:
    x = check_input(WHAT, x)
    check_floor(WHAT, eps)
    if scale is not None:
        check_scale(WHAT, scale, x.device)
        if out_scale is not None:
            raise InputError(
                f"cannot {WHAT} with both scale and out_scale",
                got=f"scale {tuple(scale.shape)} and out_scale {tuple(out_scale.shape)}",
                want="scale (static) or out_scale (dynamic), not both",
                hint="leave out_scale out: a static scale is returned as it was given",
            )
    if out_scale is not None:
        check_scale(WHAT, out_scale, x.device)
    data = torch.empty(x.shape, dtype=data_dtype(fmt), device=x.device) if out is None else out
    if out is not None:
        check_out(WHAT, "out", out, x.shape, (data_dtype(fmt), torch.uint8), x.device, True)
    if scale is not None:
        used = scale.reshape(())
    elif out_scale is not None:
        used = out_scale.reshape(())
    else:
        used = torch.empty((), dtype=torch.float32, device=x.device)
    result = QTensor(data, used, fmt=fmt)
    target = target_of(x.device)
    if target is None:
        values = reference.nan_to_zero(x) if nan_to_zero else x
        q = reference.quantize_per_tensor(values, scale, fmt, eps)
        result.codes.copy_(q.codes)
        if scale is None:
            used.copy_(q.scale)
        return result
    parts = None
    if scale is None:
        parts = _partial_amax(target, x)
    launch_scaled(
        target,
        x,
        result.codes,
        fmt,
        scale=used,
        parts=parts,
        eps=eps,
        nan_to_zero=nan_to_zero,
        pdl=pdl,
    )
    return result


def _partial_amax(target: Target, x: torch.Tensor) -> torch.Tensor:
    """[P] fp32 maxima that together cover x; [1] zero for an empty x."""
    from anyfp8.kernels.quantize_tensor import amax_kernel

    found: list[torch.Tensor] = []

    def start(rows: Rows, tensors: list[torch.Tensor]) -> None:
        rows, k = _as_one_row(rows, tensors[0].shape[-1])
        c = tile_config(x.numel(), rows.inner, k)
        tiles = rows.outer * -(-rows.inner // c.rows) * -(-k // c.block_k)
        parts = torch.empty(min(tiles, MAX_PARTS), dtype=torch.float32, device=x.device)
        (x_outer, x_inner), *_ = rows.strides
        arguments = {
            "x_ptr": tensors[0],
            "amax_ptr": parts,
            "M": rows.inner,
            "K": k,
            "OUTER": rows.outer,
            "x_outer": x_outer,
            "x_inner": x_inner,
        }
        constants = {"ROWS": c.rows, "BLOCK_K": c.block_k}
        target.run(Launch(amax_kernel, (len(parts),), arguments, constants, c.num_warps))
        found.append(parts)

    each_fold([x], x.ndim - 1, start)
    if not found:
        return torch.zeros(1, dtype=torch.float32, device=x.device)
    if len(found) == 1:
        return found[0]
    # x has three or more independent levels of strides: gather the maxima of its parts
    return torch.cat(found).amax(0, keepdim=True)


def _as_one_row(rows: Rows, k: int) -> tuple[Rows, int]:
    """Rows that follow each other without a gap are one long row: no edge inside."""
    if rows.outer == 1 and all(inner == k for _, inner in rows.strides):
        flat = Rows(1, 1, tuple((0, 0) for _ in rows.strides))
        return flat, rows.inner * k
    return rows, k


def launch_scaled(
    target: Target,
    x: torch.Tensor,
    codes: torch.Tensor,
    fmt: fp8.Format,
    *,
    scale: torch.Tensor | None = None,
    parts: torch.Tensor | None = None,
    inverse: float = 1.0,
    eps: float = fp8.AMAX_FLOOR,
    nan_to_zero: bool = False,
    pdl: bool = False,
) -> None:
    """codes = encode(x · inverse): the inverse of `scale`, of the amax in `parts`, or a number."""
    from anyfp8.kernels.quantize_tensor import quantize_scaled_kernel

    mode = "amax" if parts is not None else "number" if scale is None else "given"

    def start(rows: Rows, tensors: list[torch.Tensor]) -> None:
        rows, k = _as_one_row(rows, tensors[0].shape[-1])
        c = tile_config(x.numel(), rows.inner, k)
        (x_outer, x_inner), (q_outer, q_inner) = rows.strides
        n_parts = 1 if parts is None else len(parts)
        arguments = {
            "x_ptr": tensors[0],
            "q_ptr": tensors[1],
            "s_ptr": scale,
            "amax_ptr": parts,
            "M": rows.inner,
            "K": k,
            "PARTS": n_parts,
            "x_outer": x_outer,
            "x_inner": x_inner,
            "q_outer": q_outer,
            "q_inner": q_inner,
            "inverse": float(inverse),
            "floor": float(eps),
        }
        constants = dict(
            **target.numerics(fmt),
            SCALE=mode,
            BLOCK_PARTS=MAX_PARTS,
            ROWS=c.rows,
            BLOCK_K=c.block_k,
            NAN_TO_ZERO=nan_to_zero,
            PDL=pdl and target.has_pdl,
        )
        grid = (-(-rows.inner // c.rows) * -(-k // c.block_k), rows.outer)
        use_pdl = constants["PDL"]
        target.run(Launch(quantize_scaled_kernel, grid, arguments, constants, c.num_warps, use_pdl))

    each_fold([x, codes], x.ndim - 1, start)
    if x.numel() == 0 and parts is not None and scale is not None:
        # no program writes the scale of nothing: it is the floor's
        scale.copy_(reference.scale_of(parts[0], fmt, eps=eps))


def cast(
    x: torch.Tensor,
    inverse_scale: float = 1.0,
    *,
    fmt: fp8.Format = fp8.E4M3FN,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """encode(x · inverse_scale) with a number for the scale: no tensor is read but x.

    Args:
        x: [..., K] bf16, fp16 or fp32, such as a last-dimension slice of a wider tensor.
        inverse_scale: a finite number, rounded to fp32.
        fmt: e4m3fn, e5m2 or e4m3fnuz.
        out: [..., K] of the format's dtype or uint8, last stride 1.

    Returns:
        [..., K] of the format's dtype (or `out`).

    Raises:
        InputError: dtype, K = 0, an inverse_scale that is not finite, an `out` that does not fit.
    """
    what = "cast to FP8"
    x = check_input(what, x)
    if not math.isfinite(inverse_scale):
        raise InputError(
            f"cannot {what}",
            got=f"inverse_scale={inverse_scale}",
            want="a finite number",
            hint="1 / scale, or 1.0 to convert without a scale; the scale itself may be 0 or NaN",
        )
    data = torch.empty(x.shape, dtype=data_dtype(fmt), device=x.device) if out is None else out
    if out is not None:
        check_out(what, "out", out, x.shape, (data_dtype(fmt), torch.uint8), x.device, True)
    target = target_of(x.device)
    if target is None:
        factor = torch.tensor(inverse_scale, dtype=torch.float32)
        codes_of(data).copy_(fp8.encode(x.float() * factor, fmt))
    else:
        launch_scaled(target, x, codes_of(data), fmt, inverse=inverse_scale, pdl=pdl)
    return data
