"""q[r, gG:(g+1)G] = encode(x / s[r, g]): one scale per G columns of a row, any scale layout.

A program takes ROWS × GROUPS groups as a [ROWS · GROUPS, G] tile: a group is 8 or 16 lanes wide, so
its maximum needs only shuffles. Scales go where their strides say; packed ones are single bytes of
int32 words (four groups a word, unused bytes 0). Where rows are the scales' fast axis they are the
tile's too, so that a warp's scale stores touch neighbours.
"""

import triton
import triton.language as tl

from anyfp8.kernels.encode import (
    encode,
    finite_abs,
    inverse_of,
    nan_to_zero,
    scale_of,
    silu_mul,
    ue8m0_of,
)


# no version for each M, nor for each stride that M decides: graphs are captured at many M
@triton.jit(do_not_specialize=["M", "s_outer", "s_inner", "s_group"])
def quantize_group_kernel(
    x_ptr,
    q_ptr,
    s_ptr,
    counts_ptr,
    M,
    K,
    N_GROUPS,
    x_outer,
    x_inner,
    q_outer,
    q_inner,
    s_outer,
    s_inner,
    s_group,
    floor,
    FP8_DTYPE: tl.constexpr,
    FP8_MAX: tl.constexpr,
    ENCODE: tl.constexpr,
    G: tl.constexpr,
    BLOCK_G: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS_FASTEST: tl.constexpr,
    UE8M0: tl.constexpr,
    PACKED: tl.constexpr,
    COUNTS: tl.constexpr,
    SILU_MUL: tl.constexpr,
    NAN_TO_ZERO: tl.constexpr,
    PDL: tl.constexpr,
):
    outer = tl.program_id(1).to(tl.int64)
    stored = N_GROUPS
    if PACKED:
        stored = tl.cdiv(N_GROUPS, 4) * 4
    group_blocks = tl.cdiv(stored, GROUPS)
    row_block = tl.program_id(0) // group_blocks
    group_block = tl.program_id(0) % group_blocks
    if PDL:
        tl.extra.cuda.gdc_wait()

    limit = M
    if COUNTS == "read":
        limit = tl.minimum(tl.load(counts_ptr + outer), M)
        if row_block * ROWS >= limit:
            return

    items = tl.arange(0, ROWS * GROUPS)
    if ROWS_FASTEST:
        rows = row_block * ROWS + items % ROWS
        groups = group_block * GROUPS + items // ROWS
    else:
        rows = row_block * ROWS + items // GROUPS
        groups = group_block * GROUPS + items % GROUPS
    valid = rows < limit
    inside = valid & (groups < N_GROUPS)
    if COUNTS == "write":
        tl.store(counts_ptr + outer + rows * 0, M, mask=(rows == 0) & (groups == 0))

    lanes = tl.arange(0, BLOCK_G)
    cols = (groups * G)[:, None] + lanes[None, :]  # [ROWS · GROUPS, BLOCK_G]
    mask = inside[:, None] & (cols < K)
    if BLOCK_G != G:
        mask = mask & (lanes < G)[None, :]
    # int64: row · stride passes 2**31 from 74,899 rows of 28,672 columns
    rows = rows.to(tl.int64)
    x_at = x_ptr + outer * x_outer + (rows * x_inner)[:, None] + cols
    x = tl.load(x_at, mask=mask, other=0.0)
    if SILU_MUL:
        x = silu_mul(x, tl.load(x_at + K, mask=mask, other=0.0), x.dtype)
    x = x.to(tl.float32)
    if NAN_TO_ZERO:
        x = nan_to_zero(x)
    scale = scale_of(tl.max(finite_abs(x), axis=1), floor, FP8_MAX, UE8M0)  # [ROWS · GROUPS]
    q = encode(x * inverse_of(scale)[:, None], FP8_DTYPE, FP8_MAX, ENCODE)
    tl.store(q_ptr + outer * q_outer + (rows * q_inner)[:, None] + cols, q, mask=mask)

    s_at = s_ptr + outer * s_outer + rows * s_inner
    if PACKED:
        # strides count bytes: s_group from one word's column of words to the next
        code = tl.where(groups < N_GROUPS, ue8m0_of(scale), 0).to(tl.uint8)
        s_at += (groups // 4).to(tl.int64) * s_group + groups % 4
        tl.store(s_at, code, mask=valid & (groups < stored))
    else:
        tl.store(s_at + groups.to(tl.int64) * s_group, scale, mask=inside)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
