"""AMD Quark's layout: W = weight · weight_scale, per tensor or per channel.

Written by Quark's `export_safetensors` (0.13 here) and served by vLLM and SGLang. A global config
is overruled by `layer_quant_config` (globs of names) and `layer_type_quant_config` (classes).

The surprises: scales are 16-bit scalars [] or [N]; "per_channel" along axis 1 of an activation is
what others call per-token; and KV-cache scales are the output_scale of k_proj and v_proj.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anyfp8.checkpoint.declaration import Algorithm, ConfigFiles, Declaration
from anyfp8.checkpoint.rules import Rule
from anyfp8.checkpoint.words import names, objects, version_of
from anyfp8.errors import CheckpointError
from anyfp8.problem import Scheme

NAME = "quark"
READABLE = "fp8_e4m3 weights per tensor or per channel, inputs absent, static or dynamic"
_FP8 = ("fp8_e4m3", "fp8_e4m3fn")


def claims(files: ConfigFiles) -> bool:
    """Whether a checkpoint is in this format."""
    return str(files.quantization.get("quant_method", "")).lower() == NAME


def declare(files: ConfigFiles) -> Declaration:
    """The declaration of a Quark config.

    Raises:
        CheckpointError: fields of the wrong type.
    """
    config = files.quantization
    default = _algorithm("global_quant_config", config.get("global_quant_config"))
    by_class = objects(config, "layer_type_quant_config").get("Linear")
    if by_class is not None:
        default = _algorithm("layer_type_quant_config", by_class)
    groups = [
        (Rule(pattern), algorithm)
        for pattern, layer in objects(config, "layer_quant_config").items()
        if (algorithm := _algorithm(pattern, layer)) is not None
    ]
    export = config.get("export")
    cache = objects(config, "kv_cache_quant_config")
    return Declaration(
        NAME,
        producer=version_of(NAME, config.get("version")),
        algorithm=default.name if default else "",
        kv_cache=_kv_cache(cache, export if isinstance(export, dict) else {}),
        default=default,
        groups=tuple(groups),
        ignore=names(config, "exclude"),
        warnings=_outputs(config.get("global_quant_config")),
    )


def _algorithm(where: str, layer: Any) -> Algorithm | None:
    """None for a config without weights."""
    if layer is None:
        return None
    weight = inputs = None
    if isinstance(layer, dict):
        weight, inputs = (_only(layer.get(field)) for field in ("weight", "input_tensors"))
    kinds = (dict, type(None))
    if not (isinstance(layer, dict) and isinstance(weight, kinds) and isinstance(inputs, kinds)):
        raise CheckpointError(
            f"cannot read {where} of the quantization config",
            got=repr(layer)[:80],
            want="weight and input_tensors as objects or null",
            hint="correct config.json, or export the checkpoint again",
        )
    if weight is None:
        return None
    word = f"{_describe(weight)} weights, {_describe(inputs)} inputs"
    for args in filter(None, (weight, inputs)):
        if str(args.get("dtype")).lower() not in _FP8:
            return Algorithm(word, None, f"{args.get('dtype')} is not {_FP8[0]}")
    kind = {"per_tensor": "tensor", "per_channel": "channel"}.get(str(weight.get("qscheme")))
    if kind is None or (kind == "channel" and weight.get("ch_axis") not in (0, None)):
        return Algorithm(word, None, "only weights per tensor or per row are run")
    if inputs is None:
        return Algorithm(word, Scheme(kind))
    dynamic, scheme = bool(inputs.get("is_dynamic")), str(inputs.get("qscheme"))
    if scheme == "per_tensor":
        return Algorithm(word, Scheme(kind, "tensor", dynamic=dynamic))
    if scheme in ("per_token", "per_channel") and dynamic:
        return Algorithm(word, Scheme(kind, "token", dynamic=True))
    return Algorithm(word, None, f"static {scheme} inputs are not run")


def _outputs(layer: Any) -> tuple[str, ...]:
    found = isinstance(layer, dict) and layer.get("output_tensors")
    return ("the config quantizes outputs too, which stay in 16 bits here",) if found else ()


def _only(stages: Any) -> Any:
    """Quark's several stages, where there is one."""
    return stages[0] if isinstance(stages, list) and len(stages) == 1 else stages


def _describe(args: Mapping[str, Any] | None) -> str:
    if args is None:
        return "16-bit"
    timing = "dynamic " if args.get("is_dynamic") else ""
    return f"{timing}{args.get('dtype')} {args.get('qscheme')}"


def _kv_cache(cache: Mapping[str, Any], export: Mapping[str, Any]) -> str:
    for layer in cache.values():
        output = layer.get("output_tensors") if isinstance(layer, dict) else None
        if isinstance(output, dict):
            return "FP8" if output.get("dtype") in _FP8 else str(output.get("dtype"))
    return "FP8" if export.get("kv_cache_group") else ""
