"""q[r, :] = encode(x[r, :] / s[r]), s[r] = finite amax of the row / max: one scale per row.

Rows are read once and stay in registers up to BLOCK_K columns; the loop kernel reads them twice and
takes any K. Axis 1 of the grid is the outer of at most two levels of rows, so that strided
[batch, tokens, K] needs no copy.
"""

import triton
import triton.language as tl

from anyfp8.kernels.encode import (
    encode,
    finite_abs,
    inverse_of,
    nan_to_zero,
    scale_of,
    silu_mul,
)


# no version for each M, nor for each stride that M decides: graphs are captured at many M
@triton.jit(do_not_specialize=["M", "s_outer", "s_inner"])
def quantize_token_kernel(
    x_ptr,
    q_ptr,
    s_ptr,
    M,
    K,
    x_outer,
    x_inner,
    q_outer,
    q_inner,
    s_outer,
    s_inner,
    floor,
    FP8_DTYPE: tl.constexpr,
    FP8_MAX: tl.constexpr,
    ENCODE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SILU_MUL: tl.constexpr,
    NAN_TO_ZERO: tl.constexpr,
    PDL: tl.constexpr,
):
    # int64: row · stride passes 2**31 from 74,899 rows of 28,672 columns
    outer = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    cols = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    valid = rows < M
    mask = valid[:, None] & (cols < K)[None, :]
    rows = rows.to(tl.int64)
    x_at = x_ptr + outer * x_outer + (rows * x_inner)[:, None] + cols[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_at, mask=mask, other=0.0)
    if SILU_MUL:
        x = silu_mul(x, tl.load(x_at + K, mask=mask, other=0.0), x.dtype)
    x = x.to(tl.float32)
    if NAN_TO_ZERO:
        x = nan_to_zero(x)
    scale = scale_of(tl.max(finite_abs(x), axis=1), floor, FP8_MAX, False)  # [ROWS]
    q = encode(x * inverse_of(scale)[:, None], FP8_DTYPE, FP8_MAX, ENCODE)
    tl.store(q_ptr + outer * q_outer + (rows * q_inner)[:, None] + cols[None, :], q, mask=mask)
    tl.store(s_ptr + outer * s_outer + rows * s_inner, scale, mask=valid)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit(do_not_specialize=["M", "s_outer", "s_inner"])
def quantize_token_loop_kernel(
    x_ptr,
    q_ptr,
    s_ptr,
    M,
    K,
    x_outer,
    x_inner,
    q_outer,
    q_inner,
    s_outer,
    s_inner,
    floor,
    FP8_DTYPE: tl.constexpr,
    FP8_MAX: tl.constexpr,
    ENCODE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SILU_MUL: tl.constexpr,
    NAN_TO_ZERO: tl.constexpr,
    PDL: tl.constexpr,
):
    outer = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + outer * x_outer + row * x_inner
    q_row = q_ptr + outer * q_outer + row * q_inner
    if PDL:
        tl.extra.cuda.gdc_wait()
    amax = tl.zeros([BLOCK_K], tl.float32)
    for start in range(0, K, BLOCK_K):
        cols = start + tl.arange(0, BLOCK_K)
        amax = tl.maximum(amax, finite_abs(_load(x_row, cols, K, SILU_MUL, NAN_TO_ZERO)))
    scale = scale_of(tl.max(amax, axis=0), floor, FP8_MAX, False)
    inverse = inverse_of(scale)
    for start in range(0, K, BLOCK_K):
        cols = start + tl.arange(0, BLOCK_K)
        x = _load(x_row, cols, K, SILU_MUL, NAN_TO_ZERO)
        tl.store(q_row + cols, encode(x * inverse, FP8_DTYPE, FP8_MAX, ENCODE), mask=cols < K)
    tl.store(s_ptr + outer * s_outer + row * s_inner, scale)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _load(x_row, cols, K, SILU_MUL: tl.constexpr, NAN_TO_ZERO: tl.constexpr):
    x = tl.load(x_row + cols, mask=cols < K, other=0.0)
    if SILU_MUL:
        x = silu_mul(x, tl.load(x_row + K + cols, mask=cols < K, other=0.0), x.dtype)
    x = x.to(tl.float32)
    if NAN_TO_ZERO:
        x = nan_to_zero(x)
    return x
