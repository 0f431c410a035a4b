"""q = encode(y / s), y = rms_norm(x + residual) · w: the norm before a linear, and its input.

Who uses it: every decoder layer, twice; it saves writing and reading y. h = x + residual and y are
each rounded to x's dtype, as the unfused operations would do, and h replaces `residual`.

The surprise: this is the only quantizer whose bytes are not the reference's alone. The sum of
squares is taken in an order that depends on the compiler: some 40 fp32 additions deep, it moves y
by at most 2^-19 of itself, which is a unit in the last place of bf16 or fp16 in few values. Data
and scale are exactly those of quantizing that y; `out_norm` gives it. A row's bytes never depend on
its batch.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from anyfp8 import fp8, reference
from anyfp8.errors import InputError
from anyfp8.problem import QTensor
from anyfp8.quantize.launch import Launch, Target, target_of
from anyfp8.quantize.per_group import LAYOUTS, as_bytes
from anyfp8.quantize.plan import planned
from anyfp8.quantize.rows import (
    Rows,
    check_floor,
    check_input,
    check_out,
    data_dtype,
    each_fold,
    next_power_of_2,
    threads_of,
)

WHAT = "normalize and quantize"
# values of a row that stay in registers: 64 fp32 a thread at 16 warps
MAX_TILE = 32768


def norm_per_token(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm_eps: float = 1e-6,
    residual: torch.Tensor | None = None,
    fmt: fp8.Format = fp8.E4M3FN,
    eps: float = fp8.AMAX_FLOOR,
    out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    out_norm: torch.Tensor | None = None,
    pdl: bool = False,
) -> QTensor:
    """RMSNorm (of x + residual), quantized with one scale per row.

    Args:
        x: [..., K] bf16, fp16 or fp32, K up to 32768.
        weight: [K] bf16, fp16 or fp32, contiguous.
        norm_eps: added to the mean of squares.
        residual: [..., K] of x's dtype; replaced by x + residual.
        out_norm: [..., K] of x's dtype, to receive y, such as for a router, which reads it so.
        fmt, eps, out, out_scale, pdl: as in `per_token`.

    Returns:
        QTensor with data [..., K] and scale [..., 1] fp32.

    Raises:
        InputError: dtype, K = 0 or above 32768, a weight, residual or `out` that does not fit, eps
            or norm_eps out of range.
    """
    options = (None, "row", False, norm_eps, fmt, eps, pdl)
    return _norm(x, weight, residual, out_norm, out, out_scale, options)


def norm_per_group(
    x: torch.Tensor,
    weight: torch.Tensor,
    group: int = 128,
    *,
    layout: str = "row",
    ue8m0: bool = False,
    norm_eps: float = 1e-6,
    residual: torch.Tensor | None = None,
    fmt: fp8.Format = fp8.E4M3FN,
    eps: float = fp8.AMAX_FLOOR,
    out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    out_norm: torch.Tensor | None = None,
    pdl: bool = False,
) -> QTensor:
    """RMSNorm (of x + residual), quantized with one scale per `group` columns of a row.

    Args:
        group, layout, ue8m0, out, out_scale: as in `per_group`; the group divides K.
        x, weight, norm_eps, residual, out_norm, fmt, eps, pdl: as in `norm_per_token`.

    Returns:
        QTensor with data [..., K] and the scale as `layout` says, fp32 (int32 for "packed").

    Raises:
        InputError: as `norm_per_token`; an unknown layout, a group that does not divide K.
    """
    options = (group, layout, ue8m0, norm_eps, fmt, eps, pdl)
    return _norm(x, weight, residual, out_norm, out, out_scale, options)


def _norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    out_norm: torch.Tensor | None,
    out: torch.Tensor | None,
    out_scale: torch.Tensor | None,
    options: tuple[Any, ...],
) -> QTensor:
    inputs = (x, weight, *(t for t in (residual, out_norm) if t is not None))
    form = (_norm, residual is None, out_norm is None, *options)
    return planned(
        form,
        inputs,
        out,
        out_scale,
        lambda: _full(x, weight, residual, out_norm, out, out_scale, *options),
    )


def _full(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    out_norm: torch.Tensor | None,
    out: torch.Tensor | None,
    out_scale: torch.Tensor | None,
    group: int | None,
    layout: str,
    ue8m0: bool,
    norm_eps: float,
    fmt: fp8.Format,
    eps: float,
    pdl: bool,
) -> QTensor:
    x = check_input(WHAT, x)
    check_floor(WHAT, eps)
    k = x.shape[-1]
    _check_weight(weight, x, norm_eps)
    g = k if group is None else _checked_group(group, k, layout)
    packed = layout == "packed"
    data = torch.empty(x.shape, dtype=data_dtype(fmt), device=x.device) if out is None else out
    scale = reference.empty_scale(x.shape[:-1], k // g, layout, x.device)
    check_out(WHAT, "out", data, x.shape, (data_dtype(fmt), torch.uint8), x.device, True)
    if out_scale is not None:
        check_out(WHAT, "out_scale", out_scale, scale.shape, (scale.dtype,), x.device)
        scale = out_scale
    for name, tensor in (("residual", residual), ("out_norm", out_norm)):
        if tensor is not None:
            check_out(WHAT, name, tensor, x.shape, (x.dtype,), x.device, True)
    result = QTensor(data, scale, None if group is None else (1, g), fmt, packed)
    target = target_of(x.device)
    if target is not None:
        _launch(target, x, weight, result, g, ue8m0, norm_eps, residual, eps, out_norm, pdl)
        return result
    h = x if residual is None else residual.copy_(reference.add(x, residual))
    y = reference.rms_norm(h, weight, norm_eps)
    if out_norm is not None:
        out_norm.copy_(y)
    q = reference.quantize_per_group(y, g, ue8m0 or packed, fmt, eps)
    result.codes.copy_(q.codes)
    scale.copy_(reference.arrange_scale(q.scale, layout))
    return result


def _launch(
    target: Target,
    x: torch.Tensor,
    weight: torch.Tensor,
    result: QTensor,
    group: int,
    ue8m0: bool,
    norm_eps: float,
    residual: torch.Tensor | None,
    eps: float,
    out_norm: torch.Tensor | None,
    pdl: bool,
) -> None:
    from anyfp8.kernels.quantize_norm import quantize_norm_kernel

    k = x.shape[-1]
    n_groups = k // group
    written = -(-n_groups // 4) * 4 if result.packed else n_groups
    block, groups = next_power_of_2(group), next_power_of_2(written)
    use_pdl = pdl and target.has_pdl
    stored = as_bytes(result.scale) if result.packed else result.scale
    # x stands in for what is not there: it folds as itself
    tensors = [
        x,
        x if residual is None else residual,
        x if out_norm is None else out_norm,
        result.codes,
        stored,
    ]

    def start(rows: Rows, parts: list[torch.Tensor]) -> None:
        names = ("x", "residual", "y", "q", "s")
        strides = {
            f"{name}_{level}": step
            for name, steps in zip(names, rows.strides, strict=True)
            for level, step in zip(("outer", "inner"), steps, strict=True)
        }
        arguments = {
            "x_ptr": parts[0],
            "residual_ptr": None if residual is None else parts[1],
            "weight_ptr": weight,
            "y_ptr": None if out_norm is None else parts[2],
            "q_ptr": parts[3],
            "s_ptr": parts[4],
            "K": k,
            "N_GROUPS": n_groups,
            **strides,
            "s_group": parts[4].stride(-2 if result.packed else -1),
            "columns": float(k),
            "norm_eps": float(norm_eps),
            "floor": float(eps),
        }
        warps = max(1, min(16, groups * block // 512))
        constants = dict(
            **target.numerics(result.fmt),
            **target.maxima(x, block),
            THREADS=threads_of(groups, block, warps),
            G=group,
            BLOCK_G=block,
            GROUPS=groups,
            RESIDUAL=residual is not None,
            STORE_Y=out_norm is not None,
            UE8M0=ue8m0 or result.packed,
            PACKED=result.packed,
            PDL=use_pdl,
        )
        grid = (rows.inner, rows.outer)
        target.run(Launch(quantize_norm_kernel, grid, arguments, constants, warps, use_pdl))

    each_fold(tensors, x.ndim - 1, start)


def _check_weight(weight: torch.Tensor, x: torch.Tensor, norm_eps: float) -> None:
    k = x.shape[-1]
    if (
        tuple(weight.shape) != (k,)
        or weight.dtype not in (torch.bfloat16, torch.float16, torch.float32)
        or weight.device != x.device
        or not weight.is_contiguous()
    ):
        raise InputError(
            f"cannot {WHAT}",
            got=f"weight of shape {tuple(weight.shape)}, {weight.dtype}, on {weight.device}",
            want=f"contiguous [{k}] bf16, fp16 or fp32 on {x.device}",
            hint="the norm's weight has one value for each column of x",
        )
    if k > MAX_TILE:
        raise InputError(
            f"cannot {WHAT}",
            got=f"K={k}",
            want=f"at most {MAX_TILE} columns: a row is kept in registers",
            hint="normalize with torch.nn.functional.rms_norm, then quantize.per_token",
        )
    if not 0 <= norm_eps < math.inf:
        raise InputError(
            f"cannot {WHAT}",
            got=f"norm_eps={norm_eps}",
            want="0 <= norm_eps < inf",
            hint="models use 1e-5 or 1e-6",
        )


def _checked_group(group: int, k: int, layout: str) -> int:
    if layout not in LAYOUTS:
        raise InputError(
            "not a layout of group scales",
            got=repr(layout),
            want=", ".join(LAYOUTS),
            hint="'row' is what a GEMM in PyTorch expects",
        )
    fits = group >= 1 and k % group == 0
    if not fits or next_power_of_2(group) * next_power_of_2(k // group + 3) > 2 * MAX_TILE:
        raise InputError(
            f"cannot {WHAT} per group",
            got=f"K={k}, group={group}",
            want="a group that divides K, and groups that fit in registers",
            hint="128 columns are usual; quantize.per_group allows a shorter last group",
        )
    return group
