"""y[M, N] = x · (decode(w) · sw)ᵀ + bias with 16-bit matrix units: codes are decoded in registers.

The weight is the first operand (rows of W on the tensor core's tall side), so that few tokens fill
a narrow tile and decoded values need not pass through shared memory. Split-K parts are summed in a
fixed order by a second kernel.
"""

import triton
import triton.language as tl

from anyfp8.kernels.operand import tile_of
from anyfp8.kernels.w8a16_codes import decode_to, undo


@triton.jit(do_not_specialize=["M"])
def w8a16_plain(
    x_ptr,
    w_ptr,
    y_ptr,
    part_ptr,
    sw_ptr,
    bias_ptr,
    M,
    N,
    K,
    stride_xm,
    stride_wn,
    stride_ym,
    stride_swn,
    stride_swk,
    SW_ROWS: tl.constexpr,
    SW_GROUP: tl.constexpr,
    SCALE_IN_LOOP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DECODE: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    tile_m, tile_n = tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    split = tl.program_id(1)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    steps = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K)
    first = split * steps * BLOCK_K
    last = min(first + steps * BLOCK_K, K)
    ks = tl.arange(0, BLOCK_K)
    # lanes past the edge read row 0 and are not stored; int64: M · K can pass 2^31
    x_rows = tl.where(rows < M, rows, 0).to(tl.int64)
    w_rows = tl.where(columns < N, columns, 0).to(tl.int64)
    x = x_ptr + x_rows[None, :] * stride_xm + (first + ks)[:, None]
    w = w_ptr + w_rows[:, None] * stride_wn + (first + ks)[None, :]
    sw = sw_ptr + w_rows // SW_ROWS * stride_swn

    if not SCALE_IN_LOOP:
        scale = tl.load(sw)

    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for k in range(first, last, BLOCK_K):
        if EVEN_K:
            b = tl.load(x)
            a = tl.load(w)
        else:
            b = tl.load(x, mask=ks[:, None] < K - k, other=0)
            a = tl.load(w, mask=ks[None, :] < K - k, other=0)
        a = decode_to(a, DTYPE, DECODE)
        if DECODE == "fp32":
            b = b.to(tl.float32)
        if SCALE_IN_LOOP:
            part = tl.load(sw + k // SW_GROUP * stride_swk)
            acc += tl.dot(a, b) * part[:, None]
        else:
            acc = tl.dot(a, b, acc)
        x += BLOCK_K
        w += BLOCK_K

    acc = undo(acc, DTYPE, DECODE)
    mask = (columns < N)[:, None] & (rows < M)[None, :]
    at = rows.to(tl.int64)[None, :]
    if SPLIT_K > 1:
        parts = part_ptr + split.to(tl.int64) * M * N + at * N + columns[:, None]
        tl.store(parts, acc, mask=mask)
    else:
        if not SCALE_IN_LOOP:
            acc *= scale[:, None]
        if HAS_BIAS:
            bias = tl.load(bias_ptr + columns, mask=columns < N, other=0.0)
            acc += bias.to(tl.float32)[:, None]
        y = y_ptr + at * stride_ym + columns[:, None]
        tl.store(y, acc.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M", "parts"])
def sum_parts(
    part_ptr,
    y_ptr,
    sw_ptr,
    bias_ptr,
    M,
    N,
    parts,
    stride_ym,
    stride_swn,
    SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y[m, n] = (part[0] + part[1] + …) · sw[n] + bias[n], always in this order."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in range(parts):
        at = part_ptr + (part * M + row) * N + columns
        acc += tl.load(at, mask=inside, other=0.0)
    if SCALE:
        acc *= tl.load(sw_ptr + columns * stride_swn, mask=inside, other=0.0)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    y = y_ptr + row * stride_ym + columns
    tl.store(y, acc.to(y_ptr.dtype.element_ty), mask=inside)
