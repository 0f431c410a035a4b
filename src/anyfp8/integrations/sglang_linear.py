"""y = (x · W) · sx · sw + bias under SGLang's names: `triton_scaled_mm`, `apply_fp8_linear`.

Signatures follow SGLang 0.5.23; `sglang` re-exports both. The weight comes as that engine keeps it,
[K, N] with K contiguous. The surprises: padding of the output is accepted and not needed, M = 0 is
served, and where a GPU has no FP8 units (or there is none) activations stay in 16 bits unless they
come quantized.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from anyfp8 import env, gemm
from anyfp8.device import FP8_SINCE, Device, device_of
from anyfp8.errors import InputError
from anyfp8.gemm.base import Backend, CanonicalWeight, Config, canonical_weight
from anyfp8.gemm.tiles import TileConfig
from anyfp8.linear import dispatch
from anyfp8.linear.plans import plan_for
from anyfp8.problem import DTYPE_NAMES, DTYPES, Problem, QTensor, Scheme
from anyfp8.select import Plan, Request

FP8 = torch.float8_e4m3fn


def triton_scaled_mm(
    input: torch.Tensor,
    weight: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    block_size_m: int = 32,
    block_size_n: int = 32,
    block_size_k: int = 32,
    use_heuristic: bool = True,
    num_warps: int | None = None,
    num_stages: int | None = None,
) -> torch.Tensor:
    """Multiply quantized operands by the Triton kernel; by its emulation where it cannot run.

    Args:
        input: [M, K] float8_e4m3fn. weight: [K, N] of the same dtype.
        scale_a: fp32, one element or one a row. scale_b: one element or one a column.
        out_dtype: of the result. bias: [N] or None.
        block_size_m, block_size_n, block_size_k: tile, used with `use_heuristic=False` only.
        use_heuristic: take the library's own tile for the shape.
        num_warps, num_stages: of the given tile; None is 4 and 3, as in Triton.

    Returns:
        [M, N] of out_dtype.

    Raises:
        InputError: operands that do not fit each other, or a tile that this GPU cannot run.
    """
    (m, k), n = input.shape, weight.shape[1]
    if weight.shape[0] != k or input.dtype != weight.dtype or input.dtype != FP8:
        raise InputError(
            "the operands do not fit each other",
            got=f"{tuple(input.shape)} {input.dtype} by {tuple(weight.shape)} {weight.dtype}",
            want="[M, K] by [K, N], both float8_e4m3fn",
        )
    scheme = Scheme(_kind(scale_b, n, "channel"), _kind(scale_a, m, "token"), True)
    problem = Problem(
        "gemm", scheme, m, n, k, "bf16", _name(out_dtype), bias is not None, accumulate="fast"
    )
    device = device_of(input.device)
    x = QTensor(input, scale_a.float().reshape(-1, 1) if scale_a.numel() > 1 else _one(scale_a))
    backend, config = _kernel(problem, device)
    if isinstance(config, TileConfig) and not use_heuristic:
        config = TileConfig(
            block_size_m, block_size_n, block_size_k, 1, num_warps or 4, num_stages or 3
        )
        why = backend.illegal(config, problem, device)
        if why:
            raise InputError(
                f"this tile cannot run on {device.name}",
                got=f"it {why}",
                want="a tile that fits",
                hint="use_heuristic=True takes one that does",
            )
    return backend.run(x, _weight(weight, scale_b, scheme), problem, config, bias)


def apply_fp8_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    input_scale_ub: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    cutlass_fp8_supported: bool | None = None,
    use_per_token_if_dynamic: bool = False,
    pad_output: bool | None = None,
    compressed_tensor_quant: bool = False,
    pre_quant_output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Quantize x if the chosen backend wants it, and multiply.

    Tuned tables and the ranker are asked only where SGLang would have gone to CUTLASS: one weight
    scale per channel and N, K divisible by 16. Everything else keeps the default path.

    Args:
        input: [..., K] bf16, fp16 or fp32; or float8_e4m3fn, with its scales in `input_scale`.
        weight: [K, N] float8_e4m3fn. weight_scale: one element or one a column.
        input_scale: static scale, one element; None quantizes dynamically.
        input_scale_ub, pad_output: accepted, not needed.
        cutlass_fp8_supported: whether CUTLASS serves this GPU; None asks the device.
        use_per_token_if_dynamic: with `compressed_tensor_quant`, per token instead of per tensor.
        pre_quant_output_dtype: of the result of quantized input; None is bf16.

    Returns:
        [..., N] of input's dtype.

    Raises:
        InputError: operands that do not fit each other.
        NoBackend: what `ANYFP8_BACKEND` asks for cannot serve this layer.
    """
    k, n = weight.shape
    quantized = input.dtype == FP8
    if quantized and input_scale is None:
        raise InputError(
            "quantized activations without their scales",
            want="input_scale",
            got="input_scale=None",
            hint="pass the scales that the quantizer returned",
        )
    rows = input.reshape(input.numel() // k, k) if k else input.reshape(-1, k)
    dtype = (pre_quant_output_dtype or torch.bfloat16) if quantized else input.dtype
    by_token = not compressed_tensor_quant or use_per_token_if_dynamic
    activation = "token" if by_token else "tensor"
    if input_scale is not None:
        activation = _kind(input_scale, rows.shape[0], "token") if quantized else "tensor"
    per_channel = _kind(weight_scale, n, "channel")
    scheme = Scheme(per_channel, activation, input_scale is None or activation == "token")
    device = device_of(input.device)
    eligible = _cutlass(device) if cutlass_fp8_supported is None else cutlass_fp8_supported
    tuned = eligible and weight_scale.numel() == n and n % 16 == 0 and k % 16 == 0
    request = Request(tune=None if tuned else False, memory="per_call", emulate=quantized)
    plan = _plan(env.snapshot(), scheme, n, k, device, dtype, bias is not None, request)
    prepared = _weight(weight, weight_scale, scheme)
    if not quantized:
        return dispatch.linear(input, prepared, plan, bias=bias, input_scale=input_scale)
    assert input_scale is not None
    scale = _one(input_scale) if activation == "tensor" else input_scale.float().reshape(-1, 1)
    y = plan.run(QTensor(rows, scale), prepared, bias)
    return y.reshape(*input.shape[:-1], n)


@lru_cache(maxsize=4096)
def _plan(
    snapshot: env.Snapshot,
    scheme: Scheme,
    n: int,
    k: int,
    device: Device,
    dtype: torch.dtype,
    bias: bool,
    request: Request,
) -> Plan:
    """Plans by everything they depend on; the snapshot only tells environments apart."""
    return plan_for(scheme, n, k, device, dtype, bias, request, ms=(1,))


def _kernel(problem: Problem, device: Device) -> tuple[Backend, Config]:
    kernel = gemm.backend("triton_row")
    if kernel.missing() or kernel.why_not(problem, device):
        kernel = gemm.backend("dequant")
    return kernel, kernel.default_config(problem, device)


def _cutlass(device: Device) -> bool:
    return device.capability is not None and device.capability >= FP8_SINCE


def _weight(weight: torch.Tensor, scale: torch.Tensor, scheme: Scheme) -> CanonicalWeight:
    """[K, N] as the engine keeps it → codes [N, K] and scales as the backends take them."""
    by_row = scale.float().reshape(-1, 1) if scheme.weight == "channel" else _one(scale)
    return canonical_weight(QTensor(weight.t(), by_row), scheme)


def _kind(scale: torch.Tensor, count: int, many: str) -> str:
    """ "tensor" for a single scale, `many` for one a row. Raises InputError for anything else."""
    if scale.numel() == 1:
        return "tensor"
    if scale.numel() != count:
        raise InputError(
            "the scales do not fit their operand",
            got=f"shape {tuple(scale.shape)}",
            want=f"one element, or {count}",
        )
    return many


def _one(scale: torch.Tensor) -> torch.Tensor:
    return scale.float().reshape(())


def _name(dtype: torch.dtype) -> str:
    if dtype not in DTYPE_NAMES:
        raise InputError("not a dtype of results", got=str(dtype), want=", ".join(DTYPES))
    return DTYPE_NAMES[dtype]
