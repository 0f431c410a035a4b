"""q[r, gG:(g+1)G] = encode(x / s[r, g]): one scale per G columns of a row, any scale layout.

A program takes ROWS × GROUPS groups as a [ROWS · GROUPS, G] tile. A group of 128 is 8 to 32 lanes
wide, so its maximum needs no shared memory. Scales go where their strides say; packed ones are
single bytes of int32 words (four groups a word, unused bytes 0). Where rows are the scales' fast
axis they are the tile's too, so that a warp's scale stores touch neighbours. Few rows are bound by
the instructions that each launch fetches (65 for a whole tile of one row, H200), so that masks, a
second stride and the exchange of scales between warps are left out where they can be.
"""

import triton
import triton.language as tl

from anyfp8.kernels.encode import (
    encode,
    offset,
    scales_of,
    silu_mul,
    store_where_held,
    to_fp32,
    ue8m0_of,
)
from anyfp8.kernels.maxima import finite_amax, pairs_nan_to_zero, runs_nan_to_zero


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
    PTX: tl.constexpr,
    PACKED_MAX: tl.constexpr,
    WHOLE: tl.constexpr,
    SPARE: tl.constexpr,
    G: tl.constexpr,
    BLOCK_G: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    THREADS: tl.constexpr,
    ROWS_FASTEST: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
    UE8M0: tl.constexpr,
    PACKED: tl.constexpr,
    COUNTS: tl.constexpr,
    SILU_MUL: tl.constexpr,
    NAN_TO_ZERO: tl.constexpr,
    PDL: tl.constexpr,
):
    """x_outer is None where rows have one level, q_inner if it is x_inner, s_group if it is 1.

    Grid: blocks of groups, of rows (ROWS_FIRST: the other way round), outer. THREADS share a group.
    WHOLE: every block has GROUPS groups of G columns. SPARE: a tile has fewer values than threads.
    NAN_TO_ZERO: False, or where NaN is replaced: in "pairs" or "runs" of values (SM90, 16 bits) or
    in "codes".
    """
    # axes, not a division: it would delay the load by a tenth of a microsecond
    group_block = tl.program_id(1 if ROWS_FIRST else 0)
    row_block = tl.program_id(0 if ROWS_FIRST else 1)
    outer = tl.program_id(2).to(tl.int64)
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
    # the grid has no other row where programs take one
    valid = rows < limit if ROWS > 1 else rows == rows
    inside = valid if WHOLE else valid & (groups < N_GROUPS)
    if COUNTS == "write":
        tl.store(counts_ptr + outer + rows * 0, M, mask=(rows == 0) & (groups == 0))

    lanes = tl.arange(0, BLOCK_G)
    cols = (groups * G)[:, None] + lanes[None, :]  # [ROWS · GROUPS, BLOCK_G]
    mask = inside[:, None] & (cols == cols if WHOLE else cols < K)
    if BLOCK_G != G:
        mask = mask & (lanes < G)[None, :]
    if x_outer is not None:
        x_ptr += outer * x_outer
        q_ptr += outer * q_outer
        s_ptr += outer * s_outer
    x_row = offset(rows, x_inner)
    x_at = x_ptr + x_row[:, None] + cols
    x = tl.load(x_at, mask=mask, other=0.0)
    if SILU_MUL:
        x = silu_mul(x, tl.load(x_at + K, mask=mask, other=0.0), x.dtype)
    amax = finite_amax(x, PACKED_MAX, THREADS)  # [ROWS · GROUPS]
    scale, inverse = scales_of(amax, floor, FP8_MAX, UE8M0, PTX)
    # while lanes exchange maxima
    if NAN_TO_ZERO == "pairs":
        x = pairs_nan_to_zero(x)
    elif NAN_TO_ZERO == "runs":
        x = runs_nan_to_zero(x, THREADS)
    y = to_fp32(x, PACKED_MAX) * inverse[:, None]
    q = encode(y, FP8_DTYPE, FP8_MAX, ENCODE, NAN_TO_ZERO == "codes")
    q_row = x_row if q_inner is None else offset(rows, q_inner)
    tl.store(q_ptr + q_row[:, None] + cols, q, mask=mask)

    s_at = s_ptr + offset(rows, s_inner)
    if PACKED:
        # strides count bytes: s_group from one word's column of words to the next
        code = tl.where(groups < N_GROUPS, ue8m0_of(scale), 0).to(tl.uint8)
        stored = tl.cdiv(N_GROUPS, 4) * 4
        s_at += offset(groups // 4, s_group) + groups % 4
        tl.store(s_at, code, mask=valid & (groups < stored))
    else:
        s_at += groups if s_group is None else offset(groups, s_group)
        store_where_held(s_at, scale, inside, lanes, PTX and not SPARE)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
