"""q[r, gG:(g+1)G] = encode(x[r, gG:(g+1)G] / s[r, g]): one scale per G columns of a row.

Who uses it: DeepSeek-style block checkpoints (G = 128), MX formats (G = 32, powers of two). The
surprise is the scales' layout, which each GEMM wants its own way; `LAYOUTS` lists them and the
kernel writes each directly. The padding rows of the aligned layouts hold anything.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from anyfp8 import fp8, reference
from anyfp8.errors import InputError
from anyfp8.problem import QTensor
from anyfp8.quantize.launch import Launch, Target, target_of
from anyfp8.quantize.per_token import halved
from anyfp8.quantize.plan import planned
from anyfp8.quantize.rows import (
    MAX_OUTER,
    Rows,
    check_floor,
    check_input,
    check_out,
    data_dtype,
    each_fold,
    next_power_of_2,
    threads_of,
)

WHAT = "quantize per token group"
LAYOUTS = reference.SCALE_LAYOUTS


@dataclass(frozen=True)
class GroupConfig:
    """The tile of a program: `rows` rows of `groups` groups, `num_warps`."""

    rows: int
    groups: int
    num_warps: int


# (most values of a tensor, values of a program, its warps), from groups of 128 on an H200. Few
# values are bound by the instructions that each launch fetches: (1024, 8) has 65 and takes 1.24 µs
# for 16 rows of 4096 columns, (512, 4) and (1024, 4) 1.30. Between: (2048, 4) 1.67, (4096, 8) 1.67
# to 1.68, (1024, 1) 1.78 for 256 rows; (4096, 4) 7.80, (1024, 1) 7.87, (2048, 4) 7.96 for 2048.
# Many: (1024, 1) 13.91, (2048, 4) 14.09 for 4096 rows
_ROW_TILES = (
    (5 << 16, 1024, 8),
    (7 << 19, 2048, 4),
    (7 << 20, 1024, 1),
    (11 << 20, 4096, 4),
    (math.inf, 1024, 1),
)
# with the rows of a program: (8, 1024, 8) 1.27, (8, 1024, 1) 1.33 µs for 16 rows; 1.40 with
# (8, 1024, 1), 1.43 with (4, 2048, 4) for 64; 1.74 with (4, 2048, 4), 1.75 with eight rows, 1.86
# with (8, 1024, 1) for 256
_COLUMN_TILES = (
    (5 << 15, 8, 1024, 8),
    (9 << 15, 8, 1024, 1),
    (5 << 18, 4, 2048, 4),
    (math.inf, 8, 1024, 1),
)
# values of a tensor from which threads of 32 values replace NaN in the codes: transposed, 64 rows
# of 4096 columns take 0.7 % so, and 1.4 to 1.7 before; row-major, 256 rows 2.2 and 1.6 to 2.0
_CODES_FROM = 7 << 17


@functools.lru_cache(maxsize=4096)
def group_config(
    m: int, n_groups: int, group: int, rows_fastest: bool = False, outer: int = 1
) -> GroupConfig:
    """Four values a thread while all fit on the GPU at once, so that every SM has some; then more.

    Args:
        m: rows of the inner level. outer: of the outer level.
    """
    block = next_power_of_2(group)
    total = outer * m * n_groups * block
    if rows_fastest:
        most_rows, values, warps = next(tile for most, *tile in _COLUMN_TILES if total <= most)
        items = max(1, values // block)
        # a warp's scale stores touch as many neighbours
        rows = min(most_rows, next_power_of_2(m))
        across = min(max(1, items // rows), next_power_of_2(n_groups))
    else:
        values, warps = next(tile for most, *tile in _ROW_TILES if total <= most)
        items = max(1, values // block)
        across = min(items, next_power_of_2(n_groups))
        rows = min(items // across, next_power_of_2(m))
    return GroupConfig(rows, across, max(1, min(warps, rows * across * block // 128)))


def per_group(
    x: torch.Tensor,
    group: int = 128,
    *,
    layout: str = "row",
    ue8m0: bool = False,
    fmt: fp8.Format = fp8.E4M3FN,
    eps: float = fp8.AMAX_FLOOR,
    counts: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    silu_mul: bool = False,
    nan_to_zero: bool = False,
    pdl: bool = False,
    config: GroupConfig | None = None,
) -> QTensor:
    """Quantize with one scale per `group` columns of a row.

    On a GPU by the Triton kernel, whatever the row strides; on CPU tensors by `reference` (the same
    bytes), unless Triton's interpreter is active. Only an x whose last stride is not 1 is copied.

    Args:
        x: [..., M, K] bf16, fp16 or fp32; [..., M, 2K] with `silu_mul`; [experts, tokens, K] with
            `counts`.
        group: columns a scale covers; the last group of a row is shorter where it does not divide
            K,
            which the layouts "tma" and "packed" do not allow.
        layout: of the scale [..., M, K/group]: "row" (row-major), "column" (transposed storage),
            "tma" (transposed, rows padded to a multiple of 4) or "packed" (UE8M0 exponents, four
            groups to an int32, stored as "tma").
        ue8m0: round scales up to powers of two, and quantize with the rounded ones; implied by
            "packed".
        counts: [experts] int32, valid rows of each expert; other rows are left unwritten.
        out, out_scale: as returned, with any strides that write no element twice; data's last is 1.
        fmt, eps, silu_mul, nan_to_zero, pdl: as in `per_token`.

    Returns:
        QTensor with data [..., M, K] and the scale as `layout` says, fp32 (int32 for "packed").

    Raises:
        InputError: dtype, K = 0, an unknown layout, a group the layout does not allow, an `out` or
            `counts` that does not fit, eps out of range.
    """
    options = (group, layout, ue8m0, fmt, eps, silu_mul, nan_to_zero, pdl, config)
    inputs = (x,) if counts is None else (x, counts)
    return planned(
        (per_group, *options),
        inputs,
        out,
        out_scale,
        lambda: _full(x, counts, out, out_scale, *options),
    )


def _full(
    x: torch.Tensor,
    counts: torch.Tensor | None,
    out: torch.Tensor | None,
    out_scale: torch.Tensor | None,
    group: int,
    layout: str,
    ue8m0: bool,
    fmt: fp8.Format,
    eps: float,
    silu_mul: bool,
    nan_to_zero: bool,
    pdl: bool,
    config: GroupConfig | None,
) -> QTensor:
    x = check_input(WHAT, x)
    check_floor(WHAT, eps)
    k = halved(WHAT, x.shape[-1]) if silu_mul else x.shape[-1]
    _check_group(group, k, layout)
    if counts is not None:
        _check_counts(counts, x)
    packed = layout == "packed"
    shape = (*x.shape[:-1], k)
    n_groups = -(-k // group)
    data = torch.empty(shape, dtype=data_dtype(fmt), device=x.device) if out is None else out
    scale = reference.empty_scale(x.shape[:-1], n_groups, layout, x.device)
    if out is not None:
        check_out(WHAT, "out", out, shape, (data_dtype(fmt), torch.uint8), x.device, True)
    if out_scale is not None:
        check_out(WHAT, "out_scale", out_scale, scale.shape, (scale.dtype,), x.device)
        scale = out_scale
    result = QTensor(data, scale, (1, group), fmt, packed)
    target = target_of(x.device)
    if target is None:
        values = reference.silu_mul(x) if silu_mul else x
        values = reference.nan_to_zero(values) if nan_to_zero else values
        q = reference.quantize_per_group(values, group, ue8m0 or packed, fmt, eps)
        filled = reference.arrange_scale(q.scale, layout)
        if counts is None:
            result.codes.copy_(q.codes)
            scale.copy_(filled)
        else:
            for expert, count in enumerate(counts.tolist()):
                result.codes[expert, :count] = q.codes[expert, :count]
                scale[expert, :count] = filled[expert, :count]
        return result
    launch_groups(
        target,
        x,
        result,
        ue8m0=ue8m0 or packed,
        counts=counts,
        counts_mode="none" if counts is None else "read",
        eps=eps,
        silu_mul=silu_mul,
        nan_to_zero=nan_to_zero,
        pdl=pdl,
        config=config,
    )
    return result


def launch_groups(
    target: Target,
    x: torch.Tensor,
    result: QTensor,
    *,
    ue8m0: bool,
    counts: torch.Tensor | None,
    counts_mode: str,
    eps: float,
    silu_mul: bool,
    nan_to_zero: bool,
    pdl: bool,
    config: GroupConfig | None,
) -> None:
    """Start the group kernel on checked tensors; `counts_mode` is "none", "read" or "write"."""
    from anyfp8.kernels.quantize_group import quantize_group_kernel

    assert result.block is not None
    group, k = result.block[1], result.data.shape[-1]
    n_groups = -(-k // group)
    scale = result.scale
    # bytes of the packed words, so that a program writes its own groups only
    stored = as_bytes(scale) if result.packed else scale
    leading = x.ndim - 1

    def start(rows: Rows, tensors: list[torch.Tensor]) -> None:
        (x_outer, x_inner), (q_outer, q_inner), (s_outer, s_inner) = rows.strides
        s_group = tensors[2].stride(-2 if result.packed else -1)
        rows_fastest = rows.inner > 1 and s_inner < s_group
        c = config or group_config(rows.inner, n_groups, group, rows_fastest, rows.outer)
        block = next_power_of_2(group)
        threads = threads_of(c.rows * c.groups, block, c.num_warps)
        written = -(-n_groups // 4) * 4 if result.packed else n_groups
        maxima = target.maxima(x, block)
        values = rows.outer * rows.inner * n_groups * block
        nan_form = _nan_form(c, block, threads, values) if maxima["PACKED_MAX"] else "codes"
        whole = block == group and k % group == 0 and written % c.groups == 0 and not result.packed
        grid = (-(-written // c.groups), -(-rows.inner // c.rows), rows.outer)
        rows_first = grid[1] > MAX_OUTER
        if rows_first:
            grid = (grid[1], grid[0], grid[2])
        one_level = rows.outer == 1
        arguments = {
            "x_ptr": tensors[0],
            "q_ptr": tensors[1],
            "s_ptr": tensors[2],
            "counts_ptr": counts,
            "M": rows.inner,
            "K": k,
            "N_GROUPS": n_groups,
            "x_outer": None if one_level else x_outer,
            "x_inner": x_inner,
            "q_outer": None if one_level else q_outer,
            "q_inner": None if q_inner == x_inner else q_inner,
            "s_outer": None if one_level else s_outer,
            "s_inner": s_inner,
            "s_group": None if s_group == 1 else s_group,
            "floor": float(eps),
        }
        constants = dict(
            **target.numerics(result.fmt),
            **maxima,
            WHOLE=whole,
            SPARE=c.rows * c.groups * block < 32 * c.num_warps,
            G=group,
            BLOCK_G=block,
            ROWS=c.rows,
            GROUPS=c.groups,
            THREADS=threads,
            ROWS_FASTEST=rows_fastest and c.rows > 1,
            ROWS_FIRST=rows_first,
            UE8M0=ue8m0,
            PACKED=result.packed,
            COUNTS=counts_mode,
            SILU_MUL=silu_mul,
            NAN_TO_ZERO=nan_to_zero and nan_form,
            PDL=pdl and target.has_pdl,
        )
        use_pdl = constants["PDL"]
        launch = Launch(quantize_group_kernel, grid, arguments, constants, c.num_warps, use_pdl)
        target.run(launch)

    tensors = [x, result.codes, stored]
    if counts is None:
        each_fold(tensors, leading, start)
    elif x.shape[0] and x.shape[1]:
        # the experts must stay the outer level, however evenly the rows lie
        strides = tuple((t.stride(0), t.stride(1)) for t in tensors)
        start(Rows(x.shape[0], x.shape[1], strides), tensors)


def _nan_form(config: GroupConfig, block: int, threads: int, values: int) -> str:
    """How the kernel replaces NaN of 16-bit values where `threads` share a group's columns."""
    of_thread = config.rows * config.groups * block // (32 * config.num_warps)
    if of_thread == 16 and block == 16 * threads:
        return "runs"
    return "pairs" if of_thread < 16 or values < _CODES_FROM else "codes"


def as_bytes(words: torch.Tensor) -> torch.Tensor:
    """[..., W] int32 -> [..., W, 4] uint8 of the same storage, whatever the strides."""
    flat = torch.empty(0, dtype=torch.uint8, device=words.device).set_(words.untyped_storage())
    return flat.as_strided(
        (*words.shape, 4), (*(4 * s for s in words.stride()), 1), words.storage_offset() * 4
    )


def _check_group(group: int, k: int, layout: str) -> None:
    if layout not in LAYOUTS:
        raise InputError(
            "not a layout of group scales",
            got=repr(layout),
            want=", ".join(LAYOUTS),
            hint="'row' is what a GEMM in PyTorch expects, 'tma' what DeepGEMM reads",
        )
    if not 1 <= group <= 8192:
        raise InputError(
            f"cannot {WHAT}",
            got=f"group={group}",
            want="1 to 8192 columns; 16, 32, 64, 128 and 256 are the usual ones",
            hint="one scale for a whole row is quantize.per_token",
        )
    if layout in ("tma", "packed") and k % group:
        raise InputError(
            f"cannot {WHAT} into the layout {layout!r}",
            got=f"K={k}, group={group}",
            want="a group that divides K: the GEMMs that read this layout take whole groups",
            hint="layout='row' or 'column' allows a shorter last group",
        )


def _check_counts(counts: torch.Tensor, x: torch.Tensor) -> None:
    want = (x.shape[0],) if x.ndim == 3 else None
    if counts.dtype != torch.int32 or tuple(counts.shape) != want or counts.device != x.device:
        raise InputError(
            f"cannot {WHAT} with counts",
            got=f"counts of shape {tuple(counts.shape)}, {counts.dtype}, on {counts.device}; "
            f"x of shape {tuple(x.shape)}",
            want=f"x [experts, tokens, K] and counts [experts] torch.int32 on {x.device}",
            hint="x.view(experts, -1, K) and counts.to(torch.int32); without counts, every row",
        )
    if not counts.is_contiguous() or x.shape[0] > 65535:
        raise InputError(
            f"cannot {WHAT} with counts",
            got=f"counts of stride {counts.stride()}, {x.shape[0]} experts",
            want="contiguous counts of at most 65535 experts",
            hint="counts.contiguous(); quantize more experts in parts",
        )
