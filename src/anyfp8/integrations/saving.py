"""model → checkpoint: a model with FP8 linears, saved as what any reader of its format expects.

Weights are written in canonical form, whatever a backend has made of its copy, so a model that was
loaded, run and saved has the bytes that it came with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from anyfp8.checkpoint import LayerData, save_checkpoint
from anyfp8.checkpoint.sources import copy_sidecars
from anyfp8.checkpoint.writer import SHARD_BYTES
from anyfp8.errors import InputError
from anyfp8.integrations.parallel import Parallel
from anyfp8.linear import Fp8Linear
from anyfp8.problem import QTensor

_ATTRIBUTE = "_anyfp8_origin"


@dataclass(frozen=True)
class Origin:
    """Where a loaded model came from, kept on it for saving and reloading.

    Attributes:
        folder: of the checkpoint, None for a single file.
        config: config.json without its quantization_config.
        kv_cache: word for the KV cache.
        optional: scales that no layer uses, by name.
        parallel: shares of this rank, None for a whole model.
    """

    folder: Path | None
    config: Mapping[str, Any]
    kv_cache: str = ""
    optional: Mapping[str, torch.Tensor] = field(default_factory=dict)
    parallel: Parallel | None = None


def set_origin(model: Any, origin: Origin) -> None:
    """Keep an origin on its model."""
    object.__setattr__(model, _ATTRIBUTE, origin)


def origin_of(model: Any) -> Origin | None:
    """The origin of a model that `load` returned, None for any other."""
    return getattr(model, _ATTRIBUTE, None)


def save(
    model: Any,
    out: str | Path,
    *,
    format: str | None = None,
    tokenizer: Any = None,
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
) -> str:
    """Write a model with FP8 linears as a checkpoint folder.

    Args:
        model: of `load`, or one that `convert` has changed in memory; not changed.
        out: folder to write; absent or empty, unless `overwrite`.
        format: "modelopt", "compressed-tensors" or "finegrained"; None takes the first that holds
            the model's schemes.
        tokenizer: saved with it; by default the files beside the loaded checkpoint are copied.
        shard_bytes: largest shard.
        overwrite: replace a folder that holds something, once the new one is complete.

    Returns:
        The name of the format.

    Raises:
        InputError: no FP8 linears, a scheme that the format cannot hold, or a rank's part of a
            model.
        CheckpointError: a folder or disk that does not take it.
    """
    origin = origin_of(model)
    if origin is not None and origin.parallel is not None:
        raise InputError(
            "cannot save one rank's part of a model",
            got=f"rank {origin.parallel.rank} of {origin.parallel.size}",
            want="a whole model",
            hint="load it without tp to save it",
        )
    layers = {n: m for n, m in model.named_modules() if isinstance(m, Fp8Linear)}
    unquantized = [
        name
        for name, module in model.named_modules()
        # routers have a class of their own
        if name not in layers and getattr(module._parameters.get("weight"), "ndim", 0) == 2
    ]
    tied = _tied(model)
    plain = {
        name: tensor.detach()
        for name, tensor in model.state_dict().items()
        if name.rpartition(".")[0] not in layers and name not in tied
    }
    if origin is not None:
        plain |= origin.optional

    def sidecars(folder: Path) -> None:
        if origin is not None and origin.folder is not None and origin.folder.is_dir():
            copy_sidecars(origin.folder, folder)
        generation = getattr(model, "generation_config", None)
        if generation is not None:
            generation.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)

    return save_checkpoint(
        out,
        config=origin.config if origin is not None else _config(model),
        layers=[_layer(name, module) for name, module in layers.items()],
        plain=plain,
        ignore=unquantized,
        kv_cache=origin.kv_cache if origin is not None else "",
        format=format,
        sidecars=sidecars,
        shard_bytes=shard_bytes,
        overwrite=overwrite,
    )


def _layer(name: str, module: Fp8Linear) -> LayerData:
    codes = module.weight.detach().view(torch.uint8)
    bias, static = module.bias, module.input_scale
    return LayerData(
        name,
        module.scheme,
        QTensor(codes.cpu(), module.weight_scale.detach().cpu(), module.scheme.block),
        None if static is None else static.detach().cpu(),
        None if bias is None else bias.detach().cpu(),
        {leaf: value.cpu() for leaf, value in module._buffers.items() if value is not None},
    )


def _tied(model: Any) -> set[str]:
    """Names that are another tensor's second name, which files leave out."""
    if not getattr(model.config, "tie_word_embeddings", False):
        return set()
    return set(getattr(model, "_tied_weights_keys", None) or ())


def _config(model: Any) -> dict[str, Any]:
    found = json.loads(model.config.to_json_string())
    found.pop("quantization_config", None)
    return found | {"architectures": [type(model).__name__]}
