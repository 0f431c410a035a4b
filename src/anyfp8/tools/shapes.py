"""MODEL or N,K → its linear layers: name, scheme, N, K; from headers or config alone, no weights.

A folder with weights is read by its headers. One with only a config.json gets its shapes from the
config: the decoders that most models are have a rule here (milliseconds), any other is built by
transformers on the meta device (seconds).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from anyfp8.checkpoint import is_quantized, open_source, read_plan
from anyfp8.checkpoint.declaration import ConfigFiles, Declaration
from anyfp8.checkpoint.kv_cache import KvScale, kv_scales
from anyfp8.checkpoint.linears import is_linear
from anyfp8.checkpoint.planner import declare
from anyfp8.checkpoint.rules import FUSED, PARTS, Rule
from anyfp8.errors import CheckpointError, InputError
from anyfp8.problem import Scheme

# what a 16-bit model or a bare shape is asked about where nobody says a scheme
DEFAULT_SCHEME = Scheme("channel", "token", True)

# decoders whose linears follow from these fields of the config: see `decoder_linears`
DECODERS = ("llama", "mistral", "qwen2", "qwen3")

# split along K by tensor parallelism; every other linear is split along N
_ROW_PARALLEL = ("o_proj", "down_proj", "out_proj", "dense_4h_to_h", "fc2", "wo", "w2")


@dataclass(frozen=True)
class Layer:
    """One linear: `name` of its module, `n` and `k` of its weight."""

    name: str
    scheme: Scheme
    n: int
    k: int
    bias: bool = False

    @property
    def kind(self) -> str:
        """The name without its place in the model: self_attn.q_proj."""
        return ".".join(p for p in self.name.split(".")[-2:] if not p.isdigit())


@dataclass(frozen=True)
class Model:
    """What `explain` asks about.

    Attributes:
        title: of the report. layers: FP8 linears, in order. dtype: of activations.
        notes: what was assumed, a sentence each.
        kv_cache: the format's word for the KV cache, "" for 16 bits; kv: its scales.
        left: linears that stay in 16 bits.
    """

    title: str
    layers: tuple[Layer, ...]
    dtype: torch.dtype = torch.bfloat16
    notes: tuple[str, ...] = ()
    kv_cache: str = ""
    kv: tuple[KvScale, ...] = ()
    left: tuple[str, ...] = ()


def read_model(
    text: str, scheme: Scheme | None = None, exclude: Iterable[str] = ("lm_head",)
) -> Model:
    """The linears of a shape, a checkpoint, or a config.

    Args:
        text: "N,K"; an FP8 or 16-bit checkpoint folder or GGUF file; a folder with only a
            config.json, or the path of a config.json; a name of `decode_shapes.MODELS`.
        scheme: for a shape or a model that is not quantized; `DEFAULT_SCHEME` by default.
        exclude: linears of an unquantized model that stay in 16 bits.

    Raises:
        InputError: a scheme for an FP8 checkpoint, or no layer left.
        CheckpointError: nothing readable there.
    """
    shape = re.fullmatch(r"\s*(\d+)\s*[,xX]\s*(\d+)\s*", text)
    if shape:
        n, k = int(shape[1]), int(shape[2])
        if not n or not k:
            raise InputError("not a shape", got=text, want="N,K of at least 1,1")
        chosen, notes = _chosen(scheme, "a bare shape")
        return Model(f"{n}x{k}", (Layer("linear", chosen, n, k),), notes=notes)
    path = Path(text).expanduser()
    if path.is_file() and path.suffix == ".json":
        return _from_config(path.parent, path.parent.name, scheme, list(exclude))
    if not path.exists():
        return _named(text, scheme, list(exclude))
    if path.is_dir() and not any(path.glob("*.safetensors")) and not any(path.glob("*.gguf")):
        return _from_config(path, path.name, scheme, list(exclude))
    if is_quantized(path):
        return _from_checkpoint(path, scheme)
    source = open_source(path)
    chosen, notes = _chosen(scheme, "a 16-bit checkpoint")
    found = {
        name[: -len(".weight")]: (spec.shape[0], spec.shape[1])
        for name, spec in source.specs.items()
        if is_linear(name, spec.shape)
    }
    biased = {name[: -len(".bias")] for name in source.specs if name.endswith(".bias")}
    layers = tuple(Layer(name, chosen, *nk, name in biased) for name, nk in found.items())
    return _without(Model(path.name, layers, _dtype(source.config), notes), list(exclude))


def _from_checkpoint(path: Path, scheme: Scheme | None) -> Model:
    _refuse_scheme(path, scheme)
    plan = read_plan(path, strict=False)
    layers = tuple(
        Layer(name, layer.scheme, layer.n, layer.k, layer.bias is not None)
        for name, layer in plan.layers.items()
    )
    dtype = _dtype(plan.config)
    return Model(path.name, layers, dtype, plan.warnings, plan.kv_cache, kv_scales(plan))


def _from_config(folder: Path, title: str, scheme: Scheme | None, exclude: list[str]) -> Model:
    """A model of which only config.json (and perhaps hf_quant_config.json) is here."""
    if not (folder / "config.json").is_file():
        raise _no_model(folder)
    configs = ConfigFiles.read(folder)
    shapes = _shapes(configs.config)
    dtype = _dtype(configs.config)
    if configs.quantization or configs.modelopt:
        _refuse_scheme(folder, scheme)
        declared = declare(configs)
        layers = tuple(_declared(declared, shapes))
        notes = ("no weights here: schemes as the config declares them",)
        return Model(title, layers, dtype, notes, declared.kv_cache)
    chosen, notes = _chosen(scheme, "a 16-bit config")
    layers = tuple(replace(layer, scheme=chosen) for layer in shapes)
    return _without(Model(title, layers, dtype, notes), exclude)


def _named(text: str, scheme: Scheme | None, exclude: list[str]) -> Model:
    """A model whose sizes the benchmarks know."""
    from anyfp8.tools.decode_shapes import MODELS

    if text not in MODELS:
        raise _no_model(Path(text))
    known = MODELS[text]
    config = {
        "model_type": "llama",
        "hidden_size": known.hidden,
        "intermediate_size": known.inner,
        "num_attention_heads": known.heads,
        "num_key_value_heads": known.kv_heads,
        "head_dim": known.head_size,
        "num_hidden_layers": known.layers,
        "vocab_size": known.vocabulary,
    }
    chosen, notes = _chosen(scheme, "a name")
    layers = tuple(replace(layer, scheme=chosen) for layer in decoder_linears(config))
    return _without(Model(text, layers, notes=notes), exclude)


def _no_model(path: Path) -> CheckpointError:
    return CheckpointError(
        f"no model at {path}",
        got="neither weights nor a config.json" if path.is_dir() else "nothing there",
        want="a checkpoint folder, a config.json, a GGUF file, a name such as qwen3-8b, or N,K",
        hint="hf download NAME config.json --local-dir FOLDER is enough for this command",
    )


def _declared(declared: Declaration, shapes: Iterable[Layer]) -> Iterator[Layer]:
    for layer in shapes:
        if next(iter(declared.rules.matching(layer.name)), None) is not None:
            continue
        algorithm = declared.algorithm_of(layer.name)
        if algorithm is None:
            continue
        if algorithm.scheme is None:
            raise CheckpointError(
                f"cannot run the quantization of {layer.name}",
                got=f"{algorithm.name}: {algorithm.refusal}",
                want="FP8 layers only",
                hint="explain its 16-bit original with --scheme",
            )
        yield replace(layer, scheme=algorithm.scheme)


def _shapes(config: Mapping[str, Any]) -> list[Layer]:
    if config.get("model_type") in DECODERS:
        return decoder_linears(config)
    from anyfp8.integrations.transformers import skeleton
    from anyfp8.linear.convert import linears

    return [
        Layer(name, DEFAULT_SCHEME, m.out_features, m.in_features, m.bias is not None)
        for name, m in linears(skeleton(config), ())[0].items()
    ]


def decoder_linears(config: Mapping[str, Any]) -> list[Layer]:
    """The linears of a Llama-like decoder, as transformers builds it, from its config alone.

    Raises:
        CheckpointError: a field is missing.
    """
    kind = config.get("model_type")
    try:
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        heads, depth = config["num_attention_heads"], config["num_hidden_layers"]
        kv_heads = config.get("num_key_value_heads") or heads
        vocabulary = config["vocab_size"]
    except KeyError as error:
        raise CheckpointError(
            "config.json does not say the size of the model",
            got=f"no {error.args[0]}",
            want="hidden_size, intermediate_size, num_attention_heads, num_hidden_layers, "
            "vocab_size",
            hint="take the config.json of the model itself",
        ) from error
    size = config.get("head_dim") or (128 if kind == "qwen3" else hidden // heads)
    qkv_bias = kind == "qwen2" or (kind != "mistral" and bool(config.get("attention_bias")))
    o_bias = kind in ("llama", "qwen3") and bool(config.get("attention_bias"))
    mlp_bias = kind == "llama" and bool(config.get("mlp_bias"))
    block = (
        ("self_attn.q_proj", heads * size, hidden, qkv_bias),
        ("self_attn.k_proj", kv_heads * size, hidden, qkv_bias),
        ("self_attn.v_proj", kv_heads * size, hidden, qkv_bias),
        ("self_attn.o_proj", hidden, heads * size, o_bias),
        ("mlp.gate_proj", inner, hidden, mlp_bias),
        ("mlp.up_proj", inner, hidden, mlp_bias),
        ("mlp.down_proj", hidden, inner, mlp_bias),
    )
    found = [
        Layer(f"model.layers.{i}.{name}", DEFAULT_SCHEME, n, k, bias)
        for i in range(depth)
        for name, n, k, bias in block
    ]
    return [*found, Layer("lm_head", DEFAULT_SCHEME, vocabulary, hidden)]


def fused(model: Model) -> Model:
    """q, k, v in one linear and gate, up in one, as the engines run them.

    Per-tensor scales of the parts become one a row, so the fused layer is per-channel.
    """
    by_name = {layer.name: layer for layer in model.layers}
    done: set[str] = set()
    out: list[Layer] = []
    for layer in model.layers:
        if layer.name in done:
            continue
        head, _, leaf = layer.name.rpartition(".")
        whole = FUSED.get(leaf, "")
        parts = [by_name.get(f"{head}.{part}") for part in PARTS.get(whole, ())]
        known = [part for part in parts if part is not None]
        if not whole or len(known) != len(parts) or len({(p.scheme, p.k) for p in known}) > 1:
            out.append(layer)
            continue
        done |= {part.name for part in known}
        scheme = layer.scheme
        scheme = replace(scheme, weight="channel") if scheme.weight == "tensor" else scheme
        n = sum(part.n for part in known)
        out.append(Layer(f"{head}.{whole}", scheme, n, layer.k, any(p.bias for p in known)))
    return replace(model, layers=tuple(out))


def sharded(model: Model, ways: int) -> Model:
    """One rank's part under tensor parallelism: N is split, or K of row-parallel layers.

    Raises:
        InputError: a side does not divide.
    """
    if ways == 1:
        return model
    out = []
    for layer in model.layers:
        along_k = layer.name.rpartition(".")[2] in _ROW_PARALLEL
        side = layer.k if along_k else layer.n
        if ways < 1 or side % ways:
            raise InputError(
                f"{layer.name} cannot be split for tensor parallelism",
                got=f"{'K' if along_k else 'N'} = {side} in {ways} parts",
                want="a number of parts that divides it",
            )
        changed = {"k": side // ways} if along_k else {"n": side // ways}
        out.append(replace(layer, **changed))
    return replace(model, layers=tuple(out))


def _chosen(scheme: Scheme | None, what: str) -> tuple[Scheme, tuple[str, ...]]:
    if scheme is not None:
        return scheme, ()
    return DEFAULT_SCHEME, (f"{what} is taken as {DEFAULT_SCHEME.name}; --scheme says another",)


def _refuse_scheme(path: Path, scheme: Scheme | None) -> None:
    if scheme is not None:
        raise InputError(
            f"{path.name} is quantized already",
            got=f"--scheme {scheme.name}",
            want="no --scheme",
            hint="name its 16-bit original to ask about another scheme",
        )


def _without(model: Model, exclude: list[str]) -> Model:
    rules = [Rule(pattern) for pattern in exclude]
    left = tuple(x.name for x in model.layers if any(r.matches(x.name) for r in rules))
    layers = tuple(layer for layer in model.layers if layer.name not in left)
    if not layers:
        raise InputError(
            f"no linear layer of {model.title} is left to quantize",
            got=f"--exclude {' --exclude '.join(exclude)}",
            want="at least one layer",
        )
    return replace(model, layers=layers, left=left)


def _dtype(config: Mapping[str, Any]) -> torch.dtype:
    name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    found = getattr(torch, name.removeprefix("torch."), None)
    return found if found in (torch.float16, torch.float32) else torch.bfloat16
