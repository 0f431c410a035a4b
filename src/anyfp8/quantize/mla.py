"""q = encode(x / s) in the two shapes that absorbed MLA multiplies: [heads, tokens, dim], grouped.

Who uses it: DeepSeek's multi-head latent attention, whose absorbed projections are batched FP8
GEMMs. Per tensor, x comes as a transposed view and is never copied. Per group, the rows of each
batch are padded to whole tiles of a masked grouped GEMM, and the kernel also writes `masked_m`, its
count of valid rows. The surprise: padding rows of data and scale hold anything.
"""

from __future__ import annotations

import torch

from anyfp8 import fp8, reference
from anyfp8.errors import InputError
from anyfp8.problem import QTensor
from anyfp8.quantize.launch import target_of
from anyfp8.quantize.per_group import GroupConfig, launch_groups
from anyfp8.quantize.per_tensor import per_tensor
from anyfp8.quantize.rows import MAX_OUTER, check_floor, check_input, data_dtype

# the largest tile of rows that DeepGEMM's masked kernels take
MASKED_ROWS = 256
WHAT = "quantize per token group for a masked GEMM"


def mla_per_tensor(
    x: torch.Tensor,
    *,
    fmt: fp8.Format = fp8.E4M3FN,
    eps: float = fp8.AMAX_FLOOR,
    out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    nan_to_zero: bool = False,
    pdl: bool = False,
) -> QTensor:
    """Quantize all heads with one scale, in two stages: amax, then quantize.

    Args:
        x: [heads, tokens, dim] bf16, fp16 or fp32 of any head and token strides, such as the
            transpose of [tokens, heads, dim].
        out: [heads, tokens, dim] of the format's dtype or uint8, last stride 1.
        out_scale: one fp32 element to receive the scale; it need not be cleared.
        fmt, eps, nan_to_zero, pdl: as in `per_tensor`.

    Returns:
        QTensor with data [heads, tokens, dim], contiguous, and scale [].

    Raises:
        InputError: x is not three-dimensional; and as `per_tensor` does.
    """
    _check_three("quantize per tensor for MLA", x, "[heads, tokens, dim]")
    return per_tensor(
        x, fmt=fmt, eps=eps, out=out, out_scale=out_scale, nan_to_zero=nan_to_zero, pdl=pdl
    )


def mla_per_group(
    x: torch.Tensor,
    group: int = 128,
    *,
    pad_rows_to: int = MASKED_ROWS,
    ue8m0: bool = False,
    packed: bool = False,
    fmt: fp8.Format = fp8.E4M3FN,
    eps: float = fp8.AMAX_FLOOR,
    nan_to_zero: bool = False,
    pdl: bool = False,
    config: GroupConfig | None = None,
) -> tuple[QTensor, torch.Tensor]:
    """Quantize per token group into rows padded for a masked grouped GEMM.

    Args:
        x: [batch, tokens, K] bf16, fp16 or fp32 of any batch and token strides.
        group: columns a scale covers; it divides K.
        pad_rows_to: tokens are padded to a multiple of this: the GEMM's largest tile of rows.
        ue8m0: round scales up to powers of two, and quantize with the rounded ones.
        packed: store the exponents of such scales, four groups to an int32.
        fmt, eps, nan_to_zero, pdl, config: as in `per_group`.

    Returns:
        QTensor with data [batch, padded, K] and scale [batch, padded, K/group] fp32 whose rows are
        the fastest axis (int32 [batch, padded, ceil(K/group/4)] if packed); and masked_m [batch]
        int32, the number of valid rows, which is `tokens` everywhere.

    Raises:
        InputError: dtype, K = 0, not three dimensions, a group that does not divide K, a padding
            below 1, more than 65535 batches, eps out of range.
    """
    _check_three(WHAT, x, "[batch, tokens, K]")
    x = check_input(WHAT, x)
    check_floor(WHAT, eps)
    batch, m, k = x.shape
    if not 1 <= group <= 8192 or k % group:
        raise InputError(
            f"cannot {WHAT}",
            got=f"K={k}, group={group}",
            want="a group of 1 to 8192 columns that divides K",
            hint="128 is what DeepGEMM reads",
        )
    if pad_rows_to < 1 or batch > MAX_OUTER:
        raise InputError(
            f"cannot {WHAT}",
            got=f"pad_rows_to={pad_rows_to}, {batch} batches",
            want=f"pad_rows_to >= 1 and at most {MAX_OUTER} batches",
            hint=f"pad_rows_to={MASKED_ROWS}; quantize the batches in parts",
        )
    padded = -(-m // pad_rows_to) * pad_rows_to
    layout = "packed" if packed else "column"
    data = torch.empty((batch, padded, k), dtype=data_dtype(fmt), device=x.device)
    scale = reference.empty_scale((batch, padded), k // group, layout, x.device)
    counts = torch.empty(batch, dtype=torch.int32, device=x.device)
    whole = QTensor(data, scale, (1, group), fmt, packed)
    target = target_of(x.device)
    if m == 0:
        return whole, counts.zero_()
    if target is None:
        values = reference.nan_to_zero(x) if nan_to_zero else x
        q, valid = reference.quantize_mla_per_group(
            values, group, pad_rows_to, ue8m0 or packed, fmt, eps
        )
        whole.codes.copy_(q.codes)
        scale.copy_(reference.arrange_scale(q.scale, layout))
        counts.copy_(valid)
        return whole, counts
    launch_groups(
        target,
        x,
        QTensor(data[:, :m], scale[:, :m], (1, group), fmt, packed),
        ue8m0=ue8m0 or packed,
        counts=counts,
        counts_mode="write",
        eps=eps,
        silu_mul=False,
        nan_to_zero=nan_to_zero,
        pdl=pdl,
        config=config,
    )
    return whole, counts


def _check_three(what: str, x: torch.Tensor, shape: str) -> None:
    if x.ndim != 3:
        raise InputError(
            f"cannot {what}",
            got=f"x of shape {tuple(x.shape)}",
            want=shape,
            hint="x.view(...) to three dimensions; quantize.per_tensor and per_group take any",
        )
