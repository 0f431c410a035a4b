"""q = encode(x), x = decode(q): the 8-bit formats, bit for bit, in plain PyTorch.

Who uses which: NVIDIA from SM89, gfx950 and gfx12xx multiply e4m3fn; gfx942 multiplies e4m3fnuz;
e5m2 is the wide one. UE8M0 is a scale format: eight exponent bits, 2^(code - 127), 255 is NaN.

The surprise: Triton's `float8e4b15`, all it offers below SM89, is *not* another name for e4m3fn.
The same byte means 1/256 of the e4m3fn value, so kernels there must build e4m3fn bytes by integer
arithmetic. `fp8_dtype_to_triton` answers with it, `encoding_for` says what a kernel does about it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from anyfp8.errors import InputError, MissingPackage


@dataclass(frozen=True)
class Format:
    """One 8-bit float format.

    Attributes:
        name: the field's name; also the end of the torch dtype's name.
        exponent_bits, mantissa_bits, bias: its layout below the sign bit.
        max: largest finite value.
        max_code: the byte of `max`.
        nan_code: the byte that every NaN becomes here.
        signed_zero: whether 0x80 is -0 (it is NaN in fnuz formats).
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    max_code: int
    nan_code: int
    signed_zero: bool

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype. Raises InputError where this torch does not have it."""
        found = getattr(torch, f"float8_{self.name}", None)
        if found is None:
            raise InputError(
                f"this torch has no dtype float8_{self.name}",
                got=f"torch {torch.__version__}",
                want="torch >= 2.10",
                hint="pip install -U torch, or keep the data as uint8",
            )
        return found

    @property
    def min_normal(self) -> float:
        return 2.0 ** (1 - self.bias)


E4M3FN = Format("e4m3fn", 4, 3, 7, 448.0, 0x7E, 0x7F, True)
E4M3FNUZ = Format("e4m3fnuz", 4, 3, 8, 240.0, 0x7F, 0x80, False)
E5M2 = Format("e5m2", 5, 2, 15, 57344.0, 0x7B, 0x7F, True)
FORMATS: dict[str, Format] = {f.name: f for f in (E4M3FN, E4M3FNUZ, E5M2)}

# a scale is never below this: amax of 1e-10 (the floor that SGLang's and vLLM's kernels use)
AMAX_FLOOR = 1e-10

_TRITON_NAMES = {"e4m3fn": "float8e4nv", "e4m3fnuz": "float8e4b8", "e5m2": "float8e5"}


def format_of(dtype: torch.dtype) -> Format:
    """The `Format` of a torch FP8 dtype. Raises InputError for any other dtype."""
    for fmt in FORMATS.values():
        if dtype == getattr(torch, f"float8_{fmt.name}", None):
            return fmt
    raise InputError(
        "not an FP8 dtype that anyfp8 knows",
        got=str(dtype),
        want=", ".join(f"torch.float8_{name}" for name in FORMATS),
    )


def encode(x: torch.Tensor, fmt: Format = E4M3FN) -> torch.Tensor:
    """Round to the nearest code, ties to even, saturating.

    Args:
        x: [...] fp32, bf16 or fp16, any strides.

    Returns:
        [...] uint8, contiguous. Values past the largest finite one and +-inf become +-max, every
        NaN the format's canonical NaN byte, -0 keeps its sign where the format has one (OCP 8-bit
        floating point specification 1.0, saturating mode).

    Raises:
        InputError: x is not fp32, bf16 or fp16.
    """
    if fmt.name == "e4m3fnuz":
        return encode_bits(x, fmt)
    f = _as_fp32(x)
    # torch versions disagree on overflow, so the clamp comes first; it keeps NaN
    codes = f.clamp(-fmt.max, fmt.max).to(fmt.dtype).view(torch.uint8)
    return torch.where(f.isnan(), fmt.nan_code, codes).contiguous()


def encode_bits(x: torch.Tensor, fmt: Format = E4M3FN) -> torch.Tensor:
    """`encode` by integer arithmetic only: what kernels do where there is no FP8 hardware.

    Normal range: add half an ulp minus one plus the lowest kept bit, shift, take the re-bias off.
    Below it: add 2^(24 - bias - mantissa bits), whose ulp is the subnormal step, so that the adder
    rounds to even.
    """
    f = _as_fp32(x)
    bits = f.contiguous().view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    shift = 23 - fmt.mantissa_bits
    rounded = magnitude + ((1 << (shift - 1)) - 1) + ((magnitude >> shift) & 1)
    normal = (rounded >> shift) - ((127 - fmt.bias) << fmt.mantissa_bits)
    magic = torch.tensor(2.0 ** (24 - fmt.bias - fmt.mantissa_bits), dtype=torch.float32)
    magic_bits = int(magic.view(torch.int32))
    tiny = (magnitude.view(torch.float32) + magic.to(f.device)).view(torch.int32) - magic_bits
    least_normal = (128 - fmt.bias) << 23
    code = torch.where(magnitude < least_normal, tiny, normal)
    # above max + half an ulp the sum could carry into the sign bit: compare the input, not the code
    huge = torch.tensor(fmt.max, dtype=torch.float32).view(torch.int32).item()
    code = torch.where(magnitude > huge, fmt.max_code, code)
    sign = (bits >> 24) & 0x80
    if not fmt.signed_zero:
        sign = torch.where(code == 0, 0, sign)
    code = torch.where(magnitude > 0x7F800000, fmt.nan_code, code | sign)
    return code.to(torch.uint8)


def decode(
    codes: torch.Tensor, fmt: Format = E4M3FN, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The exact value of each code.

    Args:
        codes: [...] uint8, or the torch FP8 dtype of `fmt`.
        dtype: of the result; fp32, bf16 and fp16 hold every value of every format exactly.

    Returns:
        [...] of `dtype`; NaN codes give NaN.
    """
    raw = codes if codes.dtype == torch.uint8 else codes.view(torch.uint8)
    if fmt.name == "e4m3fnuz":
        return decode_table(fmt).to(raw.device)[raw.int()].to(dtype)
    return raw.view(fmt.dtype).to(dtype)


def decode_table(fmt: Format) -> torch.Tensor:
    """[256] fp32: the value of each code, from the format's definition."""
    values = []
    for code in range(256):
        exponent = (code & 0x7F) >> fmt.mantissa_bits
        mantissa = code & ((1 << fmt.mantissa_bits) - 1)
        fraction = mantissa / (1 << fmt.mantissa_bits)
        if exponent == 0:
            value = fraction * fmt.min_normal
        else:
            value = (1 + fraction) * 2.0 ** (exponent - fmt.bias)
        if fmt.signed_zero and (code & 0x7F) > fmt.max_code:
            infinite = fmt is E5M2 and mantissa == 0
            value = float("inf") if infinite else float("nan")
        if not fmt.signed_zero and code == fmt.nan_code:
            value = float("nan")
        values.append(-value if code & 0x80 else value)
    return torch.tensor(values, dtype=torch.float32)


def encode_ue8m0(scale: torch.Tensor) -> torch.Tensor:
    """Round positive scales *up* to a power of two, by bit arithmetic.

    Args:
        scale: [...] fp32, >= 0. Zero becomes 2^-127.

    Returns:
        [...] uint8 exponent codes; NaN and inf become 255 (NaN), values above 2^127 do too.
    """
    bits = scale.contiguous().view(torch.int32) & 0x7FFFFFFF
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # a subnormal up to 2^-127 is code 0, above it code 1
    up = torch.where(exponent == 0, mantissa > 0x400000, mantissa != 0)
    return (exponent + up.int()).clamp(max=255).to(torch.uint8)


def decode_ue8m0(codes: torch.Tensor) -> torch.Tensor:
    """[...] fp32 value 2^(code - 127) of uint8 (or float8_e8m0fnu) exponent codes; 255 is NaN."""
    raw = codes if codes.dtype == torch.uint8 else codes.view(torch.uint8)
    exponent = raw.int()
    bits = torch.where(exponent == 0, 0x400000, exponent << 23)
    bits = torch.where(exponent == 255, 0x7FC00000, bits)
    return bits.view(torch.float32)


def fn_to_fnuz(codes: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same values for a GPU that multiplies e4m3fnuz: same bytes, twice the scale.

    A fnuz byte means half of what the e4m3fn byte means; 0x80 (-0, NaN in fnuz) becomes 0x00.

    Args:
        codes: [...] uint8 e4m3fn without NaN codes. scale: fp32, any shape.

    Returns:
        ([...] uint8 e4m3fnuz, scale * 2).
    """
    return torch.where(codes == 0x80, 0, codes).to(torch.uint8), scale * 2


def _as_fp32(x: torch.Tensor) -> torch.Tensor:
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise InputError(
            "cannot encode this tensor as FP8",
            got=f"dtype {x.dtype}, shape {tuple(x.shape)}",
            want="torch.float32, torch.bfloat16 or torch.float16",
        )
    return x.float()


def cuda_capability_uses_fp8_e4b15(capability: tuple[int, int]) -> bool:
    """Whether Triton offers only `float8e4b15` for E4M3 on a CUDA GPU: strictly below (8, 9)."""
    return tuple(capability) < (8, 9)


def use_fp8_e4b15_for_e4m3fn(
    device: torch.device | str | int | None = None,
    cuda_capability: tuple[int, int] | None = None,
) -> bool:
    """Whether Triton's type for e4m3fn on this device is `float8e4b15`.

    Args:
        device: a torch device; the current one by default.
        cuda_capability: answer for a CUDA GPU of this capability instead of asking the device.

    Returns:
        True only for CUDA GPUs below SM89. HIP, MUSA, CPU and machines without a GPU: False.
    """
    from anyfp8.device import runtime

    if runtime() not in ("cuda", "none"):
        return False
    if device is not None and torch.device(device).type != "cuda":
        return False
    if cuda_capability is None:
        if runtime() != "cuda":
            return False
        major, minor = torch.cuda.get_device_capability(device)
        cuda_capability = (major, minor)
    return cuda_capability_uses_fp8_e4b15(cuda_capability)


def fp8_dtype_to_triton(
    fp8_dtype: torch.dtype,
    *,
    device: torch.device | str | int | None = None,
    cuda_capability: tuple[int, int] | None = None,
) -> Any:
    """The Triton type that a device offers for a torch FP8 dtype.

    Returns:
        `tl.float8e4b15` (e4m3fn on CUDA below SM89), `tl.float8e4nv` (e4m3fn elsewhere),
        `tl.float8e4b8` (e4m3fnuz) or `tl.float8e5` (e5m2).

    Raises:
        InputError: (a ValueError) any other dtype; names it.
        MissingPackage: Triton is not installed.
    """
    name = triton_type_name(fp8_dtype, device=device, cuda_capability=cuda_capability)
    try:
        import triton.language as tl
    except ImportError as error:
        raise MissingPackage(
            f"Triton's type {name} needs Triton",
            got="no module named triton",
            want="Triton 3.6 to 3.9",
            hint="pip install 'anyfp8[dev]', or a CUDA build of torch",
        ) from error
    return getattr(tl, name)


def triton_type_name(
    fp8_dtype: torch.dtype,
    *,
    device: torch.device | str | int | None = None,
    cuda_capability: tuple[int, int] | None = None,
) -> str:
    """`fp8_dtype_to_triton` as a name, without importing Triton."""
    fmt = format_of(fp8_dtype)
    if fmt is E4M3FN and use_fp8_e4b15_for_e4m3fn(device, cuda_capability):
        return "float8e4b15"
    return _TRITON_NAMES[fmt.name]


@dataclass(frozen=True)
class Encoding:
    """How a kernel turns fp32 into FP8 bytes on a device, and why.

    Attributes:
        how: "hardware" (Triton's cast), "ptx" (cvt.rn.satfinite from fp32, inline) or "integer".
        triton_type: Triton's name of the format there, as `triton_type_name` answers.
        reason: a clause for `doctor` and `explain`.
    """

    how: str
    triton_type: str
    reason: str


def encoding_for(
    fmt: Format,
    *,
    cuda_capability: tuple[int, int] | None,
    interpreted: bool = False,
) -> Encoding:
    """The encoding of a format on a CUDA capability; None is HIP, the CPU or anything else."""
    name = _TRITON_NAMES[fmt.name]
    old = cuda_capability is not None and cuda_capability_uses_fp8_e4b15(cuda_capability)
    if old and fmt is E4M3FN:
        name = "float8e4b15"
    if interpreted:
        return Encoding("integer", name, "Triton's interpreter rounds FP8 casts wrongly")
    if cuda_capability is None:
        return Encoding("integer", name, "only CUDA's conversions are proven bit-exact")
    if fmt is E4M3FNUZ:
        return Encoding("integer", name, "CUDA GPUs have no e4m3fnuz conversion")
    if old:
        return Encoding("integer", name, "there is no FP8 conversion below SM89")
    if tuple(cuda_capability) < (9, 0):
        return Encoding("ptx", name, "Triton 3.6 to 3.8 truncate to fp16 first on SM89")
    return Encoding("hardware", name, "cvt.rn.satfinite from fp32 is exact from SM90")
