"""y[M, N] = x · (decode(w) · sw)ᵀ + bias with 16-bit matrix units: codes are decoded in registers.

The weight is the first operand (rows of W on the tensor core's tall side), so that few tokens fill
a narrow tile and decoded values need not pass through shared memory. TOKENS_FIRST turns that round
for Hopper's instruction of four warps: its tall side takes 64 tokens, and reads decoded weights
from shared memory without waiting for each. PARTS of 2 halves the tile's tokens into two products
of one decoded weight, because a tile nearly square makes Triton decode every weight in two warps.
PAIRED reads two codes as one 16-bit word and multiplies even and odd columns apart: Triton then
loads the weight for Hopper's instruction by whole matrices, where it takes single bytes as 16-bit
loads. Split-K parts are summed in a fixed order by a second kernel.
"""

import triton
import triton.language as tl

from anyfp8.kernels.operand import tile_of
from anyfp8.kernels.w8a16_codes import decode_pairs, decode_to, undo


@triton.jit
def _tokens(x, rows, ks, M, left, EVEN_K: tl.constexpr):
    """One K tile of x; lanes past the last row load nothing.

    Clamped to row 0 instead, every spare lane of every program wants one line of L2 at once.
    """
    if EVEN_K:
        return tl.load(x, mask=(rows < M)[:, None], other=0.0)
    else:
        return tl.load(x, mask=(rows < M)[:, None] & (ks[None, :] < left), other=0.0)


@triton.jit
def _product(
    acc, x, w, scale, DECODE: tl.constexpr, SCALED: tl.constexpr, TOKENS_FIRST: tl.constexpr
):
    if DECODE == "fp32":
        x = x.to(tl.float32)
    if TOKENS_FIRST:
        if SCALED:
            return acc + tl.dot(x, w.T) * scale[None, :]
        else:
            return tl.dot(x, w.T, acc)
    elif SCALED:
        return acc + tl.dot(w, x.T) * scale[:, None]
    else:
        return tl.dot(w, x.T, acc)


@triton.jit
def _paired_product(acc, x, even, odd, scale, DECODE: tl.constexpr, SCALED: tl.constexpr):
    if DECODE == "fp32":
        x = x.to(tl.float32)
    left, right = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    if SCALED:
        part = tl.dot(odd, right.T, tl.dot(even, left.T))
        return acc + part * scale[:, None]
    else:
        return tl.dot(odd, right.T, tl.dot(even, left.T, acc))


@triton.jit
def _store(
    acc,
    rows,
    columns,
    scale,
    split,
    bias_ptr,
    y_ptr,
    part_ptr,
    M,
    N,
    stride_ym,
    SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLIT_K: tl.constexpr,
):
    """Store sums [BLOCK_N, rows], or the part of them that this block has."""
    mask = (columns < N)[:, None] & (rows < M)[None, :]
    at = rows.to(tl.int64)[None, :]
    if SPLIT_K > 1:
        parts = part_ptr + split.to(tl.int64) * M * N + at * N + columns[:, None]
        tl.store(parts, acc, mask=mask)
    else:
        if SCALE:
            acc *= scale[:, None]
        if HAS_BIAS:
            bias = tl.load(bias_ptr + columns, mask=columns < N, other=0.0)
            acc += bias.to(tl.float32)[:, None]
        y = y_ptr + at * stride_ym + columns[:, None]
        tl.store(y, acc.to(y_ptr.dtype.element_ty), mask=mask)


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
    PARTS: tl.constexpr,
    TOKENS_FIRST: tl.constexpr,
    PAIRED: tl.constexpr,
):
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    TOKENS: tl.constexpr = BLOCK_M // PARTS
    tile_m, tile_n = tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    split = tl.program_id(1)
    rows = tile_m * BLOCK_M + tl.arange(0, TOKENS)
    more = rows + TOKENS
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    steps = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K)
    first = split * steps * BLOCK_K
    last = min(first + steps * BLOCK_K, K)
    ks = tl.arange(0, BLOCK_K)
    # lanes past the edge of N read row 0 and are not stored; int64: N · K can pass 2^31
    w_rows = tl.where(columns < N, columns, 0).to(tl.int64)
    if PAIRED:
        words = tl.arange(0, BLOCK_K // 2)
        w = w_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
        w += w_rows[:, None] * (stride_wn // 2) + (first // 2 + words)[None, :]
    else:
        w = w_ptr + w_rows[:, None] * stride_wn + (first + ks)[None, :]
    x = x_ptr + rows.to(tl.int64)[:, None] * stride_xm + (first + ks)[None, :]
    sw = sw_ptr + w_rows // SW_ROWS * stride_swn
    scale = tl.load(sw)

    if TOKENS_FIRST:
        acc = tl.zeros((TOKENS, BLOCK_N), dtype=tl.float32)
    else:
        acc = tl.zeros((BLOCK_N, TOKENS), dtype=tl.float32)
    if PARTS > 1:
        acc2 = acc
    for k in range(first, last, BLOCK_K):
        left = K - k
        if SCALE_IN_LOOP:
            scale = tl.load(sw + k // SW_GROUP * stride_swk)
        tokens = _tokens(x, rows, ks, M, left, EVEN_K)
        if PAIRED:
            codes = tl.load(w) if EVEN_K else tl.load(w, mask=2 * words[None, :] < left, other=0)
            even, odd = decode_pairs(codes, DTYPE, DECODE)
            acc = _paired_product(acc, tokens, even, odd, scale, DECODE, SCALE_IN_LOOP)
            w += BLOCK_K // 2
        else:
            codes = tl.load(w) if EVEN_K else tl.load(w, mask=ks[None, :] < left, other=0)
            values = decode_to(codes, DTYPE, DECODE)
            acc = _product(acc, tokens, values, scale, DECODE, SCALE_IN_LOOP, TOKENS_FIRST)
            if PARTS > 1:
                at = x + tl.cast(TOKENS, tl.int64) * stride_xm
                tokens = _tokens(at, more, ks, M, left, EVEN_K)
                acc2 = _product(acc2, tokens, values, scale, DECODE, SCALE_IN_LOOP, TOKENS_FIRST)
            w += BLOCK_K
        x += BLOCK_K

    acc = undo(acc, DTYPE, DECODE)
    if TOKENS_FIRST:
        acc = acc.T
    outer: tl.constexpr = not SCALE_IN_LOOP
    _store(
        *(acc, rows, columns, scale, split, bias_ptr, y_ptr, part_ptr, M, N, stride_ym),
        *(outer, HAS_BIAS, SPLIT_K),
    )
    if PARTS > 1:
        acc2 = undo(acc2, DTYPE, DECODE)
        if TOKENS_FIRST:
            acc2 = acc2.T
        _store(
            *(acc2, more, columns, scale, split, bias_ptr, y_ptr, part_ptr, M, N, stride_ym),
            *(outer, HAS_BIAS, SPLIT_K),
        )


@triton.jit(do_not_specialize=["M"])
def sum_parts(
    part_ptr,
    y_ptr,
    sw_ptr,
    bias_ptr,
    M,
    N,
    stride_ym,
    stride_swn,
    PARTS: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y[m, n] = (part[0] + part[1] + …) · sw[n] + bias[n], always in this order.

    All parts are asked for before the first is added: one wait, not one a part.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in tl.static_range(PARTS):
        at = part_ptr + (part * M + row) * N + columns
        acc += tl.load(at, mask=inside, other=0.0)
    if SCALE:
        acc *= tl.load(sw_ptr + columns * stride_swn, mask=inside, other=0.0)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    y = y_ptr + row * stride_ym + columns
    tl.store(y, acc.to(y_ptr.dtype.element_ty), mask=inside)
