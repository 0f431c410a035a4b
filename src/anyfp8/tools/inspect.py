"""anyfp8 inspect: what each layer of a checkpoint is, read from its headers and scales alone."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import typer

from anyfp8.checkpoint import Checkpoint, is_quantized, open_source, read_plan
from anyfp8.checkpoint.kv_cache import kv_scales
from anyfp8.tools import console


def describe(path: str | Path, *, dynamic_fallback: bool = False) -> dict[str, Any]:
    """Everything that `inspect` prints, as plain data; `dynamic_fallback` as in `load`.

    Raises:
        CheckpointError: the files are not consistent; names the file and the tensor.
    """
    if not is_quantized(path):
        return _describe_source(path)
    checkpoint = Checkpoint(read_plan(path, strict=False, dynamic_fallback=dynamic_fallback))
    plan = checkpoint.plan
    return {
        "path": str(path),
        "format": plan.format,
        "producer": plan.producer,
        "algorithm": plan.algorithm,
        "kv_cache": plan.kv_cache,
        "kv_scales": [
            {"tensor": s.tensor, "sglang": s.name_in("sglang"), "vllm": s.name_in("vllm")}
            for s in kv_scales(plan)
        ],
        "bytes": plan.nbytes,
        "tensors": len(plan.files.tensors),
        "layers": [_layer(checkpoint, name) for name in plan.layers],
        "plain": len(plan.plain),
        "optional": plan.skipped,
        "rules": [{"rule": rule, "matched": list(names)} for rule, names in plan.rules],
        "warnings": list(plan.warnings),
        "unaccounted": list(plan.unaccounted),
    }


def _layer(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    plan = checkpoint.plan.layers[name]
    scale, static = checkpoint.weight_scale(name), checkpoint.input_scale(name)
    return {
        "name": name,
        "scheme": plan.scheme.name,
        "shape": [plan.n, plan.k],
        "weight_scale": {
            "tensor": plan.weight_scale,
            "stored": f"{plan.scale_dtype} {list(plan.scale_shape)}",
            "min": float(scale.min()),
            "max": float(scale.max()),
        },
        "input_scale": None if static is None else float(static),
        "bias": plan.bias is not None,
        "extras": list(plan.extras),
    }


def _describe_source(path: str | Path) -> dict[str, Any]:
    source = open_source(path)
    dtypes: dict[str, int] = defaultdict(int)
    for spec in source.specs.values():
        dtypes[spec.dtype] += 1
    return {
        "path": str(path),
        "format": source.format,
        "model_type": source.config.get("model_type"),
        "tensors": len(source.specs),
        "dtypes": dict(dtypes),
        "layers": [],
        "unaccounted": [],
    }


def lines(found: dict[str, Any], every_layer: bool) -> list[str]:
    """The description for a person."""
    if "dtypes" in found:
        kinds = ", ".join(f"{count} {dtype}" for dtype, count in found["dtypes"].items())
        return [
            f"{found['path']}: {found['format']}, {found['model_type']}, not quantized to FP8",
            f"{console.counted(found['tensors'], 'tensor')}: {kinds}",
        ]
    head = f"{found['path']}: {found['format']} {found['algorithm']}".rstrip()
    by = f", written by {found['producer']}" if found["producer"] else ""
    out = [
        f"{head}{by}, {console.size(found['bytes'])}",
        f"{console.counted(len(found['layers']), 'FP8 layer')}, "
        f"{console.counted(found['plain'], 'tensor')} in 16 or 32 bits",
        f"KV cache: {found['kv_cache'] or '16 bits'}{_kv(found['kv_scales'])}",
        "",
    ]
    out += (_layer_table if every_layer else _kind_table)(found["layers"])
    out.append("")
    for entry in found["rules"]:
        names = entry["matched"]
        what = console.counted(len(names), "module")
        what += f" ({', '.join(names[:3])}{', ...' * (len(names) > 3)})"
        out.append(f"ignore rule {entry['rule']!r} matched {what if names else 'nothing'}")
    for kind, count in found["optional"].items():
        out.append(f"{count} {kind} kept for saving, not used by linears")
    if found["unaccounted"]:
        out.append(f"{console.counted(len(found['unaccounted']), 'tensor')} without a place:")
        out += [f"  {name}" for name in found["unaccounted"][:20]]
    else:
        out.append(f"every one of {found['tensors']} tensors is accounted for")
    return out


def _kv(scales: list[dict[str, str]]) -> str:
    if not scales:
        return ""
    first = scales[0]
    count = console.counted(len(scales), "scale")
    return f", {count}; SGLang and vLLM call {first['tensor']} {first['sglang']}"


def _kind_table(layers: list[dict[str, Any]]) -> list[str]:
    """A row for layers of one name, scheme and shape, whatever block of the model they are in."""
    kinds: dict[tuple[str, str, tuple[int, ...]], list[dict[str, Any]]] = defaultdict(list)
    for layer in layers:
        leaf = ".".join(part for part in layer["name"].split(".")[-2:] if not part.isdigit())
        kinds[leaf, layer["scheme"], tuple(layer["shape"])].append(layer)
    rows = []
    for (leaf, scheme, (n, k)), group in kinds.items():
        inputs = [layer["input_scale"] for layer in group if layer["input_scale"] is not None]
        rows.append(
            [
                leaf,
                scheme,
                str(len(group)),
                f"{n}x{k}",
                _range(
                    min(layer["weight_scale"]["min"] for layer in group),
                    max(layer["weight_scale"]["max"] for layer in group),
                ),
                _range(min(inputs), max(inputs)) if inputs else "-",
            ]
        )
    header = ["layer", "scheme", "count", "N x K", "weight scale", "input scale"]
    return console.table(header, rows, left=2).splitlines()


def _layer_table(layers: list[dict[str, Any]]) -> list[str]:
    rows = [
        [
            layer["name"],
            layer["scheme"],
            "{}x{}".format(*layer["shape"]),
            layer["weight_scale"]["stored"],
            _range(layer["weight_scale"]["min"], layer["weight_scale"]["max"]),
            "-" if layer["input_scale"] is None else f"{layer['input_scale']:.4g}",
        ]
        for layer in layers
    ]
    header = ["layer", "scheme", "N x K", "scale stored as", "weight scale", "input scale"]
    return console.table(header, rows, left=2).splitlines()


def _range(low: float, high: float) -> str:
    return f"{low:.4g}" if low == high else f"{low:.4g} .. {high:.4g}"


def command(path: str, *, layers: bool, dynamic_fallback: bool, as_json: bool) -> None:
    """The verb. Exit status 1 when a tensor has no place."""
    found = describe(path, dynamic_fallback=dynamic_fallback)
    for warning in found.get("warnings", []):
        console.talk(f"warning: {warning}")
    if as_json:
        console.data_json(found)
    else:
        for line in lines(found, layers):
            console.data(line)
    if found["unaccounted"]:
        raise typer.Exit(1)
