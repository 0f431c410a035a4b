"""Pieces that the GEMM kernels share: FP8 codes as operands of a dot, and the order of tiles.

Where scales change along K, a product is waited for before it is scaled, which takes as long for
few rows as for many. PARTS K tiles side by side are one product then: row r of part p holds the
columns p · BLOCK_K on, and so do the columns of the other operand.

OPERAND says how codes reach the dot: "fp8e4nv" and "fp8e4b8" read them as that type, "arithmetic"
decodes them to fp32 by integer operations (Triton's interpreter converts FP8 wrongly). Codes are
e4m3fn always: "fp8e4b8" gives a quarter of the product, because a byte means half there.
"""

import triton
import triton.language as tl


@triton.jit
def tile_of(pid, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """(row tile, column tile) of a program: GROUP_M row tiles share their columns in L2."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    group = pid // (GROUP_M * tiles_n)
    first = group * GROUP_M
    size = min(tiles_m - first, GROUP_M)
    within = pid % (GROUP_M * tiles_n)
    return first + within % size, within // size


@triton.jit
def code_pointer(pointer, OPERAND: tl.constexpr):
    """The uint8 pointer as the type that loads should have.

    Casting the pointer, not what was loaded, keeps the pipelined copy straight to the dot.
    """
    if OPERAND == "fp8e4nv":
        return pointer.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    else:
        return pointer


@triton.jit
def lanes_of(BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """(row or column of the tile, part) of a product's lanes: PARTS tiles side by side."""
    lanes = tl.arange(0, BLOCK * PARTS)
    if PARTS == 1:
        return lanes, lanes * 0
    else:
        return lanes % BLOCK, lanes // BLOCK


@triton.jit
def own(acc, row_part, column_part, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr):
    """The sum over parts of what each multiplied of its own, [ROWS, COLUMNS]."""
    if PARTS == 1:
        return acc
    else:
        # a select: what parts multiplied of each other's may be inf
        acc = tl.where(row_part[:, None] == column_part[None, :], acc, 0.0)
        acc = acc.reshape(PARTS, ROWS, PARTS, COLUMNS)
        return tl.sum(tl.sum(acc, axis=2), axis=0)


@triton.jit
def load_scales(
    at,
    k,
    K,
    part,
    held,
    stride,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """The scales of the step at k, which lie in rows that `at` points to; held: a mask or None.

    GROUP columns have one scale. With PARTS it divides the step, or is longer than K.
    """
    at += k // GROUP * stride
    if PARTS == 1:
        inside = held
    else:
        at += part * BLOCK_K // GROUP * stride
        if EVEN_K:
            inside = held
        elif held is None:
            inside = part * BLOCK_K < K - k
        else:
            inside = held & (part * BLOCK_K < K - k)
    if inside is None:
        return tl.load(at)
    else:
        return tl.load(at, mask=inside, other=0.0)


@triton.jit
def rows_read(rows, M, SHORT: tl.constexpr):
    """Which row each lane reads; int64: M · K can pass 2^31."""
    if SHORT:
        return rows.to(tl.int64)
    else:
        return (rows % M).to(tl.int64)


@triton.jit
def load_rows(x, rows, ks, M, left, SHORT: tl.constexpr, EVEN_K: tl.constexpr):
    """One K tile of the activations. SHORT: fewer rows than a tile, whose other lanes load nothing.

    Otherwise lanes past the last row have wrapped round to the first rows, which costs no mask in
    the loop. Neither may all read one row: every spare lane of every program wants that line of L2
    at once then. ks: [1 or rows, K] columns of the step, of which `left` are K's.
    """
    if not SHORT:
        if EVEN_K:
            return tl.load(x)
        else:
            return tl.load(x, mask=ks < left, other=0.0)
    elif EVEN_K:
        return tl.load(x, mask=(rows < M)[:, None], other=0.0)
    else:
        return tl.load(x, mask=(rows < M)[:, None] & (ks < left), other=0.0)


@triton.jit
def load_columns(x, rows, ks, M, left, SHORT: tl.constexpr, EVEN_K: tl.constexpr):
    """`load_rows` of a transposed tile: K runs down, rows run across; ks [K, 1 or rows]."""
    if not SHORT:
        if EVEN_K:
            return tl.load(x)
        else:
            return tl.load(x, mask=ks < left, other=0.0)
    elif EVEN_K:
        return tl.load(x, mask=(rows < M)[None, :], other=0.0)
    else:
        return tl.load(x, mask=(rows < M)[None, :] & (ks < left), other=0.0)


@triton.jit
def operand(codes, OPERAND: tl.constexpr):
    """Loaded codes as the dot takes them."""
    if OPERAND == "fp8e4nv":
        return codes
    elif OPERAND == "fp8e4b8":
        # -0 is NaN there
        return tl.where(codes == 0x80, 0, codes).to(tl.uint8).to(tl.float8e4b8, bitcast=True)
    else:
        return decode_to_fp32(codes)


@triton.jit
def decode_to_fp32(codes):
    """Exact value of finite e4m3fn codes: the bits are an fp32 that is 2^120 too small."""
    wide = codes.to(tl.int32)
    bits = ((wide & 0x80) << 24) | ((wide & 0x7F) << 20)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
