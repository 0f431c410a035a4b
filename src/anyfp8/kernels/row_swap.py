"""y[M, N] = (x · wᵀ) · sx[m] · sw[n] + bias[n], with the weight on the tall side of the product.

A warp group multiplies 64 rows by 16 or more columns: few tokens fill the columns, not the rows, so
the pipeline holds weights instead of rows that are not there.
"""

import triton
import triton.language as tl

from anyfp8.kernels.operand import code_pointer, load_columns, operand, rows_read, tile_of


@triton.jit(do_not_specialize=["M"])
def row_swap(
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
    SX_ROWS: tl.constexpr,
    SW_ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OPERAND: tl.constexpr,
    PROMOTE: tl.constexpr,
    SHORT: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    tile_m, tile_n = tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    # lanes past the edge are not stored
    x_rows = rows_read(rows, M, SHORT)
    w_rows = tl.where(columns < N, columns, 0).to(tl.int64)
    x = code_pointer(x_ptr, OPERAND) + x_rows[None, :] * stride_xm + ks[:, None]
    w = code_pointer(w_ptr, OPERAND) + w_rows[:, None] * stride_wn + ks[None, :]

    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        if EVEN_K:
            a = tl.load(w)
        else:
            a = tl.load(w, mask=ks[None, :] < K - k, other=0.0)
        b = load_columns(x, rows, ks[:, None], M, K - k, SHORT, EVEN_K)
        if PROMOTE:
            acc += tl.dot(operand(a, OPERAND), operand(b, OPERAND), max_num_imprecise_acc=BLOCK_K)
        else:
            acc = tl.dot(operand(a, OPERAND), operand(b, OPERAND), acc)
        x += BLOCK_K
        w += BLOCK_K

    if OPERAND == "fp8e4b8":
        acc *= 4.0
    if SX_ROWS:
        acc *= tl.load(sx_ptr + rows, mask=rows < M, other=0.0)[None, :]
    else:
        acc *= tl.load(sx_ptr)
    if SW_ROWS:
        acc *= tl.load(sw_ptr + columns, mask=columns < N, other=0.0)[:, None]
    else:
        acc *= tl.load(sw_ptr)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[:, None]
    y = y_ptr + rows.to(tl.int64)[None, :] * stride_ym + columns[:, None]
    mask = (columns < N)[:, None] & (rows < M)[None, :]
    tl.store(y, acc.to(y_ptr.dtype.element_ty), mask=mask)
