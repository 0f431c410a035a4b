"""q = encode(x · inverse): the device functions that every quantization kernel is made of.

The bytes are those of `fp8.encode` on every GPU. Three ways lead there and ENCODE names one:
"hardware" (Triton's cast, exact from SM90), "ptx" (the fp32 instruction inline, for SM89, where
Triton 3.6 to 3.8 truncate to fp16 first) and "integer" (everywhere else, and in Triton's
interpreter). The
surprise: below SM89 FP8_DTYPE is `float8e4b15`, whose bytes mean something else; it only names the
format here and is never cast to.
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


@triton.jit
def encode(x, FP8_DTYPE: tl.constexpr, FP8_MAX: tl.constexpr, ENCODE: tl.constexpr):
    """fp32 tensor -> uint8 codes: nearest even, saturating at FP8_MAX, NaN to the canonical NaN."""
    if ENCODE == "hardware":
        return x.to(FP8_DTYPE).to(tl.uint8, bitcast=True)
    elif ENCODE == "ptx":
        if FP8_DTYPE == tl.float8e5:
            return tl.inline_asm_elementwise(
                _E5M2_PTX, "=r,r,r,r,r", [x], dtype=tl.uint8, is_pure=True, pack=4
            )
        else:
            return tl.inline_asm_elementwise(
                _E4M3_PTX, "=r,r,r,r,r", [x], dtype=tl.uint8, is_pure=True, pack=4
            )
    elif FP8_DTYPE == tl.float8e5:
        return _encode_integer(x, 2, 15, 0x7B, 0x7F, True, 128.0)
    elif FP8_DTYPE == tl.float8e4b8:
        # 224 is the largest value that some ROCm stacks use instead of 240
        if FP8_MAX == 224.0:
            return _encode_integer(x, 3, 8, 0x7E, 0x80, False, 8192.0)
        else:
            return _encode_integer(x, 3, 8, 0x7F, 0x80, False, 8192.0)
    else:
        return _encode_integer(x, 3, 7, 0x7E, 0x7F, True, 16384.0)


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
def finite_abs(x):
    """|x|, 0 for inf and NaN: an inf must not flatten the row it stands in."""
    a = tl.abs(x)
    return tl.where(a <= 3.4028234663852886e38, a, 0.0)


@triton.jit
def nan_to_zero(x):
    return tl.where(x == x, x, 0.0)


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
def silu_mul(gate, up, DTYPE: tl.constexpr):
    """silu(gate) · up as fp32, rounded to DTYPE after each step, like the unfused operations."""
    g = gate.to(tl.float32)
    act = tl.div_rn(g, 1.0 + tl.exp(-g))
    return (act.to(DTYPE).to(tl.float32) * up.to(tl.float32)).to(DTYPE).to(tl.float32)
