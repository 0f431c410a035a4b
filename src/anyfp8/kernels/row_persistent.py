"""y[M, N] = (x · wᵀ) · sx[m] · sw[n] + bias[n]: few programs, each in one loop over all its tiles.

The pipeline loads the first steps of the next tile while the last one is scaled and stored. For
several waves of tiles: a program for each pays for that at its start and end.
"""

import triton
import triton.language as tl

from anyfp8.kernels.operand import code_pointer, operand, tile_of


@triton.jit(do_not_specialize=["M"])
def row_persistent(
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
    program, programs = tl.program_id(0), tl.num_programs(0)
    steps = tl.cdiv(K, BLOCK_K)
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    x_codes = code_pointer(x_ptr, OPERAND)
    w_codes = code_pointer(w_ptr, OPERAND)
    ks = tl.arange(0, BLOCK_K)
    x_rows = tl.arange(0, BLOCK_M)
    w_rows = tl.arange(0, BLOCK_N)

    tile = program - programs
    tile_m, tile_n = 0, 0
    step = -1
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for _ in range(steps * tl.cdiv(tiles - program, programs)):
        step = tl.where(step == steps - 1, 0, step + 1)
        if step == 0:
            tile += programs
            tile_m, tile_n = tile_of(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
            # lanes past the edge read the first rows and are not stored
            x_rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
            x_rows = tl.where(x_rows < M, x_rows, tl.arange(0, BLOCK_M) % M)
            w_rows = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
            w_rows = tl.where(w_rows < N, w_rows, 0)
        at = step * BLOCK_K
        # int64: M · K can pass 2^31
        x = x_codes + x_rows.to(tl.int64)[:, None] * stride_xm + (at + ks)[None, :]
        w = w_codes + w_rows.to(tl.int64)[None, :] * stride_wn + (at + ks)[:, None]
        if EVEN_K:
            a = tl.load(x)
        else:
            a = tl.load(x, mask=ks[None, :] < K - at, other=0.0)
        if EVEN_K:
            b = tl.load(w)
        else:
            b = tl.load(w, mask=ks[:, None] < K - at, other=0.0)
        if PROMOTE:
            acc += tl.dot(operand(a, OPERAND), operand(b, OPERAND), max_num_imprecise_acc=BLOCK_K)
        else:
            acc = tl.dot(operand(a, OPERAND), operand(b, OPERAND), acc)
        if step == steps - 1:
            rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
            columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
            if OPERAND == "fp8e4b8":
                acc *= 4.0
            if SX_ROWS:
                acc *= tl.load(sx_ptr + rows, mask=rows < M, other=0.0)[:, None]
            else:
                acc *= tl.load(sx_ptr)
            if SW_ROWS:
                acc *= tl.load(sw_ptr + columns, mask=columns < N, other=0.0)[None, :]
            else:
                acc *= tl.load(sw_ptr)
            if HAS_BIAS:
                bias = tl.load(bias_ptr + columns, mask=columns < N, other=0.0)
                acc += bias.to(tl.float32)[None, :]
            y = y_ptr + rows.to(tl.int64)[:, None] * stride_ym + columns[None, :]
            mask = (rows < M)[:, None] & (columns < N)[None, :]
            tl.store(y, acc.to(y_ptr.dtype.element_ty), mask=mask)
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
