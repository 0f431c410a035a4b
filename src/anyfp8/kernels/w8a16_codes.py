"""decode(q) in registers: e4m3fn codes to the type that the product takes, exactly.

DECODE says how: "hardware" converts (SM89 up); "packed" moves the bits of four codes at a time by
PTX that SM75 knows; "bits" does it one by one in Triton, for AMD; "fp32" is "bits" with products in
fp32, for the interpreter, which multiplies 16-bit operands wrongly. All finite codes, subnormals
included. The surprise: "packed" and "bits" give fp16 values 2^-8 too small, undone in fp32
afterwards (`undo`), because multiplying four of them would cost as much as decoding them.
"""

import triton
import triton.language as tl

from anyfp8.kernels.operand import decode_to_fp32

# four codes in one register -> two registers of two: each code to the lower byte of its half with
# its sign in all bits above, all of it moved up to where the exponent begins, and the copies of the
# sign masked out of the exponent's lost bits
_FP16 = tl.constexpr(
    """{
    .reg .b32 a, b;
    prmt.b32 a, $2, 0, 0x9180;
    prmt.b32 b, $2, 0, 0xB3A2;
    shl.b32 a, a, 7;
    shl.b32 b, b, 7;
    and.b32 $0, a, 0xBF80BF80;
    and.b32 $1, b, 0xBF80BF80;
    }"""
)
# small codes are bf16 subnormals here, 2^-120 too small: times 2^120 at once, two by two (a product
# that may be -0 takes -0 as its addend)
_BF16 = tl.constexpr(
    """{
    .reg .b32 a, b, scale, zero;
    prmt.b32 a, $2, 0, 0x9180;
    prmt.b32 b, $2, 0, 0xB3A2;
    mov.b32 scale, 0x7B807B80;
    mov.b32 zero, 0x80008000;
    shl.b32 a, a, 4;
    shl.b32 b, b, 4;
    and.b32 a, a, 0x87F087F0;
    and.b32 b, b, 0x87F087F0;
    fma.rn.bf16x2 $0, a, scale, zero;
    fma.rn.bf16x2 $1, b, scale, zero;
    }"""
)

# two codes in each of two 16-bit words: bytes 0 and 2 are the even ones
_PAIRS_FP16 = tl.constexpr(_FP16.value.replace("0x9180", "0xA280").replace("0xB3A2", "0xB391"))
_PAIRS_BF16 = tl.constexpr(_BF16.value.replace("0x9180", "0xA280").replace("0xB3A2", "0xB391"))


@triton.jit
def decode_to(codes, DTYPE: tl.constexpr, DECODE: tl.constexpr):
    """[...] uint8 -> DTYPE (fp16 or bf16); fp16 times 2^-8 unless "hardware" or "fp32"."""
    if DECODE == "hardware" and DTYPE == tl.float16:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    elif DECODE == "bits":
        wide = codes.to(tl.int16)
        if DTYPE == tl.float16:
            bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
            return bits.to(tl.float16, bitcast=True)
        else:
            # the upper half of an fp32 is a bf16, and nothing is lost with the lower
            bits = decode_to_fp32(codes).to(tl.int32, bitcast=True) >> 16
            return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    elif DECODE == "fp32":
        return decode_to_fp32(codes)
    elif DTYPE == tl.float16:
        return tl.inline_asm_elementwise(
            _FP16, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4
        )
    else:
        return tl.inline_asm_elementwise(
            _BF16, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4
        )


@triton.jit
def decode_pairs(codes, DTYPE: tl.constexpr, DECODE: tl.constexpr):
    """[...] int16 of two codes -> DTYPE of the even ones, and of the odd ones; never "hardware"."""
    if DECODE != "packed":
        even = decode_to((codes & 0xFF).to(tl.uint8), DTYPE, DECODE)
        odd = decode_to(((codes >> 8) & 0xFF).to(tl.uint8), DTYPE, DECODE)
        return even, odd
    elif DTYPE == tl.float16:
        return tl.inline_asm_elementwise(
            _PAIRS_FP16, "=r,=r,r", [codes], (tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            _PAIRS_BF16, "=r,=r,r", [codes], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )


@triton.jit
def decode_wide(codes, DECODE: tl.constexpr):
    """[...] uint8 -> fp32, "packed" times 2^-8: for CUDA cores, where fp16 is only on the way."""
    if DECODE == "hardware":
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32)
    elif DECODE == "packed":
        return decode_to(codes, tl.float16, DECODE).to(tl.float32)
    else:
        return decode_to_fp32(codes)


@triton.jit
def undo(acc, DTYPE: tl.constexpr, DECODE: tl.constexpr):
    """A sum of products of decoded values, with the 2^8 that `decode_to` left out."""
    if DTYPE == tl.float16 and (DECODE == "packed" or DECODE == "bits"):
        return acc * 256.0
    else:
        return acc
