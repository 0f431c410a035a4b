"""w[n, k] = decode(q[n, k]) · s[n/bn, k/bk] / r[n], rounded once to 16 bits: into a scratch."""

import triton
import triton.language as tl

from anyfp8.kernels.operand import decode_to_fp32


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
    HARDWARE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Rows first … first + N of q [*, K] to w [N, K]; RELATIVE divides by the row's own scale r."""
    local = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    rows = (first + local).to(tl.int64)
    inside = local < N
    mask = inside[:, None] & (ks < K)[None, :]
    codes = tl.load(q_ptr + rows[:, None] * K + ks[None, :], mask=mask, other=0)
    if HARDWARE:
        values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        values = decode_to_fp32(codes)
    at = s_ptr + (rows // SW_ROWS * stride_sn)[:, None] + (ks // SW_GROUP * stride_sk)[None, :]
    scale = tl.load(at, mask=mask, other=0.0)
    if RELATIVE:
        row = tl.load(r_ptr + rows, mask=inside, other=1.0)
        scale = tl.div_rn(scale, tl.broadcast_to(row[:, None], (BLOCK_N, BLOCK_K)))
    w = w_ptr + local.to(tl.int64)[:, None] * K + ks[None, :]
    tl.store(w, (values * scale).to(w_ptr.dtype.element_ty), mask=mask)
