"""NVIDIA ModelOpt's layout: W = weight · weight_scale, x quantized with input_scale.

Written by nvidia-modelopt's `export_hf_checkpoint` and served by TensorRT-LLM, vLLM and SGLang; here
as version 0.47 writes it. The config comes flat in config.json ("quantization_config"), nested in
hf_quant_config.json, or both; config.json wins.

The surprises: scales are [] or [N] (1-D) or [N/128, 1, K/128, 1] (4-D) by algorithm; one algorithm
is spelt in lower case (fp8_pb_wo); MIXED_PRECISION is per layer, and without its map is another
family (W4A8) altogether; and plain transformers loads such files as garbage without an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anyfp8.checkpoint.declaration import Algorithm, ConfigFiles, Declaration
from anyfp8.errors import CheckpointError
from anyfp8.problem import Scheme

NAME = "modelopt"
VERSION = "0.47.0"

# the algorithm that stores each scheme
ALGORITHMS: dict[str, Scheme] = {
    "FP8": Scheme("tensor", "tensor"),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme("channel", "token", dynamic=True),
    "FP8_PB_WO": Scheme("block", block=(128, 128)),
}
# read but not written: TensorRT-LLM's word for fine-grained FP8
_READ_ONLY = {"FP8_BLOCK_SCALES": Scheme("block", "group", True, (128, 128), 128)}
_REFUSED = {
    "NVFP4": "NVFP4 weights are 4-bit: this library runs FP8",
    "NVFP4_AWQ": "NVFP4 weights are 4-bit: this library runs FP8",
    "W4A8_AWQ": "its weights are 4-bit: this library runs FP8",
    "W4A16_AWQ": "its weights are 4-bit: this library runs FP8",
    "MXFP8": "MXFP8 (32-column E8M0 scales) is not read yet",
}
# ModelOpt's spelling where it isn't upper case
_SPELLING = {"FP8_PB_WO": "fp8_pb_wo"}


READABLE = ", ".join((*ALGORITHMS, *_READ_ONLY, "MIXED_PRECISION of these"))


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
            )
    elif algorithm:
        default = algorithm_of(algorithm)
    return Declaration(
        NAME,
        producer=fields["producer"],
        algorithm=algorithm,
        kv_cache=fields["kv_cache"],
        default=default,
        layers={name: algorithm_of(algo) for name, algo in layers.items()},
        ignore=fields["ignore"],
        warnings=tuple(warnings),
    )


def algorithm_of(name: str) -> Algorithm:
    """What a ModelOpt algorithm means here; unknown ones carry their refusal."""
    scheme = ALGORITHMS.get(name) or _READ_ONLY.get(name)
    if scheme is not None:
        return Algorithm(name, scheme)
    known = ", ".join((*ALGORITHMS, *_READ_ONLY))
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
            "cannot read the list of ignored modules", got=repr(ignore)[:80], want="list of names"
        )
    if not isinstance(layers, dict):
        raise CheckpointError(
            "cannot read quantized_layers", got=repr(layers)[:80], want="module -> quant_algo"
        )
    kv_cache = body.get("kv_cache_quant_algo") or ""
    if not kv_cache and isinstance(scheme := body.get("kv_cache_scheme"), dict):
        kv_cache = f"{str(scheme.get('type', '')).upper()[:2]}{scheme.get('num_bits', '')}"
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
