"""y = x · Wᵀ by plan: quantize x only if the chosen backend wants it, then run that backend."""

from __future__ import annotations

import torch

from anyfp8 import quantize
from anyfp8.errors import InputError
from anyfp8.gemm.base import PreparedWeight
from anyfp8.problem import DTYPE_NAMES, QTensor, Scheme
from anyfp8.select import Plan


def linear(
    x: torch.Tensor,
    prepared: PreparedWeight,
    plan: Plan,
    *,
    bias: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """One linear layer on prepared weights.

    Args:
        x: [..., K] of the plan's x_dtype, any leading shape, M = 0 included.
        prepared: what `plan.prepare` returned for the weight [N, K].
        bias: [N] or None.
        input_scale: fp32 with one element; used where the scheme is static and the chosen backend
            multiplies quantized activations.

    Returns:
        [..., N] of the plan's out_dtype, contiguous.

    Raises:
        InputError: x has the wrong last dimension, dtype or device; names both sides.
    """
    n, k = plan.problem.n, plan.problem.k
    _check(x, prepared, plan)
    rows = x.reshape(x.numel() // k, k)
    if rows.shape[0] == 0:
        return x.new_empty((*x.shape[:-1], n))
    scheme = plan.problem.scheme
    if plan.choice(rows.shape[0]).quantizes:
        y = plan.run(quantize_activation(rows, scheme, input_scale), prepared, bias)
    else:
        y = plan.run(rows, prepared, bias)
    return y.reshape(*x.shape[:-1], n)


def quantize_activation(
    x: torch.Tensor, scheme: Scheme, input_scale: torch.Tensor | None = None
) -> QTensor:
    """Quantize x [M, K] as a scheme says, on x's device.

    Args:
        input_scale: fp32 with one element, required by static schemes.

    Raises:
        InputError: a weight-only scheme, or a static one without its input_scale.
    """
    if scheme.activation == "token":
        return quantize.per_token(x)
    if scheme.activation == "group":
        assert scheme.group is not None
        return quantize.per_group(x, scheme.group, ue8m0=scheme.scale_format == "ue8m0")
    if scheme.activation == "tensor" and (scheme.dynamic or input_scale is not None):
        return quantize.per_tensor(x, None if scheme.dynamic else input_scale)
    raise InputError(
        f"activations of {scheme.name} cannot be quantized",
        got="no input_scale" if scheme.activation == "tensor" else "a weight-only scheme",
        want="a dynamic scheme, or a static one with its input_scale",
        hint="load the layer with its input_scale, or choose a dynamic scheme",
    )


def _check(x: torch.Tensor, prepared: PreparedWeight, plan: Plan) -> None:
    problem = plan.problem
    if x.ndim == 0 or x.shape[-1] != problem.k:
        raise InputError(
            "the activations do not fit this layer",
            got=f"shape {tuple(x.shape)}",
            want=f"[..., {problem.k}] for a weight of {problem.n}x{problem.k}",
        )
    if DTYPE_NAMES.get(x.dtype) != problem.x_dtype:
        raise InputError(
            "the activations have another dtype than the plan",
            got=str(x.dtype),
            want=problem.x_dtype,
        )
    device = next(iter(prepared.tensors().values())).device
    if x.device != device:
        raise InputError(
            "the activations lie on another device than the weight",
            got=f"x on {x.device}, weight on {device}",
            want="both on one device",
            hint=f"x.to({str(device)!r}), or move the model",
        )
