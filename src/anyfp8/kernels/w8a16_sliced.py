"""y[M, N] = x · (decode(w) · sw)ᵀ + bias with K split over the warps of one block: few tokens.

A narrow tile has too little work a step for four warps, and one warp decodes too slowly. Here each
of SLICES warps multiplies its own part of K (a batched dot, one batch a warp) and their sums are
added once at the end, in a fixed order. On Hopper this also keeps the warp-wide matrix instruction:
the group-wide one, fed with decoded bf16 from registers, waits after every step.
"""

import triton
import triton.language as tl

from anyfp8.kernels.operand import tile_of
from anyfp8.kernels.w8a16_codes import decode_to, undo


@triton.jit(do_not_specialize=["M"])
def w8a16_sliced(
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
    SLICES: tl.constexpr,
):
    """One step multiplies SLICES runs of BLOCK_K columns, side by side along K."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    STEP: tl.constexpr = SLICES * BLOCK_K
    tile_m, tile_n = tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    split = tl.program_id(1)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    steps = tl.cdiv(tl.cdiv(K, STEP), SPLIT_K)
    first = split * steps * STEP
    last = min(first + steps * STEP, K)
    slices = tl.arange(0, SLICES) * BLOCK_K
    ks = tl.arange(0, BLOCK_K)
    # lanes past the edge of N read row 0 and are not stored; int64: N · K can pass 2^31
    w_rows = tl.where(columns < N, columns, 0).to(tl.int64)
    along_w = slices[:, None, None] + ks[None, None, :]  # [SLICES, 1, BLOCK_K]
    along_x = slices[:, None, None] + ks[None, :, None]  # [SLICES, BLOCK_K, 1]
    x = x_ptr + rows.to(tl.int64)[None, None, :] * stride_xm + (first + along_x)
    w = w_ptr + w_rows[None, :, None] * stride_wn + (first + along_w)
    sw = sw_ptr + w_rows // SW_ROWS * stride_swn
    if not SCALE_IN_LOOP:
        scale = tl.load(sw)

    inside = (rows < M)[None, None, :]
    acc = tl.zeros((SLICES, BLOCK_N, BLOCK_M), dtype=tl.float32)
    for k in range(first, last, STEP):
        # clamped to row 0 instead, every spare lane of every program wants one line of L2 at once
        if EVEN_K:
            b = tl.load(x, mask=inside, other=0.0)
            a = tl.load(w)
        else:
            b = tl.load(x, mask=inside & (along_x < K - k), other=0.0)
            a = tl.load(w, mask=along_w < K - k, other=0)
        a = decode_to(a, DTYPE, DECODE)
        if DECODE == "fp32":
            b = b.to(tl.float32)
        if SCALE_IN_LOOP:
            # a slice past K has no scale; its codes are zero
            group = tl.minimum(k + slices, K - 1) // SW_GROUP
            part = tl.load(sw[None, :] + group[:, None] * stride_swk)
            acc += tl.dot(a, b) * part[:, :, None]
        else:
            acc = tl.dot(a, b, acc)
        x += STEP
        w += STEP

    y = undo(tl.sum(acc, axis=0), DTYPE, DECODE)  # [BLOCK_N, BLOCK_M]
    mask = (columns < N)[:, None] & (rows < M)[None, :]
    at = rows.to(tl.int64)[None, :]
    if SPLIT_K > 1:
        parts = part_ptr + split.to(tl.int64) * M * N + at * N + columns[:, None]
        tl.store(parts, y, mask=mask)
    else:
        if not SCALE_IN_LOOP:
            y *= scale[:, None]
        if HAS_BIAS:
            bias = tl.load(bias_ptr + columns, mask=columns < N, other=0.0)
            y += bias.to(tl.float32)[:, None]
        place = y_ptr + at * stride_ym + columns[:, None]
        tl.store(place, y.to(y_ptr.dtype.element_ty), mask=mask)
