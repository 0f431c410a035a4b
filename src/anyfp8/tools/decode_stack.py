"""tokens → logits: a Llama-like decoder with random weights, whose linears are handed in.

RMSNorm, rotary embedding, attention (torch's, over a static KV cache), SiLU·mul and residuals are
plain torch in bf16 and the same for every contender, so that two stacks differ in their linears
only. Embedding and lm_head stay in 16 bits, as checkpoints leave them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from anyfp8 import quantize
from anyfp8.linear import Fp8Linear
from anyfp8.problem import QTensor, Scheme
from anyfp8.select import Request
from anyfp8.tools.decode_shapes import Decoder

# (layer, kind, x [tokens, K] bf16) -> [tokens, N] bf16
Apply = Callable[[int, str, torch.Tensor], torch.Tensor]

# activations of a random stack stay below 16
INPUT_SCALE = 16 / 448
BF16 = torch.bfloat16


@dataclass(frozen=True, eq=False)
class Weight:
    """One linear of the stack: fp8 codes with scales, and a bias or None."""

    q: QTensor
    bias: torch.Tensor | None


class Weights:
    """Random weights of the first `layers` layers, and the FP8 or 16-bit linears made of them."""

    def __init__(
        self, shape: Decoder, layers: int, scheme: Scheme, place: torch.device, seed: int
    ) -> None:
        self.shape, self.layers, self.scheme, self.place = shape, layers, scheme, place
        self._random = torch.Generator(device=place).manual_seed(seed)
        self.embedding = self.normal(shape.vocabulary, shape.hidden)
        self.head = self.normal(shape.vocabulary, shape.hidden) * shape.hidden**-0.5
        self.quantized = [self._layer() for _ in range(layers)]

    def normal(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self._random, device=self.place, dtype=BF16)

    def integers(self, count: int) -> torch.Tensor:
        size, most = (count,), self.shape.vocabulary
        return torch.randint(most, size, generator=self._random, device=self.place)

    def _layer(self) -> dict[str, Weight]:
        found = {}
        for kind, n, k in ((s.name, s.n, s.k) for s in self.shape.linears):
            # rows of different sizes, so that a scale in the wrong place shows
            size = torch.exp(0.3 * self.normal(n, 1))
            q = quantize.weight(self.normal(n, k) * (size * k**-0.5), self.scheme)
            biased = kind == "qkv" and self.shape.qkv_bias
            found[kind] = Weight(q, self.normal(n) if biased else None)
        return found

    def fp8_linears(self, request: Request) -> torch.nn.ModuleList:
        """Prepared layers that share the codes where the plan stores them as they are."""
        static = self.scheme.activation == "tensor"
        scale = torch.tensor(INPUT_SCALE, device=self.place) if static else None
        layers = torch.nn.ModuleList()
        for quantized in self.quantized:
            linears = torch.nn.ModuleDict()
            for kind, weight in quantized.items():
                n, k = weight.q.codes.shape
                linear = Fp8Linear(
                    k, n, self.scheme, bias=weight.bias is not None, device="meta", request=request
                )
                linear.load(weight.q, input_scale=scale, bias=weight.bias)
                linear.prepare()
                linears[kind] = linear
            layers.append(linears)
        return layers

    def dense_linears(self) -> torch.nn.ModuleList:
        """bf16 layers of the same sizes, with weights of their own."""
        layers = torch.nn.ModuleList()
        for quantized in self.quantized:
            linears = torch.nn.ModuleDict()
            for kind, weight in quantized.items():
                n, k = weight.q.codes.shape
                linear = torch.nn.Linear(k, n, weight.bias is not None, "meta", BF16)
                w = self.normal(n, k) * k**-0.5
                linear.weight = torch.nn.Parameter(w, requires_grad=False)
                if weight.bias is not None:
                    linear.bias = torch.nn.Parameter(weight.bias, requires_grad=False)
                linears[kind] = linear
            layers.append(linears)
        return layers


def by_kind(linears: torch.nn.ModuleList) -> list[dict[str, torch.nn.Module]]:
    """{kind: linear} of each layer, from what `fp8_linears` and `dense_linears` return."""
    return [dict(layer.items()) for layer in linears if isinstance(layer, torch.nn.ModuleDict)]


def applied(linears: torch.nn.ModuleList) -> Apply:
    """The linears as a stack calls them."""
    table = by_kind(linears)
    return lambda layer, kind, x: table[layer][kind](x)


class Stack:
    """The decoder around the linears, for one batch.

    Args:
        context: tokens that a decode step attends to, itself included.
        prefill: tokens of each prompt.
    """

    def __init__(self, weights: Weights, batch: int, context: int, prefill: int) -> None:
        self.weights, self.shape, self.batch = weights, weights.shape, batch
        self.context, self.prefill_length = context, prefill
        shape, place = weights.shape, weights.place
        self.tokens = weights.integers(batch)
        self.prompt = weights.integers(batch * prefill)
        size = (batch, shape.kv_heads, max(context, prefill), shape.head_size)
        self.keys = [weights.normal(*size) for _ in range(weights.layers)]
        self.values = [weights.normal(*size) for _ in range(weights.layers)]
        ones = torch.ones(shape.hidden, dtype=BF16, device=place)
        self._norm, self._head_norm = ones, ones[: shape.head_size]
        half = torch.arange(0, shape.head_size, 2, device=place).float() / shape.head_size
        angles = torch.arange(size[2], device=place).float()[:, None] * shape.rope_theta**-half
        turned = torch.cat([angles, angles], -1)
        # [T, 1, head_size]
        self._cos, self._sin = (f(turned).to(BF16)[:, None] for f in (torch.cos, torch.sin))

    def decode(self, linear: Apply) -> torch.Tensor:
        """One step: logits [batch, vocabulary] for the token after `context`."""
        last = slice(self.context - 1, self.context)
        seen = slice(0, self.context)
        x = self._through(self.tokens, 1, last, seen, linear)
        return self._logits(x)

    def prefill(self, linear: Apply) -> torch.Tensor:
        """The prompts: logits [batch, vocabulary] after their last tokens."""
        length = self.prefill_length
        span = slice(0, length)
        x = self._through(self.prompt, length, span, span, linear)
        return self._logits(x.view(self.batch, length, -1)[:, -1])

    def ends(self, tokens: torch.Tensor) -> torch.Tensor:
        """What is no layer: embedding, last norm and lm_head on the last of each row's tokens."""
        x = functional.embedding(tokens, self.weights.embedding)
        return self._logits(x.view(self.batch, -1, self.shape.hidden)[:, -1])

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(self._normed(x), self.weights.head)

    def _through(
        self, tokens: torch.Tensor, length: int, written: slice, seen: slice, linear: Apply
    ) -> torch.Tensor:
        x = functional.embedding(tokens, self.weights.embedding)
        for i in range(self.weights.layers):
            qkv = linear(i, "qkv", self._normed(x))
            x = x + linear(i, "o", self._attend(i, qkv, length, written, seen))
            gate, up = linear(i, "gate_up", self._normed(x)).chunk(2, -1)
            x = x + linear(i, "down", functional.silu(gate) * up)
        return x

    def _attend(
        self, i: int, qkv: torch.Tensor, length: int, written: slice, seen: slice
    ) -> torch.Tensor:
        s = self.shape
        parts = qkv.view(self.batch, length, s.heads + 2 * s.kv_heads, s.head_size)
        turning, v = parts.split([s.heads + s.kv_heads, s.kv_heads], 2)
        if s.qk_norm:
            turning = functional.rms_norm(turning, (s.head_size,), self._head_norm, s.eps)
        first, second = turning.chunk(2, -1)
        swapped = torch.cat([-second, first], -1)
        turning = turning * self._cos[written] + swapped * self._sin[written]
        q, k = turning.split([s.heads, s.kv_heads], 2)
        self.keys[i][:, :, written] = k.transpose(1, 2)
        self.values[i][:, :, written] = v.transpose(1, 2)
        y = functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            self.keys[i][:, :, seen],
            self.values[i][:, :, seen],
            is_causal=length > 1,
            enable_gqa=True,
        )
        return y.transpose(1, 2).reshape(self.batch * length, s.heads * s.head_size)

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (self.shape.hidden,), self._norm, self.shape.eps)
