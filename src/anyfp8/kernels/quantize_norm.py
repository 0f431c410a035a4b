"""q = encode(y / s), y = h / sqrt(mean(h²) + eps) · w, h = x + residual: one row a program.

A row lies in registers as [GROUPS, BLOCK_G]; per token it is one group. h and y are rounded to x's
dtype where the unfused operations would round them. The tile depends on K alone, so a row's bytes
are the same in any batch; the order of the sum of squares is the compiler's, so its last bit may
differ from another implementation's.
"""

import triton
import triton.language as tl

from anyfp8.kernels.encode import encode, scales_of, to_fp32, ue8m0_of
from anyfp8.kernels.maxima import finite_amax


# no version for each M, nor for each stride that M decides: graphs are captured at many M
@triton.jit(do_not_specialize=["s_outer", "s_inner", "s_group"])
def quantize_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    q_ptr,
    s_ptr,
    K,
    N_GROUPS,
    x_outer,
    x_inner,
    residual_outer,
    residual_inner,
    y_outer,
    y_inner,
    q_outer,
    q_inner,
    s_outer,
    s_inner,
    s_group,
    columns,
    norm_eps,
    floor,
    FP8_DTYPE: tl.constexpr,
    FP8_MAX: tl.constexpr,
    ENCODE: tl.constexpr,
    PTX: tl.constexpr,
    PACKED_MAX: tl.constexpr,
    THREADS: tl.constexpr,
    G: tl.constexpr,
    BLOCK_G: tl.constexpr,
    GROUPS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    STORE_Y: tl.constexpr,
    UE8M0: tl.constexpr,
    PACKED: tl.constexpr,
    PDL: tl.constexpr,
):
    """`columns` is K as fp32; THREADS share a group. residual_ptr and y_ptr are None where
    RESIDUAL, STORE_Y say no.
    """
    # int64: row · stride passes 2**31 from 74,899 rows of 28,672 columns
    outer = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, GROUPS)
    lanes = tl.arange(0, BLOCK_G)
    cols = (groups * G)[:, None] + lanes[None, :]  # [GROUPS, BLOCK_G]
    mask = cols < K
    if BLOCK_G != G:
        mask = mask & (lanes < G)[None, :]
    w = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()

    x = tl.load(x_ptr + outer * x_outer + row * x_inner + cols, mask=mask, other=0.0)
    h = x.to(tl.float32)
    if RESIDUAL:
        at = residual_ptr + outer * residual_outer + row * residual_inner + cols
        total = (h + tl.load(at, mask=mask, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(at, total, mask=mask)
        h = total.to(tl.float32)
    mean = tl.div_rn(tl.sum(tl.sum(h * h, axis=1), axis=0), columns)
    inverse_rms = tl.div_rn(1.0, tl.sqrt_rn(mean + norm_eps))
    y = (h * inverse_rms * w).to(x.dtype)
    if STORE_Y:
        tl.store(y_ptr + outer * y_outer + row * y_inner + cols, y, mask=mask)

    amax = finite_amax(y, PACKED_MAX, THREADS)
    scale, inverse = scales_of(amax, floor, FP8_MAX, UE8M0, PTX)  # [GROUPS]
    q = encode(to_fp32(y, PACKED_MAX) * inverse[:, None], FP8_DTYPE, FP8_MAX, ENCODE)
    tl.store(q_ptr + outer * q_outer + row * q_inner + cols, q, mask=mask)
    s_at = s_ptr + outer * s_outer + row * s_inner
    if PACKED:
        # strides count bytes: s_group from one word's column of words to the next
        code = tl.where(groups < N_GROUPS, ue8m0_of(scale), 0).to(tl.uint8)
        s_at += (groups // 4).to(tl.int64) * s_group + groups % 4
        tl.store(s_at, code, mask=groups < tl.cdiv(N_GROUPS, 4) * 4)
    else:
        tl.store(s_at + groups.to(tl.int64) * s_group, scale, mask=groups < N_GROUPS)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
