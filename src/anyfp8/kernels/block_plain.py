"""y[M, N] = Σ over K blocks of (x · wᵀ) · sx[m, k/g] · sw[n/bn, k/bk], + bias[n].

The scales change along K, so each K tile's product leaves the tensor core's accumulator and is
scaled in fp32; BLOCK_K therefore divides both the activations' group and the weights' block. PARTS
K tiles make one product, as `operand` describes.
"""

import triton
import triton.language as tl

from anyfp8.kernels.operand import (
    code_pointer,
    lanes_of,
    load_rows,
    load_scales,
    operand,
    own,
    rows_read,
    tile_of,
)


@triton.jit(do_not_specialize=["M"])
def block_plain(
    x_ptr,
    w_ptr,
    y_ptr,
    sx_ptr,
    sw_ptr,
    bias_ptr,
    M,
    N,
    K,
    stride_xm,
    stride_wn,
    stride_ym,
    stride_sxm,
    stride_sxk,
    stride_swn,
    stride_swk,
    SX_GROUP: tl.constexpr,
    SW_ROWS: tl.constexpr,
    SW_GROUP: tl.constexpr,
    SW_SCALAR: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OPERAND: tl.constexpr,
    SHORT: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PARTS: tl.constexpr,
):
    tile_m, tile_n = tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    row, row_part = lanes_of(BLOCK_M, PARTS)
    column, column_part = lanes_of(BLOCK_N, PARTS)
    rows = tile_m * BLOCK_M + row
    columns = tile_n * BLOCK_N + column
    ks = tl.arange(0, BLOCK_K)
    x_ks = (row_part * BLOCK_K)[:, None] + ks[None, :]
    w_ks = (column_part * BLOCK_K)[None, :] + ks[:, None]
    # lanes past the edge are not stored
    x_rows = rows_read(rows, M, SHORT)
    w_rows = tl.where(columns < N, columns, 0).to(tl.int64)
    x = code_pointer(x_ptr, OPERAND) + x_rows[:, None] * stride_xm + x_ks
    w = code_pointer(w_ptr, OPERAND) + w_rows[None, :] * stride_wn + w_ks
    sx = sx_ptr + x_rows * stride_sxm
    if SW_SCALAR:
        # the tile lies in one block of rows: one multiplication fewer for each element
        sw = sw_ptr + (tile_n * BLOCK_N // SW_ROWS) * stride_swn
        sw_part = row_part
    else:
        sw = sw_ptr + w_rows // SW_ROWS * stride_swn
        sw_part = column_part
    if SHORT:
        held = rows < M
    else:
        held = None

    acc = tl.zeros((BLOCK_M * PARTS, BLOCK_N * PARTS), dtype=tl.float32)
    STEP: tl.constexpr = BLOCK_K * PARTS
    last = (K - 1) // STEP * STEP
    # a step ahead: a product would wait for them
    next_x = load_scales(sx, 0, K, row_part, held, stride_sxk, SX_GROUP, BLOCK_K, PARTS, EVEN_K)
    next_w = load_scales(sw, 0, K, sw_part, None, stride_swk, SW_GROUP, BLOCK_K, PARTS, EVEN_K)
    for k in range(0, K, STEP):
        a = load_rows(x, rows, x_ks, M, K - k, SHORT, EVEN_K)
        if EVEN_K:
            b = tl.load(w)
        else:
            b = tl.load(w, mask=w_ks < K - k, other=0.0)
        scale_x, scale_w = next_x, next_w
        at = min(k + STEP, last)
        next_x = load_scales(
            sx, at, K, row_part, held, stride_sxk, SX_GROUP, BLOCK_K, PARTS, EVEN_K
        )
        next_w = load_scales(sw, at, K, sw_part, None, stride_swk, SW_GROUP, BLOCK_K, PARTS, EVEN_K)
        part = tl.dot(operand(a, OPERAND), operand(b, OPERAND), max_num_imprecise_acc=BLOCK_K)
        if SW_SCALAR:
            acc += part * (scale_x * scale_w)[:, None]
        else:
            acc += part * scale_x[:, None] * scale_w[None, :]
        x += STEP
        w += STEP

    acc = own(acc, row_part, column_part, BLOCK_M, BLOCK_N, PARTS)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if OPERAND == "fp8e4b8":
        acc *= 4.0
    if HAS_BIAS:
        acc += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    y = y_ptr + rows.to(tl.int64)[:, None] * stride_ym + columns[None, :]
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(y, acc.to(y_ptr.dtype.element_ty), mask=mask)
