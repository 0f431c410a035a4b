"""Reading a matrix and nothing else: the floor of a GEMM with few rows."""

import triton
import triton.language as tl


@triton.jit
def weight_read_kernel(w_ptr, word_ptr, N, BLOCK: tl.constexpr, UNROLL: tl.constexpr):
    """XOR of UNROLL blocks of int32 a program, all loads independent; one word is written."""
    first = tl.program_id(0).to(tl.int64) * UNROLL * BLOCK
    word = tl.zeros((BLOCK,), tl.int32)
    for i in tl.static_range(UNROLL):
        at = first + i * BLOCK + tl.arange(0, BLOCK)
        word = word ^ tl.load(w_ptr + at, mask=at < N, other=0)
    tl.store(word_ptr + tl.program_id(0), tl.xor_sum(word, 0))
