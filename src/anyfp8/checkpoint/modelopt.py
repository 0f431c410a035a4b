"""NVIDIA ModelOpt's layout: W = weight · weight_scale, x quantized with input_scale.

Written by nvidia-modelopt's `export_hf_checkpoint` and served by TensorRT-LLM, vLLM and SGLang;
here as version 0.47 writes it. The config comes flat in config.json ("quantization_config"), nested
in hf_quant_config.json, or both; config.json wins.

The surprises: scales are [] or [N] (1-D) or [N/128, 1, K/128, 1] (4-D) by algorithm; one algorithm
is spelt in lower case (fp8_pb_wo); MIXED_PRECISION is per layer, and without its map is another
family (W4A8) altogether; and plain transformers loads such files as garbage without an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from anyfp8 import __version__
from anyfp8.checkpoint.declaration import Algorithm, ConfigFiles, Declaration
from anyfp8.checkpoint.files import TensorSpec
from anyfp8.checkpoint.formats import MODELOPT, MXFP8, formats_for
from anyfp8.checkpoint.rules import Rule
from anyfp8.errors import CheckpointError, InputError
from anyfp8.problem import QTensor, Scheme

NAME = "modelopt"

# read but not written: TensorRT-LLM's word for fine-grained FP8; microscaling as weight-only
_READ_ONLY = {
    "FP8_BLOCK_SCALES": Scheme("block", "group", True, (128, 128), 128),
    "MXFP8": MXFP8,
}
_REFUSED = {
    "NVFP4": "NVFP4 weights are 4-bit: this library runs FP8",
    "NVFP4_AWQ": "NVFP4 weights are 4-bit: this library runs FP8",
    "W4A8_AWQ": "its weights are 4-bit: this library runs FP8",
    "W4A16_AWQ": "its weights are 4-bit: this library runs FP8",
}
# a static FP8 tensor in the words of config_groups and kv_cache_scheme
_STATIC = {"dynamic": False, "num_bits": 8, "type": "float"}
# ModelOpt's spelling where it isn't upper case
_SPELLING = {"FP8_PB_WO": "fp8_pb_wo"}
READABLE = ", ".join((*MODELOPT, *_READ_ONLY, "MIXED_PRECISION of these"))


def claims(files: ConfigFiles) -> bool:
    """Whether a checkpoint is in this format."""
    method = str(files.quantization.get("quant_method", "")).lower()
    if method:
        return method.startswith("modelopt")
    producer = files.quantization.get("producer")
    named = isinstance(producer, dict) and producer.get("name") == NAME
    return named or "quantization" in files.quantization or bool(files.modelopt)


def declare(files: ConfigFiles) -> Declaration:
    """The declaration of a ModelOpt config in any of its shapes.

    Raises:
        CheckpointError: MIXED_PRECISION without a layer map, or fields of the wrong type.
    """
    flat, nested = _fields(files.quantization), _fields(files.modelopt)
    warnings = []
    if flat and nested:
        differ = [key for key in flat if flat[key] != nested[key]]
        if differ:
            warnings.append(
                "config.json and hf_quant_config.json disagree on "
                + ", ".join(f"{key} ({flat[key]!r}, {nested[key]!r})"[:200] for key in differ)
                + ": config.json wins"
            )
    fields = flat or nested
    algorithm: str = fields["quant_algo"]
    layers = fields["quantized_layers"]
    default = None
    if algorithm == "MIXED_PRECISION":
        if not layers:
            raise CheckpointError(
                "unsupported bare MIXED_PRECISION",
                got="quant_algo MIXED_PRECISION without quantized_layers (the W4A8 family)",
                want="quantized_layers: module -> quant_algo",
                hint="export it again in FP8, or start from the 16-bit original",
            )
    elif algorithm:
        default = algorithm_of(algorithm)
    return Declaration(
        NAME,
        producer=fields["producer"],
        algorithm=algorithm,
        kv_cache=fields["kv_cache"],
        default=default,
        layers={name: algorithm_of(a) for name, a in layers.items() if not _is_glob(name)},
        groups=tuple((Rule(n), algorithm_of(a)) for n, a in layers.items() if _is_glob(n)),
        ignore=fields["ignore"],
        warnings=tuple(warnings),
    )


def _is_glob(name: str) -> bool:
    return Rule(name).kind == "glob"


def algorithm_of(name: str) -> Algorithm:
    """What a ModelOpt algorithm means here; unknown ones carry their refusal."""
    scheme = MODELOPT.get(name) or _READ_ONLY.get(name)
    if scheme is not None:
        return Algorithm(name, scheme)
    known = ", ".join((*MODELOPT, *_READ_ONLY))
    return Algorithm(name, None, _REFUSED.get(name, f"{name or 'no algorithm'!r} is not {known}"))


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that decide, from the flat or the nested form; {} for an absent config."""
    if not config:
        return {}
    inner = config.get("quantization")
    body = inner if isinstance(inner, dict) else config
    producer = config.get("producer") or {}
    ignore = body.get("ignore") or body.get("exclude_modules") or []
    layers = body.get("quantized_layers") or {}
    if not isinstance(ignore, list) or not all(isinstance(entry, str) for entry in ignore):
        raise CheckpointError(
            "cannot read the list of ignored modules",
            got=repr(ignore)[:80],
            want="list of names",
            hint="correct config.json, or export the checkpoint again",
        )
    if not isinstance(layers, dict):
        raise CheckpointError(
            "cannot read quantized_layers",
            got=repr(layers)[:80],
            want="module -> quant_algo",
            hint="correct config.json, or export the checkpoint again",
        )
    kv_cache = body.get("kv_cache_quant_algo") or ""
    if not kv_cache and isinstance(scheme := body.get("kv_cache_scheme"), dict):
        kind = {"float": "FP", "int": "INT"}.get(str(scheme.get("type")), "")
        kv_cache = f"{kind}{scheme.get('num_bits', '')}"
    return {
        "quant_algo": _upper(body.get("quant_algo")),
        "kv_cache": _upper(kv_cache),
        "ignore": tuple(ignore),
        "quantized_layers": {
            name: _upper(entry.get("quant_algo") if isinstance(entry, dict) else entry)
            for name, entry in layers.items()
        },
        "producer": _producer(producer),
    }


def _producer(producer: Any) -> str:
    if not isinstance(producer, dict):
        return ""
    return " ".join(str(producer[key]) for key in ("name", "version") if producer.get(key))


def _upper(value: Any) -> str:
    return str(value).upper() if value is not None else ""


def layer_specs(name: str, scheme: Scheme, n: int, k: int) -> list[TensorSpec]:
    """Names, dtypes and shapes of the tensors that store a quantized linear, bias and extras aside.

    Raises:
        InputError: this format has no algorithm for the scheme.
    """
    algorithm_for(scheme)
    specs = [
        TensorSpec(f"{name}.weight", "F8_E4M3", (n, k)),
        TensorSpec(f"{name}.weight_scale", "F32", _scale_shape(scheme, n, k)),
    ]
    if scheme.activation == "tensor":
        specs.append(TensorSpec(f"{name}.input_scale", "F32", ()))
    return specs


def layer_tensors(
    name: str, scheme: Scheme, weight: QTensor, input_scale: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """The tensors of `layer_specs` from canonical ones."""
    n, k = weight.data.shape
    tensors = {
        f"{name}.weight": weight.codes.view(torch.float8_e4m3fn),
        f"{name}.weight_scale": weight.scale.float().reshape(_scale_shape(scheme, n, k)),
    }
    if scheme.activation == "tensor":
        assert input_scale is not None
        tensors[f"{name}.input_scale"] = input_scale.float().reshape(())
    return tensors


def quantization_configs(
    layers: Mapping[str, Scheme], ignore: Iterable[str], kv_cache: str = ""
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What goes into config.json ("quantization_config") and into hf_quant_config.json.

    Layers of one scheme give its algorithm; several give MIXED_PRECISION with a layer map.
    """
    algorithms = {name: algorithm_for(scheme) for name, scheme in layers.items()}
    kinds = set(algorithms.values())
    ignored = sorted(ignore)
    producer = {"name": "anyfp8", "version": __version__}
    groups = {"group_0": _group(["Linear"])} if kinds == {"FP8"} else {}
    mapped: dict[str, Any] = {}
    if len(kinds) > 1:
        mapped = {
            "quantized_layers": {
                name: {"quant_algo": _SPELLING.get(algo, algo)} for name, algo in algorithms.items()
            }
        }
        if "FP8" in kinds:
            groups = {"group_0": _group(sorted(n for n, a in algorithms.items() if a == "FP8"))}
    algorithm = "MIXED_PRECISION" if len(kinds) > 1 else kinds.pop()
    algorithm = _SPELLING.get(algorithm, algorithm)
    flat: dict[str, Any] = {
        **({"config_groups": groups} if groups else {}),
        **mapped,
        "ignore": ignored,
        "quant_algo": algorithm,
        **(
            {"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}}
            if kv_cache
            else {}
        ),
        "producer": producer,
        "quant_method": NAME,
    }
    nested = {
        "producer": producer,
        "quantization": {
            "quant_algo": algorithm,
            "kv_cache_quant_algo": kv_cache or None,
            **mapped,
            "exclude_modules": ignored,
        },
    }
    return flat, nested


def algorithm_for(scheme: Scheme) -> str:
    """The algorithm that stores a scheme. Raises InputError naming the schemes that have one."""
    for name, stored in MODELOPT.items():
        if stored == scheme:
            return name
    raise InputError(
        f"the ModelOpt format cannot hold {scheme.name}",
        want=", ".join(stored.name for stored in MODELOPT.values()),
        hint=f"formats that hold it: {', '.join(formats_for(scheme)) or 'none'} (--format)",
    )


def _scale_shape(scheme: Scheme, n: int, k: int) -> tuple[int, ...]:
    if scheme.weight == "channel":
        return (n,)
    shape = scheme.weight_scale_shape(n, k)
    return (shape[0], 1, shape[1], 1) if shape else ()


def _group(targets: list[str]) -> dict[str, Any]:
    return {"input_activations": dict(_STATIC), "weights": dict(_STATIC), "targets": targets}
