"""q[r, :] = encode(x[r, :] / s[r]): one scale per row (token of x, output channel of W).

Who uses it: compressed-tensors, FBGEMM and Quark per-token checkpoints, and every online
quantization. The surprise: a GEMM that tiles 64 rows at a time is up to 50 % slower on a ragged
end, so `pad_rows_to` puts the data at the start of a buffer of whole tiles whose other rows hold
anything.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from anyfp8 import fp8, reference
from anyfp8.errors import InputError
from anyfp8.problem import QTensor
from anyfp8.quantize.launch import Launch, target_of
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

WHAT = "quantize per token"
# columns that stay in registers: 64 fp32 values a thread at 16 warps
MAX_BLOCK_K = 32768


@dataclass(frozen=True)
class TokenConfig:
    """How rows are dealt out: `rows` a program, `block_k` + `tail_k` columns of each, `num_warps`.

    Rows that are longer are read twice, `block_k` columns at a time.
    """

    rows: int
    block_k: int
    num_warps: int
    tail_k: int = 0


@functools.lru_cache(maxsize=4096)
def token_config(m: int, k: int) -> TokenConfig:
    """One row a program, several short ones where there are many; 16 values a thread and up."""
    block_k = min(next_power_of_2(k), MAX_BLOCK_K)
    rows = max(1, 4096 // block_k) if m > 256 else 1
    warps = max(1, min(8 if block_k <= 16384 else 16, rows * block_k // 512))
    half = block_k // 2
    tail_k = next_power_of_2(k - half) if half < k else block_k
    # four values for each thread, so that none waits
    if 128 * warps <= tail_k < half:
        if half >= 8192 and m >= 1024:
            # H200, K = 12288: 10.93 µs at 1024 rows, 11.24 with 8 warps; 4.47 and 4.42 at 256
            warps = 16
        return TokenConfig(rows, half, warps, tail_k)
    return TokenConfig(rows, block_k, warps)


def per_token(
    x: torch.Tensor,
    *,
    fmt: fp8.Format = fp8.E4M3FN,
    eps: float = fp8.AMAX_FLOOR,
    out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    pad_rows_to: int = 1,
    silu_mul: bool = False,
    nan_to_zero: bool = False,
    pdl: bool = False,
    config: TokenConfig | None = None,
) -> QTensor:
    """Quantize with one scale per row: scale = max(finite amax, eps) / max of the format, fp32.

    On a GPU by the Triton kernel, whatever the row strides; on CPU tensors by `reference` (the same
    bytes), unless Triton's interpreter is active. Only an x whose last stride is not 1 is copied.

    Args:
        x: [..., K] bf16, fp16 or fp32; [..., 2K] with `silu_mul`.
        fmt: of the codes.
        eps: smallest amax that counts.
        out: [..., K] of the format's dtype or uint8, last stride 1.
        out_scale: [..., 1] fp32.
        pad_rows_to: allocate data and scale with the number of rows rounded up to this, and return
            the view of the rows of x; not with `out`.
        silu_mul: quantize silu(x[..., :K]) · x[..., K:], each step rounded to x's dtype.
        nan_to_zero: a NaN element becomes 0 instead of the NaN code.
        pdl: launch while the previous kernel drains (SM90+; ignored elsewhere).
        config: tile to use instead of the one chosen from the shape.

    Returns:
        QTensor with data [..., K] and scale [..., 1].

    Raises:
        InputError: dtype, K = 0, an `out` that does not fit, eps out of range.
    """
    options = (fmt, eps, pad_rows_to, silu_mul, nan_to_zero, pdl, config)
    return planned(
        (per_token, *options), (x,), out, out_scale, lambda: _full(x, out, out_scale, *options)
    )


def _full(
    x: torch.Tensor,
    out: torch.Tensor | None,
    out_scale: torch.Tensor | None,
    fmt: fp8.Format,
    eps: float,
    pad_rows_to: int,
    silu_mul: bool,
    nan_to_zero: bool,
    pdl: bool,
    config: TokenConfig | None,
) -> QTensor:
    x = check_input(WHAT, x)
    check_floor(WHAT, eps)
    k = halved(WHAT, x.shape[-1]) if silu_mul else x.shape[-1]
    shape = (*x.shape[:-1], k)
    padded = pad_rows_to if out is None and out_scale is None else 1
    data = allocate(shape, padded, data_dtype(fmt), x.device) if out is None else out
    scale_shape = (*x.shape[:-1], 1)
    scale = (
        allocate(scale_shape, padded, torch.float32, x.device) if out_scale is None else out_scale
    )
    if out is not None:
        check_out(WHAT, "out", out, shape, (data_dtype(fmt), torch.uint8), x.device, True)
    if out_scale is not None:
        check_out(WHAT, "out_scale", out_scale, scale_shape, (torch.float32,), x.device)
    result = QTensor(data, scale, fmt=fmt)
    target = target_of(x.device)
    if target is None:
        values = reference.silu_mul(x) if silu_mul else x
        values = reference.nan_to_zero(values) if nan_to_zero else values
        q = reference.quantize_per_token(values, fmt, eps)
        result.codes.copy_(q.codes)
        scale.copy_(q.scale)
        return result

    from anyfp8.kernels.quantize_token import quantize_token_kernel, quantize_token_loop_kernel

    def start(rows: Rows, tensors: list[torch.Tensor]) -> None:
        c = config or token_config(rows.outer * rows.inner, k)
        (x_outer, x_inner), (q_outer, q_inner), (s_outer, s_inner) = rows.strides
        one_level = rows.outer == 1
        arguments = {
            "x_ptr": tensors[0],
            "q_ptr": tensors[1],
            "s_ptr": tensors[2],
            "M": rows.inner,
            "K": k,
            "x_outer": None if one_level else x_outer,
            "x_inner": x_inner,
            "q_outer": None if one_level else q_outer,
            "q_inner": q_inner,
            "s_outer": None if one_level else s_outer,
            "s_inner": s_inner,
            "floor": float(eps),
        }
        constants = dict(
            **target.numerics(fmt),
            SILU_MUL=silu_mul,
            NAN_TO_ZERO=nan_to_zero,
            BLOCK_K=c.block_k,
            PDL=pdl and target.has_pdl,
        )
        if c.block_k + c.tail_k >= k:
            kernel, grid = quantize_token_kernel, (-(-rows.inner // c.rows), rows.outer)
            smallest = c.tail_k or c.block_k
            threads = threads_of(c.rows, smallest, c.num_warps)
            constants.update(target.maxima(x, smallest))
            constants.update(ROWS=c.rows, TAIL_K=c.tail_k, THREADS=threads)
        else:
            kernel, grid = quantize_token_loop_kernel, (rows.inner, rows.outer)
            constants["PTX"] = target.maxima(x, c.block_k)["PTX"]
        use_pdl = constants["PDL"]
        target.run(Launch(kernel, grid, arguments, constants, c.num_warps, use_pdl))

    each_fold([x, result.codes, scale], x.ndim - 1, start)
    return result


def halved(what: str, columns: int) -> int:
    """K of a [..., 2K] input. Raises InputError for an odd number of columns."""
    if columns % 2:
        raise InputError(
            f"cannot {what} after silu · mul",
            got=f"{columns} columns",
            want="an even number: K gate columns followed by K up columns",
            hint="torch.cat([gate, up], dim=-1); silu_mul=False quantizes all columns as they are",
        )
    return columns // 2


def allocate(
    shape: tuple[int, ...], pad_rows_to: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """An empty [..., K]; with padding the first rows of a [rows up to a multiple, K] buffer."""
    if pad_rows_to == 1:
        return torch.empty(shape, dtype=dtype, device=device)
    m = 1
    for size in shape[:-1]:
        m *= size
    buffer = torch.empty(
        (-(-m // pad_rows_to) * pad_rows_to, shape[-1]), dtype=dtype, device=device
    )
    return buffer[:m].view(shape)
