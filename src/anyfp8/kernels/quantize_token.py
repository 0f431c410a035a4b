"""q[r, :] = encode(x[r, :] / s[r]), s[r] = finite amax of the row / max: one scale per row.

Rows are read once and stay in registers, as BLOCK_K columns and TAIL_K more: 12,288 columns are
8,192 and 4,096, since a power of two would compute a quarter for nothing. The loop kernel reads
rows twice and takes any K. Axis 1 of the grid is the outer of at most two levels of rows, so that
strided [batch, tokens, K] needs no copy.
"""

import triton
import triton.language as tl

from anyfp8.kernels.encode import encode, offset, scales_of, silu_mul, to_fp32
from anyfp8.kernels.maxima import amax_of, any_not_finite, finite_abs, nan_to_zero, row_maxima


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
    PTX: tl.constexpr,
    PACKED_MAX: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TAIL_K: tl.constexpr,
    THREADS: tl.constexpr,
    SILU_MUL: tl.constexpr,
    NAN_TO_ZERO: tl.constexpr,
    PDL: tl.constexpr,
):
    """x_outer is None where rows have one level; THREADS share a row."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    valid = rows < M
    if x_outer is not None:
        outer = tl.program_id(1).to(tl.int64)
        x_ptr += outer * x_outer
        q_ptr += outer * q_outer
        s_ptr += outer * s_outer
    x_at = x_ptr + offset(rows, x_inner)[:, None]
    q_at = q_ptr + offset(rows, q_inner)[:, None]
    cols = tl.arange(0, BLOCK_K)[None, :]
    mask = valid[:, None] & (cols < K)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = _load(x_at, cols, mask, K, SILU_MUL)  # [ROWS, BLOCK_K]
    tail = x
    if TAIL_K:
        tail_cols = BLOCK_K + tl.arange(0, TAIL_K)[None, :]
        tail_mask = valid[:, None] & (tail_cols < K)
        tail = _load(x_at, tail_cols, tail_mask, K, SILU_MUL)  # [ROWS, TAIL_K]
    s_at = s_ptr + offset(rows, s_inner)
    amax = _amax(x, tail, TAIL_K, PACKED_MAX, THREADS, not NAN_TO_ZERO)  # [ROWS]
    # before the branch, for both ways: while warps wait for each other. The tail too would take 8
    # registers more, and so a program of each SM's four
    values = to_fp32(x, PACKED_MAX)
    if NAN_TO_ZERO:
        if any_not_finite(amax):
            # a way of its own to the end: where all is finite the other has one comparison more
            amax = _amax(values, to_fp32(tail, PACKED_MAX), TAIL_K, False, THREADS, True)
            scale, inverse = scales_of(amax, floor, FP8_MAX, False, PTX)
            y = nan_to_zero(values) * inverse[:, None]
            tl.store(q_at + cols, encode(y, FP8_DTYPE, FP8_MAX, ENCODE), mask=mask)
            if TAIL_K:
                y = nan_to_zero(to_fp32(tail, PACKED_MAX)) * inverse[:, None]
                tl.store(q_at + tail_cols, encode(y, FP8_DTYPE, FP8_MAX, ENCODE), mask=tail_mask)
            tl.store(s_at, scale, mask=valid)
            if PDL:
                tl.extra.cuda.gdc_launch_dependents()
            return
    scale, inverse = scales_of(amax, floor, FP8_MAX, False, PTX)  # [ROWS]
    y = values * inverse[:, None]
    tl.store(q_at + cols, encode(y, FP8_DTYPE, FP8_MAX, ENCODE), mask=mask)
    if TAIL_K:
        y = to_fp32(tail, PACKED_MAX) * inverse[:, None]
        tl.store(q_at + tail_cols, encode(y, FP8_DTYPE, FP8_MAX, ENCODE), mask=tail_mask)
    tl.store(s_at, scale, mask=valid)
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
    PTX: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SILU_MUL: tl.constexpr,
    NAN_TO_ZERO: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if x_outer is not None:
        outer = tl.program_id(1).to(tl.int64)
        x_ptr += outer * x_outer
        q_ptr += outer * q_outer
        s_ptr += outer * s_outer
    x_at = x_ptr + row * x_inner
    if PDL:
        tl.extra.cuda.gdc_wait()
    amax = tl.zeros([BLOCK_K], tl.float32)
    for start in range(0, K, BLOCK_K):
        cols = start + tl.arange(0, BLOCK_K)
        x = _load(x_at, cols, cols < K, K, SILU_MUL)
        amax = tl.maximum(amax, finite_abs(x.to(tl.float32)))
    scale, inverse = scales_of(tl.max(amax, axis=0), floor, FP8_MAX, False, PTX)
    for start in range(0, K, BLOCK_K):
        cols = start + tl.arange(0, BLOCK_K)
        x = _load(x_at, cols, cols < K, K, SILU_MUL)
        q = encode(x.to(tl.float32) * inverse, FP8_DTYPE, FP8_MAX, ENCODE, NAN_TO_ZERO)
        tl.store(q_ptr + row * q_inner + cols, q, mask=cols < K)
    tl.store(s_ptr + row * s_inner, scale)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _load(x_at, cols, mask, K, SILU_MUL: tl.constexpr):
    x = tl.load(x_at + cols, mask=mask, other=0.0)
    if SILU_MUL:
        x = silu_mul(x, tl.load(x_at + K + cols, mask=mask, other=0.0), x.dtype)
    return x


@triton.jit
def _amax(
    x,
    tail,
    TAIL_K: tl.constexpr,
    PACKED: tl.constexpr,
    THREADS: tl.constexpr,
    FINITE: tl.constexpr,
):
    maxima = row_maxima(x, PACKED, THREADS, FINITE)
    if TAIL_K and PACKED:
        # as wide as each other: threads finish before they talk
        maxima = tl.maximum(maxima, row_maxima(tail, PACKED, THREADS, FINITE))
    most = tl.max(maxima, axis=1)
    if TAIL_K and not PACKED:
        most = tl.maximum(most, tl.max(row_maxima(tail, PACKED, THREADS, FINITE), axis=1))
    return amax_of(most, x.dtype, PACKED, FINITE)
