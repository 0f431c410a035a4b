"""q = encode(x / s) with one s for all of x: given, or amax / max from a first pass.

The first pass leaves one maximum per program; the second reduces them again in each program, which
costs nothing beside the launch it saves and needs neither an atomic nor a cleared buffer.
"""

import triton
import triton.language as tl

from anyfp8.kernels.encode import encode, inverse_of, scale_of
from anyfp8.kernels.maxima import finite_abs


@triton.jit(do_not_specialize=["M", "OUTER"])
def amax_kernel(
    x_ptr,
    amax_ptr,
    M,
    K,
    OUTER,
    x_outer,
    x_inner,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    col_blocks = tl.cast(tl.cdiv(K, BLOCK_K), tl.int32)  # K = 1 is a constant without .to
    row_blocks = tl.cdiv(M, ROWS)
    amax = tl.zeros([ROWS, BLOCK_K], tl.float32)
    for tile in range(tl.program_id(0), OUTER * row_blocks * col_blocks, tl.num_programs(0)):
        row_block = tile // col_blocks
        outer = (row_block // row_blocks).to(tl.int64)
        rows = row_block % row_blocks * ROWS + tl.arange(0, ROWS)
        first = (tile % col_blocks).to(tl.int64) * BLOCK_K
        cols = tl.arange(0, BLOCK_K)
        mask = (rows < M)[:, None] & (cols < K - first)[None, :]
        at = x_ptr + outer * x_outer + first
        at = at + (rows.to(tl.int64) * x_inner)[:, None] + cols[None, :]
        amax = tl.maximum(amax, finite_abs(tl.load(at, mask=mask, other=0.0).to(tl.float32)))
    tl.store(amax_ptr + tl.program_id(0), tl.max(tl.max(amax, axis=1), axis=0))


@triton.jit(do_not_specialize=["M", "PARTS"])
def quantize_scaled_kernel(
    x_ptr,
    q_ptr,
    s_ptr,
    amax_ptr,
    M,
    K,
    PARTS,
    x_outer,
    x_inner,
    q_outer,
    q_inner,
    inverse,
    floor,
    FP8_DTYPE: tl.constexpr,
    FP8_MAX: tl.constexpr,
    ENCODE: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NAN_TO_ZERO: tl.constexpr,
    PDL: tl.constexpr,
):
    """SCALE names the inverse's origin: "given" (s_ptr), "amax" (s_ptr gets it) or "number"."""
    outer = tl.program_id(1).to(tl.int64)
    col_blocks = tl.cast(tl.cdiv(K, BLOCK_K), tl.int32)  # K = 1 is a constant without .to
    rows = tl.program_id(0) // col_blocks * ROWS + tl.arange(0, ROWS)
    # int64: all of a contiguous tensor comes as one row
    first = (tl.program_id(0) % col_blocks).to(tl.int64) * BLOCK_K
    cols = tl.arange(0, BLOCK_K)
    mask = (rows < M)[:, None] & (cols < K - first)[None, :]
    rows = rows.to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
    at = x_ptr + outer * x_outer + first + (rows * x_inner)[:, None] + cols[None, :]
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if SCALE == "amax":
        parts = tl.arange(0, BLOCK_PARTS)
        amax = tl.max(tl.load(amax_ptr + parts, mask=parts < PARTS, other=0.0), axis=0)
        scale = scale_of(amax, floor, FP8_MAX, False)
        inverse = inverse_of(scale)
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(s_ptr, scale)
    elif SCALE == "given":
        inverse = inverse_of(tl.load(s_ptr).to(tl.float32))
    q = encode(x * inverse, FP8_DTYPE, FP8_MAX, ENCODE, NAN_TO_ZERO)
    at = q_ptr + outer * q_outer + first + (rows * q_inner)[:, None] + cols[None, :]
    tl.store(at, q, mask=mask)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
