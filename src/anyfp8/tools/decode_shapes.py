"""A decoder's sizes by name or config.json: the stack that `anyfp8 bench decode` builds.

Sizes are one rank's where tensor parallelism splits the model: heads, the inner side and the
vocabulary are divided, the hidden side is not. What ranks say to each other is not in the stack.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from anyfp8.errors import CheckpointError, InputError
from anyfp8.tools.gemm_shapes import Shape
from anyfp8.tools.shapes import DECODERS

KINDS = ("qkv", "o", "gate_up", "down")


@dataclass(frozen=True)
class Decoder:
    """One rank's part of a Llama-like decoder.

    Attributes:
        layers: of the whole model.
        qk_norm: whether q and k are normalized head by head. qkv_bias: whether qkv has a bias.
    """

    name: str
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_size: int
    layers: int
    vocabulary: int
    rope_theta: float = 1e6
    eps: float = 1e-6
    qk_norm: bool = False
    qkv_bias: bool = False
    tp: int = 1

    @property
    def linears(self) -> tuple[Shape, ...]:
        """The linears of one layer, merged as engines run them, in the order of `KINDS`."""
        q, kv = self.heads * self.head_size, self.kv_heads * self.head_size
        sides = ((q + 2 * kv, self.hidden), (self.hidden, q))
        sides += ((2 * self.inner, self.hidden), (self.hidden, self.inner))
        return tuple(Shape(kind, *side) for kind, side in zip(KINDS, sides, strict=True))

    @property
    def weights_a_layer(self) -> int:
        return sum(shape.n * shape.k for shape in self.linears)

    def kv_bytes(self, batch: int, tokens: int, layers: int) -> int:
        """Bytes of a 16-bit KV cache."""
        return 4 * layers * batch * tokens * self.kv_heads * self.head_size

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


MODELS = {
    "qwen3-8b": Decoder("qwen3-8b", 4096, 12288, 32, 8, 128, 36, 151936, qk_norm=True),
    "llama-3-70b": Decoder(
        "llama-3-70b", 8192, 28672, 64, 8, 128, 80, 128256, rope_theta=5e5, eps=1e-5
    ),
}


def decoder(text: str, tp: int = 1) -> Decoder:
    """The decoder of a name of `MODELS`, a config.json or a folder with one.

    Raises:
        InputError: no such model, or tensor parallelism does not divide it.
        CheckpointError: a config that cannot be read or is of another architecture.
    """
    if text in MODELS:
        return _split(MODELS[text], tp)
    path = Path(text).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise InputError(
            "no such decoder", got=repr(text), want=f"{', '.join(MODELS)}, or a config.json"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}", got=str(error), want="JSON") from error
    return _split(_of_config(config, path.resolve().parent.name), tp)


def _of_config(config: dict[str, Any], name: str) -> Decoder:
    kind = config.get("model_type")
    if kind not in DECODERS:
        raise CheckpointError(
            "this config is of no decoder that can be built from its sizes alone",
            got=f"model_type {kind!r}",
            want=", ".join(DECODERS),
            hint="bench linear --shapes N,K races any layer",
        )
    try:
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        found = Decoder(
            name,
            hidden,
            config["intermediate_size"],
            heads,
            config.get("num_key_value_heads") or heads,
            config.get("head_dim") or (128 if kind == "qwen3" else hidden // heads),
            config["num_hidden_layers"],
            config["vocab_size"],
        )
    except KeyError as error:
        raise CheckpointError(
            "config.json does not say the size of the model", got=f"no {error.args[0]}"
        ) from error
    bias = kind == "qwen2" or (kind != "mistral" and bool(config.get("attention_bias")))
    rope = config.get("rope_parameters") or {}
    return replace(
        found,
        rope_theta=float(config.get("rope_theta") or rope.get("rope_theta") or 1e4),
        eps=float(config.get("rms_norm_eps") or 1e-6),
        qk_norm=kind == "qwen3",
        qkv_bias=bias,
    )


def _split(whole: Decoder, tp: int) -> Decoder:
    if tp == 1:
        return whole
    sides = {"heads": whole.heads, "inner": whole.inner, "vocabulary": whole.vocabulary}
    uneven = [f"{name} = {side}" for name, side in sides.items() if tp < 1 or side % tp]
    if uneven:
        raise InputError(
            f"{whole.name} cannot be split for tensor parallelism",
            got=f"{', '.join(uneven)} in {tp} parts",
            want="a number of parts that divides them",
        )
    return replace(
        whole,
        heads=whole.heads // tp,
        # ranks beyond the number of KV heads hold copies
        kv_heads=max(1, whole.kv_heads // tp),
        inner=whole.inner // tp,
        vocabulary=whole.vocabulary // tp,
        tp=tp,
    )
