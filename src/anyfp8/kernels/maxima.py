"""amax[r] = max |x[r, c]| over finite x; x with 0 for NaN: what comes before the multiplication.

An inf must not flatten the row it stands in, nor a NaN hide its maximum. PACKED takes 16-bit values
in pairs (SM90). The surprise: one exponent step more makes the bits of inf and NaN negative, and an
integer maximum passes over them.
"""

import triton
import triton.language as tl

# magnitudes of two 16-bit values in order: one exponent step more makes inf and NaN negative, and
# carries nothing. Not add.s16x2: where registers are short ptxas 12.8 splits one and adds 0
_ORDERED_PAIR_PTX = tl.constexpr("""
{
    .reg .b32 pair;
    mov.b32 pair, {$1, $2};
    and.b32 pair, pair, 0x7FFF7FFF;
    add.u32 $0, pair, $3;
}
""")
# magnitudes of two 16-bit values as they are
_MAGNITUDE_PAIR_PTX = tl.constexpr("""
{
    .reg .b32 pair;
    mov.b32 pair, {$1, $2};
    and.b32 $0, pair, 0x7FFF7FFF;
}
""")
# all ones for each number of a pair; a NaN differs from itself
_NUMBERS_BF16_PTX = tl.constexpr("""
{
    .reg .b32 numbers;
    set.eq.u32.bf16x2 numbers, $1, $1;
    and.b32 $0, $1, numbers;
}
""")
_NUMBERS_FP16_PTX = tl.constexpr("""
{
    .reg .b32 numbers;
    set.eq.u32.f16x2 numbers, $1, $1;
    and.b32 $0, $1, numbers;
}
""")


def _run_ptx(dtype: str) -> str:
    """16 values of `dtype` with 0 for NaN, if any lane of the warp has an `ordered` pair below 0.

    Outputs 0 to 7 and inputs 8 to 15 are pairs of values, inputs 16 to 31 ordered pairs whose signs
    count. The warp votes, since all its lanes come here: where lanes may part, the compiler adds
    instructions that bring them together again.
    """
    pairs = range(8)
    lines = [f"mov.b32 v{i}, ${8 + i};" for i in pairs]
    lines += ["mov.b32 signs, $16;"] + [f"or.b32 signs, signs, ${i};" for i in range(17, 32)]
    lines += [
        "and.b32 signs, signs, 0x80008000;",
        "setp.ne.b32 odd, signs, 0;",
        "vote.sync.any.pred odd, odd, 0xFFFFFFFF;",
        "@!odd bra.uni DONE;",
    ]
    lines += [f"set.eq.u32.{dtype} m, v{i}, v{i}; and.b32 v{i}, v{i}, m;" for i in pairs]
    lines += ["DONE:"] + [f"mov.b32 ${i}, v{i};" for i in pairs]
    values = ", ".join(f"v{i}" for i in pairs)
    return "\n".join(["{", ".reg .pred odd;", f".reg .b32 signs, m, {values};", *lines, "}"])


_RUN_BF16_PTX = tl.constexpr(_run_ptx("bf16x2"))
_RUN_FP16_PTX = tl.constexpr(_run_ptx("f16x2"))
_RUN_REGISTERS = tl.constexpr(",".join(["=r"] * 8 + ["r"] * 24))


@triton.jit
def finite_abs(x):
    """|x|, 0 for inf and NaN: an inf must not flatten the row it stands in."""
    a = tl.abs(x)
    return tl.where(a <= 3.4028234663852886e38, a, 0.0)


@triton.jit
def ordered(x):
    """fp32 -> int32 that compares as |x| does; inf and NaN are negative, 0 is 0x800000."""
    return (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) + 0x00800000


@triton.jit
def row_maxima(x, PACKED: tl.constexpr, THREADS: tl.constexpr, FINITE: tl.constexpr):
    """[R, C] fp32, bf16 or fp16 -> [R, L] int32, whose maximum is for `amax_of` to read.

    FINITE: in `ordered`'s sense; otherwise the bits of |x|, in which inf and NaN are the largest.
    Packed, L is THREADS, how many share a row: each has reduced its own columns, which lie 16
    together where it has so many (the bytes of a store) and at least two. Otherwise L = C.
    """
    if PACKED:
        pairs = tl.reduce(_magnitudes(x, THREADS, FINITE), 3, _max_pair)
        pairs = tl.reduce(pairs, 1, _max_pair)
        return tl.maximum(pairs << 16, pairs & -65536)
    elif FINITE:
        return ordered(x.to(tl.float32))
    else:
        return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _magnitudes(x, THREADS: tl.constexpr, FINITE: tl.constexpr):
    """[R, C] of 16 bits -> int32 pairs [R, runs, THREADS, run / 2], in `row_maxima`'s sense."""
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    RUN: tl.constexpr = 16 if C // THREADS > 16 else C // THREADS
    low, high = tl.split(x.to(tl.int16, bitcast=True).reshape(R, C // 2, 2))
    if FINITE:
        step = 0x00800080 if x.dtype == tl.bfloat16 else 0x04000400
        pairs = tl.inline_asm_elementwise(
            _ORDERED_PAIR_PTX, "=r,h,h,r", [low, high, step], tl.int32, is_pure=True, pack=1
        )
    else:
        pairs = tl.inline_asm_elementwise(
            _MAGNITUDE_PAIR_PTX, "=r,h,h", [low, high], tl.int32, is_pure=True, pack=1
        )
    return pairs.reshape(R, C // THREADS // RUN, THREADS, RUN // 2)


@triton.jit
def _max_pair(a, b):
    return tl.inline_asm_elementwise(
        "max.s16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def amax_of(most, DTYPE: tl.constexpr, PACKED: tl.constexpr, FINITE: tl.constexpr):
    """The maximum over `row_maxima` -> the fp32 magnitude: FINITE, 0 where none is finite."""
    if FINITE:
        step: tl.constexpr = 0x04000000 if PACKED and DTYPE == tl.float16 else 0x00800000
        most = tl.maximum(most, step) - step
    if PACKED and DTYPE == tl.float16:
        return (most >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return most.to(tl.float32, bitcast=True)


@triton.jit
def finite_amax(x, PACKED: tl.constexpr, THREADS: tl.constexpr):
    """[R, C] -> [R] fp32, the largest finite magnitude of each row."""
    return amax_of(tl.max(row_maxima(x, PACKED, THREADS, True), axis=1), x.dtype, PACKED, True)


@triton.jit
def any_not_finite(amax):
    """Whether any of [R] fp32 magnitudes is inf or NaN, for the whole program."""
    return tl.max(amax.to(tl.int32, bitcast=True), axis=0) >= 0x7F800000


@triton.jit
def nan_to_zero(x):
    """fp32 with 0 for NaN."""
    return tl.where(x == x, x, 0.0)


@triton.jit
def pairs_nan_to_zero(x):
    """bf16 or fp16 with 0 for NaN, two at a time (SM90)."""
    asm: tl.constexpr = _NUMBERS_BF16_PTX if x.dtype == tl.bfloat16 else _NUMBERS_FP16_PTX
    return tl.inline_asm_elementwise(asm, "=r,r", [x], dtype=x.dtype, is_pure=True, pack=2)


@triton.jit
def runs_nan_to_zero(x, THREADS: tl.constexpr):
    """[R, C] bf16 or fp16 with 0 for NaN, C = 16 · THREADS, a run of 16 at a time (SM90).

    Lanes look for inf and NaN in the pairs that maxima are taken of: four instructions and a branch
    where `pairs_nan_to_zero` has sixteen.
    """
    R: tl.constexpr = x.shape[0]
    signs = tl.reduce(_magnitudes(x, THREADS, True), 3, _or)  # [R, 1, THREADS]
    signs = signs[:, :, :, None].broadcast_to(R, 1, THREADS, 16).reshape(R, 16 * THREADS)
    asm: tl.constexpr = _RUN_BF16_PTX if x.dtype == tl.bfloat16 else _RUN_FP16_PTX
    return tl.inline_asm_elementwise(
        asm, _RUN_REGISTERS, [x, signs], dtype=x.dtype, is_pure=True, pack=16
    )


@triton.jit
def _or(a, b):
    return a | b
