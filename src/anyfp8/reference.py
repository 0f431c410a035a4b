"""q = encode(x / scale), y = decode(q) · scale: the specification, in plain PyTorch.

Every kernel matches these functions bit for bit (data, scale, shape, stride). One definition of the
scale serves all granularities: scale = max(amax, 1e-10) / 448 in fp32, inv = 1 / scale correctly
rounded, q = encode(x · inv). The surprise: amax is taken over finite values only, so that an inf
saturates and a NaN stays a NaN without touching its neighbours.
"""

from __future__ import annotations

import torch

from anyfp8 import fp8
from anyfp8.errors import InputError
from anyfp8.problem import QTensor, Scheme


def finite_amax(x: torch.Tensor, dim: int | tuple[int, ...] | None = None) -> torch.Tensor:
    """Largest finite magnitude along `dim` (kept), fp32; 0 where no element is finite."""
    magnitude = torch.where(x.isfinite(), x.float().abs(), 0.0)
    if dim is None:
        return magnitude.amax() if magnitude.numel() else magnitude.new_zeros(())
    return magnitude.amax(dim, keepdim=True)


def scale_of(
    amax: torch.Tensor,
    fmt: fp8.Format = fp8.E4M3FN,
    ue8m0: bool = False,
    eps: float = fp8.AMAX_FLOOR,
) -> torch.Tensor:
    """max(amax, eps) / max of the format, fp32; rounded up to a power of two for UE8M0."""
    # a tensor divisor: torch may turn a scalar one into a multiplication by its reciprocal
    largest = torch.tensor(fmt.max, dtype=torch.float32, device=amax.device)
    scale = amax.float().clamp(min=eps) / largest
    return fp8.decode_ue8m0(fp8.encode_ue8m0(scale)) if ue8m0 else scale


def quantize_with(
    x: torch.Tensor, scale: torch.Tensor, fmt: fp8.Format = fp8.E4M3FN
) -> torch.Tensor:
    """encode(x · (1 / scale)) as the format's dtype.

    Args:
        x: [..., K] fp32, bf16 or fp16. scale: fp32, positive, broadcastable to x.
    """
    inverse = torch.ones((), dtype=torch.float32, device=x.device) / scale
    return _typed(fp8.encode(x.float() * inverse, fmt), fmt)


def quantize_per_tensor(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    fmt: fp8.Format = fp8.E4M3FN,
    eps: float = fp8.AMAX_FLOOR,
) -> QTensor:
    """One scale for all of x: [...] -> data [...], scale [].

    Args:
        scale: a static fp32 scale with one element; None computes it from x.
    """
    one = scale_of(finite_amax(x), fmt, eps=eps) if scale is None else scale
    scale = one.float().reshape(())
    return QTensor(quantize_with(x, scale, fmt), scale, fmt=fmt)


def quantize_per_token(
    x: torch.Tensor, fmt: fp8.Format = fp8.E4M3FN, eps: float = fp8.AMAX_FLOOR
) -> QTensor:
    """One scale per row (a token, or a weight's channel): [..., K] -> [..., K], scale [..., 1]."""
    scale = scale_of(finite_amax(x, -1), fmt, eps=eps)
    return QTensor(quantize_with(x, scale, fmt), scale, fmt=fmt)


def quantize_per_group(
    x: torch.Tensor,
    group: int,
    ue8m0: bool = False,
    fmt: fp8.Format = fp8.E4M3FN,
    eps: float = fp8.AMAX_FLOOR,
) -> QTensor:
    """One scale per `group` columns of a row: [..., K] -> scale [..., ceil(K / group)], row-major.

    The last group is shorter when `group` does not divide K.
    """
    return _quantize_blocks(x, (1, group), ue8m0, fmt, eps)


def quantize_mla_per_group(
    x: torch.Tensor,
    group: int = 128,
    pad_rows_to: int = 256,
    ue8m0: bool = False,
    fmt: fp8.Format = fp8.E4M3FN,
    eps: float = fp8.AMAX_FLOOR,
) -> tuple[QTensor, torch.Tensor]:
    """[batch, tokens, K] in rows padded for a masked grouped GEMM, and its masked_m [batch] int32.

    Data [batch, padded, K] and scale [batch, padded, K/group], whose rows are the fastest axis.
    Rows past masked_m are 0 with scale 1 here; kernels leave anything there.
    """
    batch, m, k = x.shape
    q = quantize_per_group(x, group, ue8m0, fmt, eps)
    padded = -(-m // pad_rows_to) * pad_rows_to
    codes = torch.zeros((batch, padded, k), dtype=torch.uint8, device=x.device)
    codes[:, :m] = q.codes
    scale = empty_scale((batch, padded), q.scale.shape[-1], "column", x.device).fill_(1)
    scale[:, :m] = q.scale
    counts = torch.full((batch,), m, dtype=torch.int32, device=x.device)
    return QTensor(_typed(codes, fmt), scale, (1, group), fmt), counts


def quantize_block(
    w: torch.Tensor,
    block: tuple[int, int] = (128, 128),
    ue8m0: bool = False,
    fmt: fp8.Format = fp8.E4M3FN,
) -> QTensor:
    """One scale per block of a weight: [N, K] -> scale [ceil(N / bn), ceil(K / bk)].

    Blocks at the lower and right edge are smaller when the block does not divide the shape.
    """
    return _quantize_blocks(w, block, ue8m0, fmt)


def _quantize_blocks(
    x: torch.Tensor,
    block: tuple[int, int],
    ue8m0: bool,
    fmt: fp8.Format,
    eps: float = fp8.AMAX_FLOOR,
) -> QTensor:
    rows, columns = x.shape[-2] if x.ndim > 1 else 1, x.shape[-1]
    bn, bk = block
    padded = torch.nn.functional.pad(
        x.float(), (0, -columns % bk, 0, -rows % bn) if bn > 1 else (0, -columns % bk)
    )
    if bn == 1:
        tiles = padded.unflatten(-1, (-1, bk))
        scale = scale_of(finite_amax(tiles, -1), fmt, ue8m0, eps)
        scale = scale.squeeze(-1)
    else:
        tiles = padded.unflatten(-1, (-1, bk)).unflatten(-3, (-1, bn))
        scale = scale_of(finite_amax(tiles, (-3, -1)), fmt, ue8m0, eps)
        scale = scale.squeeze((-3, -1))
    data = quantize_with(x, expand_scale(scale, block, x.shape), fmt)
    return QTensor(data, scale, block, fmt)


def expand_scale(
    scale: torch.Tensor, block: tuple[int, int], shape: torch.Size | tuple[int, ...]
) -> torch.Tensor:
    """Repeat block (or group) scales so that they broadcast to `shape`, cut at the edges."""
    full = scale.repeat_interleave(block[1], dim=-1)[..., : shape[-1]]
    if block[0] > 1:
        full = full.repeat_interleave(block[0], dim=-2)[..., : shape[-2], :]
    return full


# how the scales of groups lie in memory: row-major, transposed, transposed with rows padded to a
# multiple of 4 (16 bytes, what TMA loads), or four UE8M0 exponents to an int32 stored like that
SCALE_LAYOUTS = ("row", "column", "tma", "packed")


def empty_scale(
    rows: torch.Size | tuple[int, ...], n_groups: int, layout: str, device: torch.device | str
) -> torch.Tensor:
    """An unwritten [*rows, n_groups] fp32 scale in a layout; int32 [*rows, ceil(n/4)] if packed."""
    dtype = torch.int32 if layout == "packed" else torch.float32
    words = -(-n_groups // 4) if layout == "packed" else n_groups
    if layout == "row" or not len(rows):
        return torch.empty((*rows, words), dtype=dtype, device=device)
    *batch, m = rows
    padded = m if layout == "column" else -(-m // 4) * 4
    return torch.empty((*batch, words, padded), dtype=dtype, device=device).mT[..., :m, :]


def arrange_scale(scale: torch.Tensor, layout: str) -> torch.Tensor:
    """Group scales [..., M, groups] in another layout; "packed" ones must be powers of two."""
    arranged = empty_scale(scale.shape[:-1], scale.shape[-1], layout, scale.device)
    return arranged.copy_(pack_ue8m0(scale) if layout == "packed" else scale)


def pack_ue8m0(scale: torch.Tensor) -> torch.Tensor:
    """[..., groups] fp32 powers of two -> [..., ceil(groups/4)] int32: group 4i + j in byte j."""
    codes = fp8.encode_ue8m0(scale)
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % 4))
    return codes.contiguous().view(torch.int32)


def unpack_ue8m0(packed: torch.Tensor, n_groups: int) -> torch.Tensor:
    """[..., ceil(n/4)] int32 -> [..., n_groups] fp32, row-major."""
    codes = packed.contiguous().view(torch.uint8)[..., :n_groups]
    return fp8.decode_ue8m0(codes.contiguous())


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """[..., 2K] -> silu(x[..., :K]) · x[..., K:], in fp32, rounded to x's dtype after each step.

    The order of SGLang's fused group quantizer: what the two unfused operations would give.
    """
    gate, up = x.chunk(2, -1)
    act = (gate.float() / (1 + torch.exp(-gate.float()))).to(x.dtype)
    return (act.float() * up.float()).to(x.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, fp32, rounded to x's dtype.

    The one function here whose last bit depends on an order of summation: kernels give the bytes of
    their own norm, which is this one to within a unit in the last place of x's dtype.
    """
    f = x.float()
    # through fp64, so that the root is correctly rounded: torch's fp32 one is an ulp off for one
    # value in five on x86 (torch 2.13), and torch.rsqrt is approximate on a GPU
    root = torch.sqrt((f.square().mean(-1, keepdim=True) + eps).double()).float()
    inverse_rms = torch.ones((), dtype=torch.float32, device=x.device) / root
    return (f * inverse_rms * weight.float()).to(x.dtype)


def add(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """x + residual in fp32, rounded to x's dtype: the new residual, and what is normalized."""
    return (x.float() + residual.float()).to(x.dtype)


def nan_to_zero(x: torch.Tensor) -> torch.Tensor:
    """x with every NaN replaced by 0."""
    return torch.where(x.isnan(), torch.zeros((), dtype=x.dtype, device=x.device), x)


def dequantize(q: QTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """decode(data) · scale, multiplied in fp32 and rounded once to `dtype`."""
    values = fp8.decode(q.codes, q.fmt)
    scale = q.scale
    if q.packed:
        raise InputError(
            "cannot dequantize packed UE8M0 scales",
            got=f"{scale.dtype} {list(scale.shape)}",
            want="fp32 scales, one a group",
            hint="reference.unpack_ue8m0(q.scale, groups) makes them fp32",
        )
    if q.block is not None:
        scale = expand_scale(scale, q.block, q.data.shape)
    return (values * scale).to(dtype)


def quantize_weight(w: torch.Tensor, scheme: Scheme, fmt: fp8.Format = fp8.E4M3FN) -> QTensor:
    """Quantize a weight [N, K] as a scheme says: tensor, channel or block scales."""
    if scheme.weight == "tensor":
        return quantize_per_tensor(w, fmt=fmt)
    if scheme.weight == "channel":
        return quantize_per_token(w, fmt)
    assert scheme.block is not None
    return quantize_block(w, scheme.block, scheme.scale_format == "ue8m0", fmt)


def quantize_activation(
    x: torch.Tensor, scheme: Scheme, input_scale: torch.Tensor | None = None
) -> QTensor | None:
    """Quantize activations [..., K] as a scheme says; None for weight-only schemes.

    Args:
        input_scale: fp32 with one element, required by static schemes.
    """
    if scheme.activation == "none":
        return None
    if scheme.activation == "tensor":
        if not scheme.dynamic and input_scale is None:
            raise InputError(
                "a static scheme needs its input_scale",
                got="input_scale=None",
                want="one positive fp32 value from calibration",
                hint="calibrate, or choose a dynamic scheme such as w8a8-channel-token",
            )
        return quantize_per_tensor(x, None if scheme.dynamic else input_scale)
    if scheme.activation == "token":
        return quantize_per_token(x)
    assert scheme.group is not None
    return quantize_per_group(x, scheme.group, scheme.scale_format == "ue8m0")


def linear(
    x: torch.Tensor,
    w: QTensor,
    scheme: Scheme,
    *,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """y = dequantize(quantize(x)) · dequantize(w)ᵀ + bias in fp64, rounded once.

    Args:
        x: [..., K] bf16, fp16 or fp32. w: [N, K]. bias: [N] or None.

    Returns:
        [..., N] of `out_dtype` (x's dtype by default).
    """
    q = quantize_activation(x, scheme, input_scale)
    a = x.double() if q is None else dequantize(q).double()
    y = a @ dequantize(w).double().T
    if bias is not None:
        y = y + bias.double()
    return y.to(out_dtype or x.dtype)


def _typed(codes: torch.Tensor, fmt: fp8.Format) -> torch.Tensor:
    dtype = getattr(torch, f"float8_{fmt.name}", None)
    return codes if dtype is None else codes.view(dtype)
