"""Layers and plain tensors in memory -> checkpoint: what was loaded can be saved again.

Takes canonical layers, so whatever a kernel did to its copy of the weights never reaches a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from anyfp8.checkpoint.files import TensorSpec
from anyfp8.checkpoint.layouts import LAYOUTS, choose_layout
from anyfp8.checkpoint.reader import LayerData
from anyfp8.checkpoint.sources import write_json
from anyfp8.checkpoint.writer import SHARD_BYTES, CheckpointWriter, specs_of
from anyfp8.errors import InputError


def save_checkpoint(
    out: str | Path,
    *,
    config: Mapping[str, Any],
    layers: Sequence[LayerData],
    plain: Mapping[str, torch.Tensor],
    ignore: Iterable[str] = ("lm_head",),
    kv_cache: str = "",
    format: str | None = None,
    sidecars: Callable[[Path], None] | None = None,
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
) -> str:
    """Write a quantized model that is in memory as a checkpoint.

    Args:
        out: folder to write; absent or empty, unless `overwrite`.
        config: config.json of the model; a quantization_config in it is replaced.
        layers: the quantized linears; biases and extras go with them.
        plain: all other tensors by name.
        ignore: modules that are not quantized, for the config.
        kv_cache: "FP8" or "" for 16 bits.
        format: a name of `layouts.LAYOUTS`; None takes ModelOpt's, or the first that can.
        sidecars: called with the folder to put the tokenizer and such into.
        shard_bytes: largest shard.
        overwrite: replace a folder that holds something, once the new one is complete.

    Returns:
        The name of the layout written.

    Raises:
        InputError: no layers, a scheme that the format cannot hold, or one name twice.
        CheckpointError: a folder or disk that does not take it.
    """
    if not layers:
        raise InputError("no quantized layers to save", want="at least one")
    name = choose_layout((layer.scheme for layer in layers), format)
    layout = LAYOUTS[name]
    specs: list[TensorSpec] = []
    for layer in layers:
        n, k = layer.weight.data.shape
        specs += layout.layer_specs(layer.name, layer.scheme, n, k)
        specs += specs_of(_beside(layer))
    specs += specs_of(plain)
    schemes = {layer.name: layer.scheme for layer in layers}
    flat, nested = layout.quantization_configs(schemes, ignore, kv_cache)
    with CheckpointWriter(out, specs, shard_bytes=shard_bytes, overwrite=overwrite) as writer:
        if sidecars:
            sidecars(writer.folder)
        write_json(writer.folder / "config.json", {**config, "quantization_config": flat})
        if nested:
            write_json(writer.folder / "hf_quant_config.json", nested)
        for layer in layers:
            stored = layout.layer_tensors(layer.name, layer.scheme, layer.weight, layer.input_scale)
            for key, tensor in {**stored, **_beside(layer)}.items():
                writer.add(key, tensor)
        for key, tensor in plain.items():
            writer.add(key, tensor)
    return name


def _beside(layer: LayerData) -> dict[str, torch.Tensor]:
    tensors = {f"{layer.name}.{leaf}": tensor for leaf, tensor in layer.extras.items()}
    if layer.bias is not None:
        tensors[f"{layer.name}.bias"] = layer.bias
    return tensors
