"""torchao's float8 tensors in safetensors: W = _weight_qdata · _weight_scale.

Written by transformers' TorchAoConfig (torchao 0.18 here). What each tensor is stands in the
metadata of its safetensors file, as JSON under the name of the weight; the config's `quant_type`
speaks where a file has lost it.

The surprise: no tensor is called weight. The two that it consists of are renamed before anything
else looks at them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from anyfp8.checkpoint.declaration import Algorithm, ConfigFiles, Declaration
from anyfp8.checkpoint.files import TensorFiles
from anyfp8.checkpoint.shards import list_tensors
from anyfp8.checkpoint.words import names
from anyfp8.errors import CheckpointError
from anyfp8.problem import Scheme

NAME = "torchao"
READABLE = "Float8Tensor weights per tensor or per row, with or without dynamic activations"

_RENAMED = {"_weight_qdata": "weight", "_weight_scale": "weight_scale"}
_GRANULARITY = {"PerTensor": ("tensor", "tensor"), "PerRow": ("channel", "token")}


def claims(files: ConfigFiles) -> bool:
    """Whether a checkpoint is in this format."""
    return str(files.quantization.get("quant_method", "")).lower() == NAME


def rename(files: TensorFiles) -> TensorFiles:
    """The files with the parts of each weight under the names that other formats use.

    Raises:
        CheckpointError: a file holds a weight and its parts.
    """
    renamed = {}
    for name, stored in files.tensors.items():
        head, _, leaf = name.rpartition(".")
        plain = f"{head}.{_RENAMED[leaf]}" if leaf in _RENAMED else name
        if plain in renamed or (plain != name and plain in files.tensors):
            raise CheckpointError(
                f"two tensors for {plain} in {stored.file.name}",
                got=f"{name} beside it",
                want="one of them",
            )
        renamed[plain] = replace(stored, name=plain)
    return replace(files, tensors=renamed)


def declare(files: ConfigFiles) -> Declaration:
    """The declaration of a torchao config and of the files' metadata.

    Raises:
        CheckpointError: metadata or a config that is not torchao's.
    """
    config = files.quantization
    kinds = config.get("quant_type")
    default = kinds.get("default") if isinstance(kinds, dict) else kinds
    if not isinstance(default, dict):
        raise CheckpointError(
            "cannot read quant_type of the quantization config",
            got=repr(kinds)[:80],
            want="a torchao configuration as an object",
            hint="save the model with transformers 5 and torchao 0.15 or newer",
        )
    stored = list_tensors(files.folder)
    layers = {
        name.removesuffix(".weight"): algorithm
        for name, text in stored.metadata.items()
        if name.endswith(".weight")
        and (algorithm := _from_metadata(name, text, _shape(stored, name))) is not None
    }
    whole = _from_config(default)
    return Declaration(
        NAME,
        algorithm=str(default.get("_type", "")),
        default=None if layers else whole,
        layers=layers,
        ignore=names(config, "modules_to_not_convert"),
    )


def _shape(stored: TensorFiles, name: str) -> tuple[int, ...]:
    codes = stored.tensors.get(f"{name.removesuffix('.weight')}._weight_qdata")
    return codes.shape if codes else ()


def _from_metadata(name: str, text: str, shape: tuple[int, ...]) -> Algorithm | None:
    """None for a plain tensor."""
    try:
        entry = json.loads(text)
        kind = str(entry["_type"])
        if kind == "Tensor":
            return None
        data = entry["_data"]
        kwargs = data.get("act_quant_kwargs")
        block = data.get("block_size")
        granularity = kwargs["_data"]["granularity"]["_type"] if kwargs else None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"cannot read the metadata of {name}",
            got=f"{type(error).__name__}: {error}",
            want="what torchao writes: _type and _data",
            hint="save the model again with this torchao and safetensors",
        ) from error
    if kind != "Float8Tensor":
        return Algorithm(kind, None, f"{kind} is not Float8Tensor")
    # [1, K] is a scale per row; a block of everything is one for the tensor
    if isinstance(block, list) and len(shape) == 2 and block not in (list(shape), [1, shape[1]]):
        return _blocks(kind, block, granularity)
    weight = "channel" if isinstance(block, list) and block[:1] == [1] else "tensor"
    return _algorithm(kind, weight, granularity)


def _blocks(kind: str, block: list[Any], granularity: str | None) -> Algorithm:
    word = f"{kind} with blocks {block}"
    if len(block) != 2 or not all(type(side) is int and side > 0 for side in block):
        return Algorithm(word, None, "these are no blocks of a matrix")
    rows, columns = block
    if granularity is None:
        return Algorithm(word, Scheme("block", block=(rows, columns)))
    if granularity == "PerBlock":
        # torchao's activations of such weights: 1 x the block's width
        return Algorithm(word, Scheme("block", "group", True, (rows, columns), columns))
    return Algorithm(word, None, f"{granularity} activations are not run with them")


def _from_config(config: Mapping[str, Any]) -> Algorithm:
    kind = str(config.get("_type"))
    data = config.get("_data")
    data = data if isinstance(data, dict) else {}
    if kind == "Float8WeightOnlyConfig":
        return _algorithm(kind, "channel", None)
    if kind != "Float8DynamicActivationFloat8WeightConfig":
        return Algorithm(kind, None, f"{kind} is not a Float8 configuration that is run")
    given = data.get("granularity")
    words = [g.get("_type") for g in given if isinstance(g, dict)] if given else []
    activation, weight = words if len(words) == 2 else ("PerTensor", "PerTensor")
    return _algorithm(kind, _GRANULARITY.get(str(weight), ("",))[0], activation)


def _algorithm(kind: str, weight: str, activation: str | None) -> Algorithm:
    if activation is None:
        return Algorithm(kind, Scheme(weight))
    if weight == "" or activation not in _GRANULARITY:
        return Algorithm(kind, None, f"{activation} activations are not run")
    return Algorithm(kind, Scheme(weight, _GRANULARITY[activation][1], dynamic=True))
