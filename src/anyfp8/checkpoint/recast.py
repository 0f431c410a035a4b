"""FP8 checkpoint -> FP8 checkpoint in another layout or scheme, without quantizing again.

Codes are copied bit for bit and scales keep their values, repeated where the target's granularity
is finer. A layer whose scales the target cannot hold is refused by name, unless `requantize` allows
to dequantize it and quantize it again, which loses a little and is counted.

The surprise: nothing is calibrated here, so a static target needs a source that is static.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from anyfp8 import reference
from anyfp8.checkpoint.files import TensorSpec
from anyfp8.checkpoint.formats import formats_for
from anyfp8.checkpoint.kv_cache import kv_scales
from anyfp8.checkpoint.layouts import LAYOUTS, choose_layout
from anyfp8.checkpoint.reader import Checkpoint, LayerData
from anyfp8.checkpoint.regranulate import regranulated
from anyfp8.checkpoint.sources import copy_sidecars, write_json
from anyfp8.checkpoint.stream import check_apart, quantize_rows
from anyfp8.checkpoint.writer import SHARD_BYTES, CheckpointWriter, check_output
from anyfp8.errors import CheckpointError, InputError
from anyfp8.problem import QTensor, Scheme

# what a scheme becomes where a layout does not hold it, finer and finer: same values, same codes
_FINER = (("channel", None), ("block", (128, 128)))


@dataclass(frozen=True)
class RecastReport:
    """What `recast` wrote.

    Attributes:
        out: the folder.
        source_format, format: layouts read and written.
        schemes: name of a written scheme -> number of layers.
        exact: layers whose codes were copied.
        requantized: layers that were quantized again.
        relative_error: of requantizing, in the Frobenius norm over those layers; 0 without any.
        bytes_in, bytes_out: of all tensors.
    """

    out: str
    source_format: str
    format: str
    schemes: Mapping[str, int]
    exact: int
    requantized: tuple[str, ...]
    relative_error: float
    bytes_in: int
    bytes_out: int


def recast(
    checkpoint: Checkpoint,
    out: str | Path,
    *,
    format: str | None = None,
    scheme: Scheme | None = None,
    requantize: bool = False,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
    overwrite: bool = False,
) -> RecastReport:
    """Write an FP8 checkpoint again in another layout or scheme.

    Args:
        checkpoint: of `open_checkpoint`; its files are never changed.
        out: folder to write; absent or empty, unless `overwrite`.
        format: a name of `layouts.LAYOUTS`; None takes the first that holds the schemes.
        scheme: for all layers; None keeps each layer's own, made finer where `format` asks for it.
        requantize: quantize layers again that the target cannot hold exactly.
        shard_bytes: largest shard.
        progress: called with (layers done, layers in all).
        overwrite: replace a folder that holds something, once the new one is complete.

    Raises:
        InputError: layers that the target cannot hold, by name; a static target for dynamic layers.
        CheckpointError: a folder or disk that does not take it.
    """
    plan = checkpoint.plan
    check_apart(plan.path, check_output(out, overwrite=overwrite))
    if not plan.layers:
        raise CheckpointError(
            f"no FP8 layers in {plan.path.name}",
            got=plan.format,
            want="an FP8 checkpoint",
            hint="leave --from-fp8 out to quantize a 16-bit model",
        )
    targets = {name: _target(plan.layers[name].scheme, scheme, format) for name in plan.layers}
    chosen = choose_layout(targets.values(), format)
    layout = LAYOUTS[chosen]
    inexact = _check(checkpoint, targets, requantize)
    renamed = _kv_names(checkpoint, chosen)
    specs = list(_specs(checkpoint, targets, chosen, renamed))
    modules = {name.removesuffix(".weight") for name in plan.plain if name.endswith(".weight")}
    ignored = {m for m in modules if len(plan.files.tensors[f"{m}.weight"].shape) > 1}
    ignored |= {"lm_head"} if plan.config.get("tie_word_embeddings") else set()
    flat, nested = layout.quantization_configs(targets, ignored, plan.kv_cache)
    lost = total = 0.0
    with CheckpointWriter(out, specs, shard_bytes=shard_bytes, overwrite=overwrite) as writer:
        copy_sidecars(plan.path, writer.folder)
        write_json(writer.folder / "config.json", {**plan.config, "quantization_config": flat})
        if nested:
            write_json(writer.folder / "hf_quant_config.json", nested)
        for done, (name, target) in enumerate(targets.items(), 1):
            source = checkpoint.layer(name)
            layer = _requantized(source, target) if name in inexact else _kept(source, target)
            if name in inexact:
                values = reference.dequantize(source.weight)
                lost += float((reference.dequantize(layer.weight) - values).double().square().sum())
                total += float(values.double().square().sum())
            for key, tensor in layout.layer_tensors(
                name, target, layer.weight, layer.input_scale
            ).items():
                writer.add(key, tensor)
            if layer.bias is not None:
                writer.add(f"{name}.bias", layer.bias)
            for leaf, tensor in layer.extras.items():
                for key in renamed.get(f"{name}.{leaf}", (f"{name}.{leaf}",)):
                    writer.add(key, tensor)
            if progress:
                progress(done, len(targets))
        for name in (*plan.plain, *plan.optional):
            tensor = checkpoint.tensor(name)
            for key in renamed.get(name, (name,)):
                writer.add(key, tensor)
    counts: dict[str, int] = {}
    for target in targets.values():
        counts[target.name] = counts.get(target.name, 0) + 1
    return RecastReport(
        out=str(out),
        source_format=plan.format,
        format=chosen,
        schemes=counts,
        exact=len(targets) - len(inexact),
        requantized=tuple(inexact),
        relative_error=(lost / total) ** 0.5 if total else 0.0,
        bytes_in=plan.nbytes,
        bytes_out=writer.nbytes,
    )


def _target(source: Scheme, wanted: Scheme | None, format: str | None) -> Scheme:
    if wanted is not None:
        return wanted
    if format is None or format in formats_for(source):
        return source
    for weight, block in _FINER:
        finer = replace(source, weight=weight, block=block) if source.weight == "tensor" else source
        if format in formats_for(finer):
            return finer
    return source


def _check(
    checkpoint: Checkpoint, targets: Mapping[str, Scheme], requantize: bool
) -> dict[str, str]:
    """Layers that must be quantized again, with the reason; from scales alone, before writing."""
    inexact: dict[str, str] = {}
    for name, target in targets.items():
        planned = checkpoint.plan.layers[name]
        static = target.activation == "tensor" and not target.dynamic
        if static and planned.input_scale is None:
            raise InputError(
                f"{name} cannot become {target.name}",
                got=f"{planned.scheme.name}, which has no input_scale",
                want="a dynamic or weight-only scheme",
                hint="quantize the 16-bit original: that calibrates",
            )
        shape = (planned.n, planned.k)
        codes = torch.empty(shape, dtype=torch.uint8, device="meta")
        scale = checkpoint.weight_scale(name)
        probe = LayerData(name, planned.scheme, QTensor(codes, scale, planned.scheme.block))
        if regranulated(probe, target) is None:
            inexact[name] = planned.scheme.name
    if inexact and not requantize:
        name, found = next(iter(inexact.items()))
        raise InputError(
            f"{len(inexact)} layers cannot become {targets[name].name} with their codes as they are"
            f", such as {name}",
            got=found,
            want="a scheme whose scales are at least as fine",
            hint="requantize=True (--requantize) quantizes them again and says what that loses",
        )
    return inexact


def _kept(layer: LayerData, target: Scheme) -> LayerData:
    found = regranulated(layer, target)
    # the plan has tried this with the same scales
    assert found is not None
    return found


def _requantized(layer: LayerData, target: Scheme) -> LayerData:
    values = reference.dequantize(layer.weight)
    return replace(
        layer, scheme=target, weight=quantize_rows(f"{layer.name}.weight", values, target)
    )


def _kv_names(checkpoint: Checkpoint, format: str) -> dict[str, tuple[str, ...]]:
    """Stored KV-cache scale -> its names in the target, which looks for them elsewhere."""
    engine = "compressed-tensors" if format == "compressed-tensors" else "modelopt"
    renamed: dict[str, tuple[str, ...]] = {}
    for scale in kv_scales(checkpoint.plan):
        renamed[scale.tensor] = (*renamed.get(scale.tensor, ()), scale.name_in(engine))
    return renamed


def _specs(
    checkpoint: Checkpoint,
    targets: Mapping[str, Scheme],
    format: str,
    renamed: Mapping[str, tuple[str, ...]],
) -> Iterator[TensorSpec]:
    plan = checkpoint.plan
    beside: list[str] = [*plan.plain, *plan.optional]
    for name, target in targets.items():
        planned = plan.layers[name]
        yield from LAYOUTS[format].layer_specs(name, target, planned.n, planned.k)
        beside += [*([planned.bias] if planned.bias else []), *planned.extras]
    for name in beside:
        stored = plan.files.tensors[name]
        for key in renamed.get(name, (name,)):
            yield TensorSpec(key, stored.dtype, stored.shape)
