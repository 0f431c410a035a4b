"""A stack's linears on the inputs that they meet, against exact products."""

from __future__ import annotations

from collections.abc import Callable

import torch

from anyfp8 import reference
from anyfp8.linear import Fp8Linear
from anyfp8.tools.decode_stack import Apply, Weights, applied, by_kind
from anyfp8.tools.gemm_operands import Exact, judge, slack

JUDGED_ROWS = 256


def judged(
    step: Callable[[Apply], torch.Tensor], layers: torch.nn.ModuleList, weights: Weights
) -> tuple[torch.Tensor, float, str]:
    """(logits, the greatest error of a judged linear, what is wrong or "")."""
    inner, linears, judged = applied(layers), by_kind(layers), {0, len(layers) - 1}
    worst, complaints = 0.0, []

    def listening(layer: int, kind: str, x: torch.Tensor) -> torch.Tensor:
        nonlocal worst
        y = inner(layer, kind, x)
        if layer in judged:
            linear = linears[layer][kind]
            assert isinstance(linear, Fp8Linear)
            error, complaint = _judge_linear(linear, x, y, weights, layer, kind)
            worst = max(worst, error)
            if complaint:
                complaints.append(f"{kind} of layer {layer}: {complaint}")
        return y

    logits = step(listening)
    if not bool(logits.isfinite().all()):
        complaints.append("logits are not finite")
    return logits, worst, complaints[0] if complaints else ""


def _judge_linear(
    linear: Fp8Linear, x: torch.Tensor, y: torch.Tensor, weights: Weights, layer: int, kind: str
) -> tuple[float, str]:
    m, k = x.shape
    choice = linear.plan().choice(m)
    few = min(m, JUDGED_ROWS)
    # the first and the last row, and evenly between
    rows = torch.linspace(0, m - 1, few, device=x.device).round().long()
    x, y = x[rows], y[rows]
    q = reference.quantize_activation(x, weights.scheme, linear.input_scale)
    weight = weights.quantized[layer][kind]
    a = x if q is None or not choice.quantizes else reference.dequantize(q)
    exact = a.double() @ reference.dequantize(weight.q).double().T
    exact = (exact if weight.bias is None else exact + weight.bias.double()).float()
    rounding = float((exact.bfloat16().float() - exact).norm() / exact.norm())
    mode = choice.accumulate if choice.quantizes else "fp32"
    return judge(y, Exact(exact, rounding), few, slack(mode, k, own_quantizer=False))
