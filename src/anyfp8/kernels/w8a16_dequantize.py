"""w[n, k] = decode(q[n, k]) · s[n/bn, k/bk] / r[n], rounded once to 16 bits: into a scratch."""

import triton
import triton.language as tl

from anyfp8.kernels.w8a16_codes import decode_wide


@triton.jit(do_not_specialize=["first"])
def dequantize(
    q_ptr,
    w_ptr,
    s_ptr,
    r_ptr,
    first,
    N,
    K,
    stride_sn,
    stride_sk,
    SW_ROWS: tl.constexpr,
    SW_GROUP: tl.constexpr,
    RELATIVE: tl.constexpr,
    DECODE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Rows first … first + N of q [*, K] to w [N, K]; RELATIVE divides by the row's own scale r.

    BLOCK_K divides SW_GROUP, so that a tile's row has one scale.
    """
    # neighbours in time are neighbours along K
    blocks = tl.cdiv(K, BLOCK_K)
    local = tl.program_id(0) // blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.program_id(0) % blocks * BLOCK_K
    ks = start + tl.arange(0, BLOCK_K)
    rows = (first + local).to(tl.int64)
    inside = local < N
    mask = inside[:, None] & (ks < K)[None, :]
    codes = tl.load(q_ptr + rows[:, None] * K + ks[None, :], mask=mask, other=0)
    at = rows // SW_ROWS * stride_sn + start // SW_GROUP * stride_sk
    scale = tl.load(s_ptr + at, mask=inside, other=0.0)
    if RELATIVE:
        scale = tl.div_rn(scale, tl.load(r_ptr + rows, mask=inside, other=1.0))
    if DECODE == "packed":
        scale *= 256.0
    values = decode_wide(codes, DECODE) * scale[:, None]
    w = w_ptr + local.to(tl.int64)[:, None] * K + ks[None, :]
    tl.store(w, values.to(w_ptr.dtype.element_ty), mask=mask)
