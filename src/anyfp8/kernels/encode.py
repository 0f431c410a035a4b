"""q = encode(x · inverse): the device functions that every quantization kernel is made of.

The bytes are those of `fp8.encode` on every GPU. Three ways lead there and ENCODE names one:
"hardware" (Triton's cast, exact from SM90), "ptx" (the fp32 instruction inline, for SM89, where
Triton 3.6 to 3.8 truncate to fp16 first) and "integer" (everywhere else, and in Triton's
interpreter). The surprise: below SM89 FP8_DTYPE is `float8e4b15`, whose bytes mean something else;
it only names the format here and is never cast to.

Scales are the same bits with and without PTX (fp32 instructions that every CUDA GPU has): it only
spares the branches of a general division.
"""

import triton
import triton.language as tl

_E4M3_PTX = tl.constexpr("""
{
    .reg .b16 low, high;
    cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
    mov.b32 $0, {low, high};
}
""")
_E5M2_PTX = tl.constexpr("""
{
    .reg .b16 low, high;
    cvt.rn.satfinite.e5m2x2.f32 low, $2, $1;
    cvt.rn.satfinite.e5m2x2.f32 high, $4, $3;
    mov.b32 $0, {low, high};
}
""")

# four codes at once: 0x7F, the only NaN that the hardware makes, becomes 0. No code is 0xFF, so the
# sum carries nothing into its neighbour
_NAN_TO_ZERO_PTX = tl.constexpr("""
{
    .reg .b32 flag, low;
    add.u32 flag, $1, 0x01010101;
    lop3.b32 flag, flag, $1, 0x80808080, 0x20;
    shr.u32 low, flag, 7;
    sub.u32 flag, $1, flag;
    add.u32 $0, flag, low;
}
""")
# amax / max by Markstein's correction, exact where nothing over- or underflows; the reciprocal is
# what rcp.rn compiles to, without its branch for exponents that a scale cannot have
_SCALES_PTX = tl.constexpr("""
{
    .reg .f32 scale, rest, inverse;
    mul.rn.f32 scale, $2, $3;
    fma.rn.f32 rest, scale, $4, $2;
    fma.rn.f32 scale, rest, $3, scale;
    rcp.approx.ftz.f32 inverse, scale;
    neg.f32 rest, scale;
    fma.rn.f32 rest, rest, inverse, 0f3F800000;
    fma.rn.f32 $1, inverse, rest, inverse;
    mov.f32 $0, scale;
}
""")
_STORE_PTX = tl.constexpr("""
{
    .reg .pred inside;
    setp.ne.b32 inside, $3, 0;
    @inside st.global.f32 [$1], $2;
    mov.b32 $0, 0;
}
""")
_BF16_PAIR_PTX = tl.constexpr("""
    shl.b32 $0, $2, 16;
    and.b32 $1, $2, 0xFFFF0000;
""")


@triton.jit
def offset(row, stride):
    """row · stride in int64: it passes 2**31 from 74,899 rows of 28,672 columns.

    Neither is negative, so that two 32-bit factors take one instruction instead of four.
    """
    # a stride of 1 comes as a constant, which has no type
    step = row * 0 + stride
    if step.dtype == tl.int32:
        return (row.to(tl.uint32).to(tl.uint64) * step.to(tl.uint32).to(tl.uint64)).to(tl.int64)
    else:
        return row.to(tl.int64) * step


@triton.jit
def encode(
    x,
    FP8_DTYPE: tl.constexpr,
    FP8_MAX: tl.constexpr,
    ENCODE: tl.constexpr,
    NAN_TO_ZERO: tl.constexpr = False,
):
    """fp32 tensor -> uint8 codes: nearest even, saturating at FP8_MAX, NaN to the canonical NaN."""
    # inline assembly takes four values at a time, which the tile of one or two columns has not
    if ENCODE == "integer" or x.numel < 4:
        if FP8_DTYPE == tl.float8e5:
            return _encode_integer(x, 2, 15, 0x7B, 0 if NAN_TO_ZERO else 0x7F, True, 128.0)
        elif FP8_DTYPE == tl.float8e4b8:
            nan: tl.constexpr = 0 if NAN_TO_ZERO else 0x80
            # 224 is the largest value that some ROCm stacks use instead of 240
            largest: tl.constexpr = 0x7E if FP8_MAX == 224.0 else 0x7F
            return _encode_integer(x, 3, 8, largest, nan, False, 8192.0)
        else:
            return _encode_integer(x, 3, 7, 0x7E, 0 if NAN_TO_ZERO else 0x7F, True, 16384.0)
    else:
        if ENCODE == "hardware":
            code = x.to(FP8_DTYPE).to(tl.uint8, bitcast=True)
        else:
            asm: tl.constexpr = _E5M2_PTX if FP8_DTYPE == tl.float8e5 else _E4M3_PTX
            code = tl.inline_asm_elementwise(
                asm, "=r,r,r,r,r", [x], dtype=tl.uint8, is_pure=True, pack=4
            )
        if NAN_TO_ZERO:
            code = tl.inline_asm_elementwise(
                _NAN_TO_ZERO_PTX, "=r,r", [code], dtype=tl.uint8, is_pure=True, pack=4
            )
        return code


@triton.jit
def _encode_integer(
    x,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    MAX_CODE: tl.constexpr,
    NAN_CODE: tl.constexpr,
    SIGNED_ZERO: tl.constexpr,
    MAGIC: tl.constexpr,
):
    SHIFT: tl.constexpr = 23 - MANTISSA
    MAX_BITS: tl.constexpr = (MAX_CODE + ((127 - BIAS) << MANTISSA)) << SHIFT
    MAGIC_BITS: tl.constexpr = (127 + 24 - BIAS - MANTISSA) << 23
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # the add of half an ulp less one, plus the lowest kept bit, rounds halves to even
    rounded = magnitude + ((1 << (SHIFT - 1)) - 1) + ((magnitude >> SHIFT) & 1)
    normal = (rounded >> SHIFT) - ((127 - BIAS) << MANTISSA)
    # subnormal codes: an ulp of MAGIC is their step, so the adder rounds to even
    tiny = (magnitude.to(tl.float32, bitcast=True) + MAGIC).to(tl.int32, bitcast=True) - MAGIC_BITS
    code = tl.where(magnitude < ((128 - BIAS) << 23), tiny, normal)
    code = tl.where(magnitude > MAX_BITS, MAX_CODE, code)
    sign = (bits >> 24) & 0x80
    if not SIGNED_ZERO:
        sign = tl.where(code == 0, 0, sign)
    code = tl.where(magnitude > 0x7F800000, NAN_CODE, code | sign)
    return code.to(tl.uint8)


@triton.jit
def to_fp32(x, PTX: tl.constexpr):
    if PTX and x.dtype == tl.bfloat16:
        # one instruction a value; the compiler takes two for every other one
        return tl.inline_asm_elementwise(
            _BF16_PAIR_PTX, "=r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2
        )
    else:
        return x.to(tl.float32)


@triton.jit
def store_where_held(at, value, inside, lanes, PTX: tl.constexpr):
    """Store [R] fp32 values as reductions leave them: the lane of column 0 has each and stores it.

    `tl.store` would first deal values out to other threads, for which warps wait. `lanes` are the
    columns of the tile, which has as many values as the program threads, or two would store.
    """
    if PTX:
        tl.inline_asm_elementwise(
            _STORE_PTX,
            "=r,l,f,r",
            [
                at.to(tl.int64)[:, None],
                value[:, None],
                (inside[:, None] & (lanes == 0)[None, :]).to(tl.int32),
            ],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(at, value, mask=inside)


@triton.jit
def scale_of(amax, floor, FP8_MAX: tl.constexpr, UE8M0: tl.constexpr):
    """max(amax, floor) / FP8_MAX, correctly rounded; up to the next power of two for UE8M0."""
    scale = tl.div_rn(tl.maximum(amax, floor), FP8_MAX)
    if UE8M0:
        scale = (ue8m0_of(scale) << 23).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def ue8m0_of(scale):
    """int32 exponent code of a normal positive fp32 scale, rounded up; exact for powers of two."""
    bits = scale.to(tl.int32, bitcast=True)
    return (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)


@triton.jit
def inverse_of(scale):
    # Triton's `/` is approximate for fp32; the reference's is not
    return tl.div_rn(1.0, scale)


@triton.jit
def scales_of(amax, floor, FP8_MAX: tl.constexpr, UE8M0: tl.constexpr, PTX: tl.constexpr):
    """(scale, 1 / scale) of amax >= 0, both as `scale_of` and `inverse_of` round them."""
    if PTX:
        # floor >= 1e-30 keeps every step a normal number
        scale, inverse = tl.inline_asm_elementwise(
            _SCALES_PTX,
            "=f,=f,f,f,f",
            [tl.maximum(amax, floor), 1.0 / FP8_MAX, -FP8_MAX],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        scale = scale_of(amax, floor, FP8_MAX, False)
        inverse = inverse_of(scale)
    if UE8M0:
        code = ue8m0_of(scale)
        scale = (code << 23).to(tl.float32, bitcast=True)
        inverse = ((254 - code) << 23).to(tl.float32, bitcast=True)
    return scale, inverse


@triton.jit
def silu_mul(gate, up, DTYPE: tl.constexpr):
    """silu(gate) · up in DTYPE, rounded to it after each step, like the unfused operations."""
    g = gate.to(tl.float32)
    act = tl.div_rn(g, 1.0 + tl.exp(-g))
    return (act.to(DTYPE).to(tl.float32) * up.to(tl.float32)).to(DTYPE)
