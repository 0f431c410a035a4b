"""16-bit source -> FP8 checkpoint on disk, one tensor at a time.

Memory: one 16-bit tensor, its codes, and fp32 copies of a slice of rows; the model is never held.
Slices change no byte: a per-tensor scale takes its amax over all of them first, channels and blocks
do not cross them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from anyfp8 import reference
from anyfp8.checkpoint.files import FLOATS, TensorSpec
from anyfp8.checkpoint.layouts import LAYOUTS, choose_layout
from anyfp8.checkpoint.linears import not_linear
from anyfp8.checkpoint.rules import RuleSet
from anyfp8.checkpoint.sources import Source, write_json
from anyfp8.checkpoint.writer import SHARD_BYTES, CheckpointWriter, check_output
from anyfp8.errors import CalibrationError, CheckpointError, InputError
from anyfp8.problem import QTensor, Scheme

# 4 MB in fp32: small beside a tensor worth streaming, large beside the cost of a call
_SLICE_VALUES = 1 << 20


@dataclass(frozen=True)
class QuantizeReport:
    """What `quantize_stream` wrote.

    Attributes:
        out: the folder.
        format, algorithm: of the checkpoint, in the format's own word.
        scheme: name of the layers' scheme.
        layers: names of the quantized linears.
        excluded: (module, why) of each weight of two or more dimensions that stayed in 16 bits.
        unmatched_rules: exclude rules that matched nothing.
        bytes_in, bytes_out: of all tensors.
        seconds: wall time.
    """

    out: str
    format: str
    algorithm: str
    scheme: str
    layers: tuple[str, ...]
    excluded: tuple[tuple[str, str], ...]
    unmatched_rules: tuple[str, ...]
    bytes_in: int
    bytes_out: int
    seconds: float


def quantize_stream(
    source: Source,
    out: str | Path,
    scheme: Scheme,
    *,
    input_scales: Mapping[str, float] | None = None,
    exclude: Iterable[str] = ("lm_head",),
    modules: Iterable[str] | None = None,
    format: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
    overwrite: bool = False,
) -> QuantizeReport:
    """Quantize a model and write it as a checkpoint.

    Args:
        source: of `open_source`; never changed.
        out: folder to write; absent or empty, unless `overwrite`.
        scheme: of every layer.
        input_scales: module -> static activation scale, required by static schemes.
        exclude: rules of linears left in 16 bits, as in a checkpoint's ignore list.
        modules: exactly the linears to quantize, `exclude` still applied; None decides by name and
            shape.
        format: a name of `layouts.LAYOUTS`; None takes ModelOpt's, or the first that can.
        shard_bytes: largest shard.
        progress: called with (tensors done, tensors in all).
        overwrite: replace a folder that holds something, once the new one is complete.

    Raises:
        InputError: a scheme that the format cannot hold, a module that is no 2-D weight, or nothing
            left to quantize.
        CalibrationError: layers without a usable input scale.
        CheckpointError: weights that are not finite, or a folder or disk that does not take it.
    """
    started = time.perf_counter()
    exclude = list(exclude)
    format = choose_layout([scheme], format)
    layout = LAYOUTS[format]
    check_apart(source.path, check_output(out, overwrite=overwrite))
    chosen, excluded, unmatched = choose_linears(source, exclude, modules)
    scales = _static_scales(chosen, scheme, input_scales)
    # what reads this layout keeps scales in the model's own dtype
    narrow = format == "compressed-tensors" and scheme.scale_format == "float32"
    scale_dtype = _narrowest(source, chosen) if narrow else None
    scales = {name: rounded_scale(scale, scale_dtype) for name, scale in scales.items()}
    specs: list[TensorSpec] = []
    for spec in source.specs.values():
        module = spec.name.removesuffix(".weight")
        if spec.name.endswith(".weight") and module in chosen:
            specs += layout.layer_specs(module, scheme, *spec.shape)
        else:
            specs.append(spec)
    ignore = {name for name, _ in excluded} | ({"lm_head"} if _tied(source) else set())
    flat, nested = layout.quantization_configs(dict.fromkeys(chosen, scheme), ignore)
    with CheckpointWriter(out, specs, shard_bytes=shard_bytes, overwrite=overwrite) as writer:
        source.write_sidecars(writer.folder)
        write_json(writer.folder / "config.json", {**source.config, "quantization_config": flat})
        if nested:
            write_json(writer.folder / "hf_quant_config.json", nested)
        for done, name in enumerate(source.specs, 1):
            module = name.removesuffix(".weight")
            if name.endswith(".weight") and module in chosen:
                weight = quantize_rows(name, source.tensor(name), scheme, scale_dtype)
                for key, tensor in layout.layer_tensors(
                    module, scheme, weight, scales.get(module)
                ).items():
                    writer.add(key, tensor)
                del weight
            else:
                writer.add(name, source.tensor(name))
            if progress:
                progress(done, len(source.specs))
    return QuantizeReport(
        out=str(out),
        format=format,
        algorithm=layout.algorithm_for(scheme),
        scheme=scheme.name,
        layers=tuple(chosen),
        excluded=tuple(excluded),
        unmatched_rules=tuple(unmatched),
        bytes_in=sum(spec.nbytes for spec in source.specs.values()),
        bytes_out=writer.nbytes,
        seconds=time.perf_counter() - started,
    )


def choose_linears(
    source: Source, exclude: list[str], modules: Iterable[str] | None = None
) -> tuple[list[str], list[tuple[str, str]], list[str]]:
    """The linears to quantize, (module, why) of other weights, and rules that matched nothing.

    Raises:
        InputError: a named module that is no 2-D floating-point weight, or nothing to quantize.
    """
    rules = RuleSet(exclude)
    wanted = None if modules is None else dict.fromkeys(modules)
    chosen: list[str] = []
    excluded: list[tuple[str, str]] = []
    used: set[str] = set()
    candidates: set[str] = set()
    for spec in source.specs.values():
        if spec.dtype not in FLOATS or len(spec.shape) < 2:
            continue
        if not spec.name.endswith(".weight") or len(spec.shape) != 2:
            excluded.append((spec.name.removesuffix(".weight"), f"{len(spec.shape)}-D tensor"))
            continue
        module = spec.name.removesuffix(".weight")
        candidates.add(module)
        hits = rules.matching(module)
        used.update(rule.pattern for rule in hits)
        why = not_linear(spec.name, spec.shape) if wanted is None else ""
        if wanted is not None and module not in wanted:
            why = not_linear(spec.name, spec.shape) or "not in the list of modules"
        if hits:
            why = f"excluded by {hits[0].pattern!r}"
        if why:
            excluded.append((module, why))
        else:
            chosen.append(module)
    unknown = [name for name in wanted or () if name not in candidates]
    if unknown:
        raise InputError(
            f"cannot quantize {len(unknown)} of the named modules",
            got=f"{unknown[0]} has no 2-D weight in {source.path.name}",
            want="modules with a weight [N, K] in 16 or 32 bits",
        )
    if not chosen:
        raise InputError(
            f"0 of {len(candidates)} linear layers of {source.path.name} would be quantized",
            got=f"exclude {', '.join(map(repr, exclude)) or 'nothing'}",
            want="at least one linear layer",
            hint="loosen the exclude rules",
        )
    if _tied(source):
        used.update(rule.pattern for rule in rules.matching("lm_head"))
    return chosen, excluded, [p for p in dict.fromkeys(exclude) if p not in used]


def quantize_rows(
    name: str, w: torch.Tensor, scheme: Scheme, scale_dtype: torch.dtype | None = None
) -> QTensor:
    """`reference.quantize_weight` in slices of rows: the same bytes, little memory.

    Args:
        name: of the tensor, for messages. w: [N, K] fp32, bf16 or fp16.
        scale_dtype: round scales to a dtype before they are used, for readers that do.

    Raises:
        CheckpointError: w holds inf or NaN; names the index.
    """
    n, k = w.shape
    rows = max(1, _SLICE_VALUES // max(k, 1))
    if scheme.block is not None:
        rows = max(scheme.block[0], rows - rows % scheme.block[0])
    slices = [slice(i, i + rows) for i in range(0, n, rows)]
    amax = torch.zeros(())
    for part in slices:
        _refuse_non_finite(name, w[part], part.start)
        amax = torch.maximum(amax, reference.finite_amax(w[part]))
    codes = torch.empty(n, k, dtype=torch.uint8)
    scales = []
    single = reference.scale_of(amax) if scheme.weight == "tensor" else None
    if single is not None:
        single = rounded_scale(single, scale_dtype)
    for part in slices:
        if single is not None:
            q = reference.quantize_per_tensor(w[part], single)
        else:
            q = reference.quantize_weight(w[part], scheme)
            if scale_dtype is not None:
                q = _encoded_again(w[part], q, scale_dtype)
        codes[part] = q.codes
        scales.append(q.scale)
    return QTensor(codes, scales[0] if single is not None else torch.cat(scales), scheme.block)


def rounded_scale(scale: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Scales as a dtype holds them, in fp32; never zero."""
    if dtype is None:
        return scale
    return scale.to(dtype).float().clamp(min=torch.finfo(dtype).smallest_normal)


def _encoded_again(w: torch.Tensor, q: QTensor, dtype: torch.dtype) -> QTensor:
    scale = rounded_scale(q.scale, dtype)
    full = scale if q.block is None else reference.expand_scale(scale, q.block, w.shape)
    return QTensor(reference.quantize_with(w, full), scale, q.block)


def _refuse_non_finite(name: str, w: torch.Tensor, first_row: int) -> None:
    finite = w.isfinite()
    if bool(finite.all()):
        return
    row, column = (~finite).nonzero()[0].tolist()
    raise CheckpointError(
        f"cannot quantize the weight {name}",
        got=f"{float(w[row, column])} at [{first_row + row}, {column}]",
        want="finite values",
        hint="the 16-bit checkpoint is damaged: copy or download it again",
    )


def _static_scales(
    chosen: list[str], scheme: Scheme, input_scales: Mapping[str, float] | None
) -> dict[str, torch.Tensor]:
    if scheme.activation != "tensor" or scheme.dynamic:
        return {}
    given = {name: float((input_scales or {}).get(name, float("nan"))) for name in chosen}
    bad = [name for name, value in given.items() if not 0 < value < float("inf")]
    if bad:
        raise CalibrationError(
            f"{len(bad)} of {len(chosen)} static layers have no input scale",
            got=f"{bad[0]}: {given[bad[0]] if input_scales else 'nothing'}",
            want="a finite positive scale for every layer",
            hint="calibrate on text that reaches every layer, or use a dynamic scheme",
        )
    return {name: torch.tensor(value, dtype=torch.float32) for name, value in given.items()}


def _narrowest(source: Source, chosen: Iterable[str]) -> torch.dtype | None:
    dtypes = {source.specs[f"{name}.weight"].dtype for name in chosen}
    return torch.bfloat16 if "BF16" in dtypes else torch.float16 if "F16" in dtypes else None


def _tied(source: Source) -> bool:
    return "lm_head.weight" not in source.specs and bool(source.config.get("tie_word_embeddings"))


def check_apart(source: Path, out: Path) -> None:
    """Refuse to write into, around or over the source. Raises CheckpointError."""
    source = source.absolute().resolve()
    folder = source if source.is_dir() else source.parent
    target = out.resolve()
    if (
        target == folder
        or target in folder.parents
        or (source.is_dir() and folder in target.parents)
    ):
        raise CheckpointError(
            f"{out} is or holds the source",
            got=f"source {source}",
            want="a folder apart from it",
            hint="name another folder",
        )
