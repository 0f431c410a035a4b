"""perplexity = exp(mean -log p), KL(p16 ‖ p8), and each layer's error: is the FP8 model good?

A task score that drops does not say where the fault is. So besides whole-model figures every
quantized linear is compared with its 16-bit original *on the original's own input*: faults don't
spread to the layers behind. The bound is not a constant: a layer is suspect when it errs clearly
more than a fresh quantization of the same weight in the same scheme would.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from anyfp8 import reference
from anyfp8.errors import InputError
from anyfp8.linear import Fp8Linear
from anyfp8.problem import QTensor

# a layer is suspect past SLACK x what fresh rounding costs, plus FLOOR: two shards' scales swapped
# at a ratio of 1.05 err 0.05, twice what rounding does (0.027 weight-only, 0.038 with activations)
SLACK = 1.5
FLOOR = 0.01


@dataclass(frozen=True)
class Agreement:
    """How an FP8 model reads a text, beside its 16-bit original where there is one.

    Attributes:
        tokens: predicted tokens.
        perplexity: of the FP8 model.
        source_perplexity: of the 16-bit model, or None.
        kl: mean KL divergence from the 16-bit next-token distribution, nats a token, or None.
        top1: share of tokens whose most likely successor is the same, or None.
    """

    tokens: int
    perplexity: float
    source_perplexity: float | None = None
    kl: float | None = None
    top1: float | None = None


@dataclass(frozen=True)
class LayerError:
    """One layer's relative error ‖y8 - y16‖ / ‖y16‖ on its original input.

    Attributes:
        name: module name. error: of the loaded layer.
        expected: of a fresh quantization of the 16-bit weight in the same scheme.
        suspect: whether `error` is past the bound.
    """

    name: str
    error: float
    expected: float
    suspect: bool


def agreement(
    model: Any,
    windows: Sequence[torch.Tensor],
    source: Any | None = None,
    progress: Callable[[int], None] | None = None,
) -> Agreement:
    """Read windows of tokens [1, T] with a model, and with its 16-bit source if given.

    Every window is a context of its own: T - 1 predictions each.
    """
    nll = source_nll = kl = 0.0
    same = tokens = 0
    with torch.inference_mode():
        for done, ids in enumerate(windows, 1):
            log_p = _log_probabilities(model, ids)
            target = ids[0, 1:].to(log_p.device)
            tokens += target.numel()
            nll -= float(log_p.gather(1, target[:, None]).double().sum())
            if source is not None:
                log_q = _log_probabilities(source, ids).to(log_p.device)
                source_nll -= float(log_q.gather(1, target[:, None]).double().sum())
                kl += float((log_q.exp() * (log_q - log_p)).sum(1).double().sum())
                same += int((log_q.argmax(1) == log_p.argmax(1)).sum())
            if progress:
                progress(done)
    if tokens == 0:
        raise InputError("no windows to evaluate", got="0 tokens", want="at least one window")
    value = _exp(nll / tokens)
    if source is None:
        return Agreement(tokens, value)
    return Agreement(tokens, value, _exp(source_nll / tokens), kl / tokens, same / tokens)


def _exp(mean: float) -> float:
    return math.exp(mean) if mean < 700 else math.inf


def _log_probabilities(model: Any, ids: torch.Tensor) -> torch.Tensor:
    device = next(model.parameters()).device
    logits = model(ids.to(device)).logits[0, :-1]
    return torch.log_softmax(logits.float(), dim=-1)


def layer_errors(
    model: torch.nn.Module,
    source: torch.nn.Module,
    windows: Sequence[torch.Tensor],
    bound: float | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[LayerError]:
    """Compare every FP8 linear with its 16-bit original on the original's input.

    Args:
        model, source: the FP8 model and its 16-bit original; same module names.
        windows: token windows [1, T]; one or two are enough.
        bound: suspect above this error; None compares with a fresh quantization.

    Returns:
        One entry a layer, in the order in which the model runs them.

    Raises:
        InputError: a quantized layer has no original of the same name and shape.
    """
    layers = {n: m for n, m in model.named_modules() if isinstance(m, Fp8Linear)}
    originals = dict(source.named_modules())
    for name, layer in layers.items():
        weight = getattr(originals.get(name), "weight", None)
        if weight is None or tuple(weight.shape) != (layer.out_features, layer.in_features):
            found = "no such module" if weight is None else f"weight {tuple(weight.shape)}"
            raise InputError(
                f"the 16-bit source does not match at {name}",
                got=found,
                want=f"a linear of {layer.out_features}x{layer.in_features}",
                hint="name the checkpoint that this one was quantized from with --source",
            )
    sums: dict[str, list[float]] = {}
    fresh: dict[str, QTensor] = {}

    def watch(name: str, layer: Fp8Linear):
        def hook(module: Any, args: tuple[torch.Tensor, ...], y: torch.Tensor) -> None:
            if name not in fresh:
                fresh[name] = reference.quantize_weight(module.weight.detach(), layer.scheme)
            want = y.detach().float().flatten(0, -2)
            x = args[0].detach()
            got = layer(x.to(layer.device)).float().flatten(0, -2).to(want.device)
            ideal = _fresh_output(layer, fresh[name], x.flatten(0, -2), module.bias)
            total = sums.setdefault(name, [0.0, 0.0, 0.0])
            total[0] += float((got - want).square().sum())
            total[1] += float((ideal - want).square().sum())
            total[2] += float(want.square().sum())

        return hook

    handles = [originals[n].register_forward_hook(watch(n, m)) for n, m in layers.items()]
    try:
        with torch.inference_mode():
            for done, ids in enumerate(windows, 1):
                source(ids.to(next(source.parameters()).device))
                if progress:
                    progress(done)
    finally:
        for handle in handles:
            handle.remove()
    return [_layer_error(name, total, bound) for name, total in sums.items()]


def _fresh_output(
    layer: Fp8Linear, weight: QTensor, x: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    scheme = layer.scheme if layer.quantizes_activations else layer.scheme.weight_only
    if scheme.activation == "tensor":
        scheme = replace(scheme, dynamic=True)
    q = reference.quantize_activation(x, scheme)
    a = x.float() if q is None else reference.dequantize(q)
    y = a @ reference.dequantize(weight).T
    return y if bias is None else y + bias.float()


def _layer_error(name: str, sums: list[float], bound: float | None) -> LayerError:
    got, ideal, norm = sums
    if norm == 0.0:
        error = 0.0 if got == 0.0 else math.inf
        return LayerError(name, error, 0.0, error > 0.0)
    error, expected = math.sqrt(got / norm), math.sqrt(ideal / norm)
    limit = bound if bound is not None else SLACK * expected + FLOOR
    return LayerError(name, error, expected, not error <= limit)
