"""q[bn, bk] = encode(w[bn, bk] / s): one scale per block of a weight, blocks cut at the edges.

Each block is read twice (the second time from cache): weights are quantized once, at load.
"""

import triton
import triton.language as tl

from anyfp8.kernels.encode import encode, inverse_of, scale_of
from anyfp8.kernels.maxima import finite_abs


@triton.jit(do_not_specialize=["M"])
def quantize_block_kernel(
    x_ptr,
    q_ptr,
    s_ptr,
    M,
    K,
    x_stride,
    q_stride,
    s_stride,
    floor,
    FP8_DTYPE: tl.constexpr,
    FP8_MAX: tl.constexpr,
    ENCODE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    UE8M0: tl.constexpr,
):
    block_row = tl.program_id(1)
    block_col = tl.program_id(0)
    lanes = tl.arange(0, COLS)
    cols = block_col * BLOCK_COLS + lanes
    inside = (cols < K) & (lanes < BLOCK_COLS)
    amax = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, BLOCK_ROWS, ROWS):
        local = start + tl.arange(0, ROWS)
        rows = block_row * BLOCK_ROWS + local
        mask = ((rows < M) & (local < BLOCK_ROWS))[:, None] & inside[None, :]
        at = x_ptr + (rows.to(tl.int64) * x_stride)[:, None] + cols[None, :]
        amax = tl.maximum(amax, finite_abs(tl.load(at, mask=mask, other=0.0).to(tl.float32)))
    scale = scale_of(tl.max(tl.max(amax, axis=1), axis=0), floor, FP8_MAX, UE8M0)
    inverse = inverse_of(scale)
    for start in range(0, BLOCK_ROWS, ROWS):
        local = start + tl.arange(0, ROWS)
        rows = block_row * BLOCK_ROWS + local
        mask = ((rows < M) & (local < BLOCK_ROWS))[:, None] & inside[None, :]
        at = x_ptr + (rows.to(tl.int64) * x_stride)[:, None] + cols[None, :]
        x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        q = encode(x * inverse, FP8_DTYPE, FP8_MAX, ENCODE)
        at = q_ptr + (rows.to(tl.int64) * q_stride)[:, None] + cols[None, :]
        tl.store(at, q, mask=mask)
    tl.store(s_ptr + block_row.to(tl.int64) * s_stride + block_col, scale)
