"""y = linear(q(x / s) · s, W in 16 bits): FP8 layers in the arithmetic of an official runtime.

compressed-tensors (in transformers), Quark and ModelOpt run FP8 models as fake quantization. `eval
--emulate compressed-tensors` computes what they do, so that a perplexity that differs from theirs
can be told from a checkpoint that was read wrong: on equal inputs these outputs are theirs.

The surprise: the first two divide x by its scale in x's own 16 bits and then round to FP8, twice in
all; ModelOpt rounds once, and then what it has dequantized, to 16 bits. Up to a tenth of the codes
come out one step away, and a static model's perplexity moves by half a percent, up or down.
"""

from __future__ import annotations

import torch

from anyfp8 import reference
from anyfp8.errors import InputError
from anyfp8.fp8 import E4M3FN
from anyfp8.linear import Fp8Linear
from anyfp8.problem import QTensor, Scheme
from anyfp8.tools import console

# whether x is divided by its scale in 16 bits
_DIVIDES = {"compressed-tensors": True, "quark": True, "modelopt": False}
RUNTIMES = tuple(_DIVIDES)


def emulate_runtime(model: torch.nn.Module, name: str) -> str:
    """Make a model's FP8 layers compute in a runtime's arithmetic, until it is dropped.

    Args:
        model: of `load`; each layer keeps a copy of its weight in 16 bits.
        name: one of `RUNTIMES`.

    Returns:
        A line that says so.

    Raises:
        InputError: another name.
    """
    if name not in RUNTIMES:
        raise InputError("not a runtime to emulate", got=name, want=", ".join(RUNTIMES))
    layers = [module for module in model.modules() if isinstance(module, Fp8Linear)]
    for layer in layers:
        layer.forward = _Emulated(layer, name)
    how = (
        "x / scale in 16 bits, then FP8" if _DIVIDES[name] else "FP8, and what it means in 16 bits"
    )
    return f"{console.counted(len(layers), 'layer')} as {name} computes them: {how}"


class _Emulated:
    """The forward of a layer."""

    def __init__(self, layer: Fp8Linear, name: str) -> None:
        self.name = name
        q = QTensor(layer.weight, layer.weight_scale, layer.scheme.block)
        self.weight = reference.dequantize(q, layer.dtype)
        self.scheme, self.bias, self.input_scale = layer.scheme, layer.bias, layer.input_scale

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        seen = fake_quantized(x, self.scheme, self.name, self.input_scale)
        return torch.nn.functional.linear(seen, self.weight, self.bias)


def fake_quantized(
    x: torch.Tensor, scheme: Scheme, name: str, input_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """x as a runtime sees it: quantized and dequantized.

    Args:
        x: [..., K] bf16 or fp16. name: one of `RUNTIMES`. input_scale: fp32 [] of a static scheme.

    Returns:
        [..., K] of x's dtype.
    """
    if scheme.activation == "none":
        return x
    k = x.shape[-1]
    group = scheme.group or k
    # a last group that is not whole: the runtimes fail there, zeros change no maximum
    parts = torch.nn.functional.pad(x, (0, -k % group)).unflatten(-1, (-1, group))
    if input_scale is not None:
        amax = input_scale.float() * E4M3FN.max
    elif scheme.activation == "tensor":
        amax = x.abs().amax()
    else:
        amax = parts.abs().amax(-1, keepdim=True)
    # of nothing but zeros; any scale gives them back
    amax = torch.where(amax == 0, torch.ones_like(amax), amax)
    if _DIVIDES[name]:
        scale = (amax / E4M3FN.max if input_scale is None else input_scale).to(x.dtype)
        seen = _rounded(parts / scale).to(x.dtype) * scale
    else:
        factor = E4M3FN.max / amax.float()
        seen = (_rounded(parts.float() * factor).float() * (1 / factor)).to(x.dtype)
    return seen.flatten(-2)[..., :k]


def _rounded(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-E4M3FN.max, E4M3FN.max).to(torch.float8_e4m3fn)
