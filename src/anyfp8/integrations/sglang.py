"""SGLang's FP8 functions under its names, argument names, defaults and return values.

Who uses it: SGLang, whose call sites need only another import, and developers who know its names.
Signatures follow SGLang 0.5.23. The surprises, each on the safe side: strided x is taken where
SGLang asserts contiguity, `x_s_out` of the MLA quantizer need not be cleared, an infinity does not
flatten its neighbours, and bad arguments raise `InputError` (a ValueError), not AssertionError.
"""

from __future__ import annotations

import torch

from anyfp8 import fp8, quantize
from anyfp8.errors import InputError
from anyfp8.fp8 import fp8_dtype_to_triton, use_fp8_e4b15_for_e4m3fn
from anyfp8.integrations.marlin import (
    ModelOptFp8LinearMethod,
    apply_fp8_marlin_linear,
    can_auto_enable_marlin_fp8,
    prepare_fp8_layer_for_marlin,
)
from anyfp8.integrations.sglang_linear import apply_fp8_linear, triton_scaled_mm
from anyfp8.integrations.sglang_tables import (
    get_w8a8_block_fp8_configs,
    get_w8a8_channelwise_fp8_config,
    get_w8a8_channelwise_fp8_configs,
)
from anyfp8.quantize.mla import MASKED_ROWS

__all__ = [
    "ModelOptFp8LinearMethod",
    "apply_fp8_linear",
    "apply_fp8_marlin_linear",
    "can_auto_enable_marlin_fp8",
    "cuda_capability_uses_fp8_e4b15",
    "fp8_dtype_to_triton",
    "fp8_quantize",
    "get_w8a8_block_fp8_configs",
    "get_w8a8_channelwise_fp8_config",
    "get_w8a8_channelwise_fp8_configs",
    "per_tensor_quant_mla_fp8",
    "per_token_group_quant_fp8",
    "per_token_group_quant_mla_deep_gemm_masked_fp8",
    "prepare_fp8_layer_for_marlin",
    "scaled_fp8_quant",
    "static_quant_fp8",
    "triton_scaled_mm",
    "use_fp8_e4b15_for_e4m3fn",
]

# gfx94x: SGLang leaves headroom below the largest e4m3fnuz value, 240
_FNUZ_224 = fp8.Format("e4m3fnuz", 4, 3, 8, 224.0, 0x7E, 0x80, False)


def cuda_capability_uses_fp8_e4b15(cuda_capability: tuple[int, int]) -> bool:
    """Whether Triton offers only `float8e4b15` for E4M3 there: strictly below (8, 9)."""
    return fp8.cuda_capability_uses_fp8_e4b15(cuda_capability)


def static_quant_fp8(
    x: torch.Tensor, x_s: torch.Tensor, repeat_scale: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize with a given scale.

    Args:
        x: [..., K] bf16, fp16 or fp32.
        x_s: one fp32 element.
        repeat_scale: return the scale once for each row.

    Returns:
        Codes [..., K], and x_s itself or [rows, 1] fp32.

    Raises:
        InputError: as `quantize.per_tensor`.
    """
    q = quantize.per_tensor(x, x_s, fmt=_format_on(x.device))
    rows = x.numel() // x.shape[-1]
    return q.data, x_s.reshape(1, 1).repeat(rows, 1) if repeat_scale else x_s


def per_tensor_quant_mla_fp8(
    x: torch.Tensor, x_s_out: torch.Tensor, eps: float = 1e-12
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize [heads, tokens, dim] of any head and token strides with one scale.

    Args:
        x_s_out: [1] fp32, receives the scale.

    Returns:
        Codes [heads, tokens, dim], contiguous, and x_s_out.

    Raises:
        InputError: as `quantize.mla_per_tensor`.
    """
    q = quantize.mla_per_tensor(x, fmt=_format_on(x.device), eps=eps, out_scale=x_s_out)
    return q.data, x_s_out


def per_token_group_quant_fp8(
    x: torch.Tensor,
    group_size: int,
    eps: float = 1e-10,
    column_major_scales: bool = False,
    scale_tma_aligned: bool = False,
    scale_ue8m0: bool = False,
    fuse_silu_and_mul: bool = False,
    masked_m: torch.Tensor | None = None,
    *,
    output_q: torch.Tensor | None = None,
    output_s: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize with one scale per `group_size` columns of a row.

    Args:
        x: [..., K], or [..., 2K] with `fuse_silu_and_mul`; [experts, tokens, …] with `masked_m`.
        column_major_scales: scales transposed in memory; with `scale_tma_aligned`, rows padded to a
            multiple of 4.
        scale_ue8m0: powers of two: fp32 row-major, or packed four to an int32 where the scales are
            column-major and aligned.
        masked_m: [experts] int32, valid rows of each expert.
        output_q, output_s: to write to, as returned.

    Returns:
        Codes [..., K] and scales [..., K / group_size] (int32 [..., K / group_size / 4] if packed).

    Raises:
        InputError: a group that does not divide K; packed scales that are not aligned; and as
            `quantize.per_group`.
    """
    k = x.shape[-1] // 2 if fuse_silu_and_mul else x.shape[-1]
    if group_size < 1 or k % group_size:
        raise InputError(
            "cannot quantize per token group as SGLang does",
            got=f"K={k}, group_size={group_size}",
            want="a group_size that divides K",
            hint="anyfp8.quantize.per_group allows a shorter last group",
        )
    if scale_ue8m0 and column_major_scales and not scale_tma_aligned:
        raise InputError(
            "cannot store UE8M0 scales column-major and unaligned",
            got="scale_ue8m0=True, column_major_scales=True, scale_tma_aligned=False",
            want="scale_tma_aligned=True (packed), or column_major_scales=False (fp32)",
            hint="DeepGEMM reads packed ones: scale_tma_aligned=True",
        )
    layout = "row"
    if column_major_scales:
        layout = "packed" if scale_ue8m0 else "tma" if scale_tma_aligned else "column"
    q = quantize.per_group(
        x,
        group_size,
        layout=layout,
        ue8m0=scale_ue8m0,
        fmt=_format_on(x.device),
        eps=eps,
        counts=masked_m,
        out=output_q,
        out_scale=output_s,
        silu_mul=fuse_silu_and_mul,
    )
    return q.data, q.scale


def per_token_group_quant_mla_deep_gemm_masked_fp8(
    x: torch.Tensor,
    group_size: int = 128,
    eps: float = 1e-12,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int]:
    """Quantize [batch, tokens, K] for DeepGEMM's masked grouped GEMM.

    Args:
        dtype: of the codes; None is the device's E4M3.

    Returns:
        Codes [batch, aligned, K], scales [batch, aligned, K / group_size] stored transposed,
        masked_m [batch] int32, tokens, and aligned: tokens rounded up to a multiple of 256.

    Raises:
        InputError: as `quantize.mla_per_group`.
    """
    fmt = _format_on(x.device)
    if dtype is not None and dtype != getattr(torch, f"float8_{fmt.name}", None):
        fmt = fp8.format_of(dtype)
    q, masked_m = quantize.mla_per_group(x, group_size, pad_rows_to=MASKED_ROWS, fmt=fmt, eps=eps)
    return q.data, q.scale, masked_m, x.shape[1], q.data.shape[1]


def fp8_quantize(
    x: torch.Tensor,
    scale_inv: float = 1.0,
    out: torch.Tensor | None = None,
    fp8_dtype: torch.dtype = torch.float8_e4m3fn,
    enable_pdl: bool = False,
) -> torch.Tensor:
    """Cast x · scale_inv to FP8, saturating.

    Args:
        x: [..., K] bf16, fp16 or fp32, such as a slice of the last dimension.
        scale_inv: a number, 1 / scale.
        out: [..., K] of `fp8_dtype`.
        fp8_dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        enable_pdl: launch while the previous kernel drains (SM90+; ignored elsewhere).

    Returns:
        Codes [..., K] (or `out`).

    Raises:
        InputError: another `fp8_dtype`; and as `quantize.cast`.
    """
    fmt = fp8.format_of(fp8_dtype)
    return quantize.cast(x, scale_inv, fmt=fmt, out=out, pdl=enable_pdl)


def scaled_fp8_quant(
    input: torch.Tensor,
    scale: torch.Tensor | None = None,
    num_token_padding: int | None = None,
    use_per_token_if_dynamic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize [tokens, K] with a given scale, or with one computed per tensor or per token.

    Args:
        scale: one fp32 element; None computes the scales.
        num_token_padding: smallest number of rows of the result; rows past `input`'s hold anything.
        use_per_token_if_dynamic: compute one scale a row instead of one.

    Returns:
        Codes [max(tokens, num_token_padding), K], and `scale`, [1], or [rows, 1] fp32.

    Raises:
        InputError: `input` is not a matrix; and as the quantizers.
    """
    if input.ndim != 2:
        raise InputError(
            "cannot quantize as scaled_fp8_quant does",
            got=f"input of shape {tuple(input.shape)}",
            want="[tokens, K]",
            hint="input.flatten(0, -2)",
        )
    m, k = input.shape
    fmt = _format_on(input.device)
    rows = max(num_token_padding or 0, m)
    output = torch.empty((rows, k), dtype=fmt.dtype, device=input.device)
    if scale is not None:
        quantize.per_tensor(input, scale, fmt=fmt, out=output[:m])
        return output, scale
    made = torch.empty(
        (rows, 1) if use_per_token_if_dynamic else 1, dtype=torch.float32, device=input.device
    )
    if use_per_token_if_dynamic:
        quantize.per_token(input, fmt=fmt, out=output[:m], out_scale=made[:m])
    else:
        quantize.per_tensor(input, fmt=fmt, out=output[:m], out_scale=made)
    return output, made


def _format_on(device: torch.device) -> fp8.Format:
    """SGLang's E4M3 of a device: e4m3fnuz with a maximum of 224 on gfx94x, else e4m3fn."""
    if device.type == "cuda" and torch.version.hip is not None:
        from anyfp8.device import device_of

        if device_of(device).arch.fp8 == "e4m3fnuz":
            return _FNUZ_224
    return fp8.E4M3FN
