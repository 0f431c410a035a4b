"""y[M, N] = x · (decode(w) · sw)ᵀ + bias on CUDA cores: for one to four tokens.

Each thread keeps its own sums along K and the block adds them once at the end: no matrix unit,
whose tiles would be one sixteenth full. On the H200 at M = 1 a tile of 8 x 1024 streams the weight
within 10 % of a plain read of it. Four rows of sums are written out because Triton has no arrays of
tensors.
"""

import triton
import triton.language as tl

from anyfp8.kernels.w8a16_codes import decode_wide


@triton.jit
def _row(x_ptr, row, M, stride_xm, first):
    """Pointer to a row of x; past the last one, to the last, whose result is not stored."""
    return x_ptr + min(row, M - 1).to(tl.int64) * stride_xm + first


@triton.jit
def _product(acc, w, x, ks, left, EVEN_K: tl.constexpr):
    values = tl.load(x + ks) if EVEN_K else tl.load(x + ks, mask=ks < left, other=0.0)
    return acc + w * values.to(tl.float32)[None, :]


@triton.jit
def _store(
    acc,
    row,
    M,
    N,
    split,
    columns,
    sw,
    bias_ptr,
    y_ptr,
    part_ptr,
    stride_ym,
    SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """Add a row's sums and store it, or the part of it that this block has."""
    y = tl.sum(acc, axis=1) * FACTOR
    inside = (columns < N) & (row < M)
    at = row.to(tl.int64)
    if SPLIT_K > 1:
        tl.store(part_ptr + (split.to(tl.int64) * M + at) * N + columns, y, mask=inside)
    else:
        if SCALE:
            y *= tl.load(sw)
        if HAS_BIAS:
            y += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)
        tl.store(y_ptr + at * stride_ym + columns, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def w8a16_gemv(
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
    STAGES: tl.constexpr,
):
    """Rows BLOCK_M · i … of x, BLOCK_M of 1, 2 or 4, by BLOCK_N rows of w [N, K]."""
    tiles = tl.cdiv(N, BLOCK_N)
    columns = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(0) // tiles * BLOCK_M
    split = tl.program_id(1)
    steps = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K)
    first = split * steps * BLOCK_K
    last = min(first + steps * BLOCK_K, K)
    ks = tl.arange(0, BLOCK_K)
    # lanes past the edge read row 0 and are not stored; int64: N · K can pass 2^31
    w_rows = tl.where(columns < N, columns, 0).to(tl.int64)
    w = w_ptr + w_rows[:, None] * stride_wn + (first + ks)[None, :]
    sw = sw_ptr + w_rows // SW_ROWS * stride_swn
    x0 = _row(x_ptr, row, M, stride_xm, first)
    acc0 = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    if BLOCK_M > 1:
        x1 = _row(x_ptr, row + 1, M, stride_xm, first)
        acc1 = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    if BLOCK_M > 2:
        x2 = _row(x_ptr, row + 2, M, stride_xm, first)
        x3 = _row(x_ptr, row + 3, M, stride_xm, first)
        acc2 = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
        acc3 = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)

    for k in tl.range(first, last, BLOCK_K, num_stages=STAGES):
        left = K - k
        if EVEN_K:
            codes = tl.load(w)
        else:
            codes = tl.load(w, mask=ks[None, :] < left, other=0)
        values = decode_wide(codes, DECODE)
        if SCALE_IN_LOOP:
            values *= tl.load(sw + k // SW_GROUP * stride_swk)[:, None]
        acc0 = _product(acc0, values, x0, ks, left, EVEN_K)
        x0 += BLOCK_K
        if BLOCK_M > 1:
            acc1 = _product(acc1, values, x1, ks, left, EVEN_K)
            x1 += BLOCK_K
        if BLOCK_M > 2:
            acc2 = _product(acc2, values, x2, ks, left, EVEN_K)
            acc3 = _product(acc3, values, x3, ks, left, EVEN_K)
            x2 += BLOCK_K
            x3 += BLOCK_K
        w += BLOCK_K

    factor: tl.constexpr = 256.0 if DECODE == "packed" else 1.0
    scale: tl.constexpr = not SCALE_IN_LOOP
    _store(
        *(acc0, row, M, N, split, columns, sw, bias_ptr, y_ptr, part_ptr, stride_ym),
        *(scale, HAS_BIAS, SPLIT_K, factor),
    )
    if BLOCK_M > 1:
        _store(
            *(acc1, row + 1, M, N, split, columns, sw, bias_ptr, y_ptr, part_ptr, stride_ym),
            *(scale, HAS_BIAS, SPLIT_K, factor),
        )
    if BLOCK_M > 2:
        _store(
            *(acc2, row + 2, M, N, split, columns, sw, bias_ptr, y_ptr, part_ptr, stride_ym),
            *(scale, HAS_BIAS, SPLIT_K, factor),
        )
        _store(
            *(acc3, row + 3, M, N, split, columns, sw, bias_ptr, y_ptr, part_ptr, stride_ym),
            *(scale, HAS_BIAS, SPLIT_K, factor),
        )
