"""anyfp8 quantize: a 16-bit model, or an FP8 one, becomes an FP8 checkpoint on disk.

Dynamic and weight-only schemes stream: a tensor at a time, no model in memory. Static schemes load
the 16-bit model once to calibrate, free it, and then stream the same way.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from anyfp8.checkpoint import (
    QuantizeReport,
    RecastReport,
    Source,
    check_output,
    is_quantized,
    open_checkpoint,
    open_source,
    quantize_stream,
    recast,
)
from anyfp8.checkpoint.formats import formats_for
from anyfp8.checkpoint.layouts import choose_layout
from anyfp8.errors import AnyFp8Error, InputError
from anyfp8.integrations.experts import place_experts
from anyfp8.integrations.transformers import (
    load,
    load_tokenizer,
    quantizable,
    skeleton,
    usable_device,
)
from anyfp8.linear.calibrate import input_scales
from anyfp8.problem import Scheme
from anyfp8.tools import console
from anyfp8.tools.texts import read_text, windows

ALIASES = {
    "fp8": "w8a8-tensor-static",
    "fp8-static": "w8a8-tensor-static",
    "fp8-channel": "w8a8-channel-token",
    "fp8-block": "w8a16-block128x128",
}


def parse_scheme(name: str) -> Scheme:
    """A scheme by its canonical name or a short one (`ALIASES`). Raises InputError for others."""
    return Scheme.parse(ALIASES.get(name, name))


def quantize_checkpoint(
    model: str | Path,
    out: str | Path,
    *,
    scheme: Scheme | str = "w8a8-tensor-static",
    calib: str | Path | Sequence[torch.Tensor] | None = None,
    calib_windows: int = 16,
    calib_length: int = 512,
    exclude: Iterable[str] = ("lm_head",),
    format: str | None = None,
    device: torch.device | str | None = None,
    shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
) -> QuantizeReport:
    """Quantize a 16-bit checkpoint and write it, in ModelOpt's layout where that can hold it.

    Args:
        model: a Hugging Face folder in bf16, fp16 or fp32, or a GGUF file; never changed.
        out: folder to write; absent or empty unless `overwrite`.
        scheme: a `Scheme`, its name, or one of `ALIASES`.
        calib: for static schemes: a UTF-8 text file, token windows [B, T] int64, or None for the
            built-in text.
        calib_windows, calib_length: windows of a text, and tokens in each.
        exclude: layers left in 16 bits; rules as in a checkpoint's ignore list.
        format: "modelopt", "compressed-tensors" or "finegrained"; None takes the first that can.
        device: where calibration runs; a GPU if there is one.
        shard_bytes: largest shard.
        overwrite: replace a folder that holds something, once the new one is complete.

    Returns:
        What was quantized and what was left.

    Raises:
        InputError, CheckpointError, CalibrationError: before anything is written at `out`.
    """
    if not isinstance(scheme, Scheme):
        scheme = parse_scheme(scheme)
    exclude = list(exclude)
    # a layout that cannot hold the scheme is known before anything is read
    format = choose_layout([scheme], format)
    source = open_source(model)
    check_output(out, overwrite=overwrite)
    where = usable_device(device)
    names = _linears(source, exclude)
    scales = None
    if scheme.activation == "tensor" and not scheme.dynamic:
        scales = _calibrate(model, names, calib, calib_windows, calib_length, where, exclude)
        # the 16-bit model is gone from here on; give its memory back before streaming
        gc.collect()
    with console.progress(f"quantizing to {scheme.name}") as shown:
        return quantize_stream(
            source,
            out,
            scheme,
            input_scales=scales,
            exclude=exclude,
            modules=names,
            format=format,
            shard_bytes=shard_bytes,
            progress=lambda done, total: shown.step(done, f"of {total} tensors"),
            overwrite=overwrite,
        )


def _linears(source: Source, exclude: list[str]) -> list[str] | None:
    """The model's own linears where transformers knows the model; None lets the names decide."""
    try:
        model = skeleton(source.config)
        place_experts(model, source.specs)
    except AnyFp8Error as error:
        console.talk(f"warning: {error.what}; linear layers are told by their names")
        return None
    return quantizable(model, exclude)


def _calibrate(
    path: str | Path,
    names: list[str] | None,
    calib: str | Path | Sequence[torch.Tensor] | None,
    count: int,
    length: int,
    device: torch.device,
    exclude: list[str],
) -> dict[str, float]:
    if calib is None or isinstance(calib, (str, Path)):
        text, title = read_text(calib)
        batches = windows(load_tokenizer(path), text, length, count, from_middle=True)
        title = f"{len(batches)} x {batches[0].shape[1]} tokens of {title}"
    else:
        batches = list(calib)
        title = f"{len(batches)} batches of the caller's tokens"
    if not batches:
        raise InputError(
            "no calibration data",
            got="0 batches",
            want="at least one [B, T] tensor",
            hint="calib=None takes a built-in text",
        )
    with console.progress("loading the 16-bit model"):
        model: Any = load(path, device=device)
    chosen = names if names is not None else quantizable(model, exclude)
    modules = {name: model.get_submodule(name) for name in chosen}
    with console.progress(f"calibrating {len(modules)} layers on {title}", len(batches)) as shown:
        return input_scales(model, modules, (b.to(device) for b in batches), shown.step)


def recast_checkpoint(
    model: str | Path,
    out: str | Path,
    *,
    format: str | None = None,
    scheme: Scheme | str | None = None,
    requantize: bool = False,
    shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
) -> RecastReport:
    """Write an FP8 checkpoint in another layout or scheme; arguments and errors as `recast`'s.

    Raises:
        InputError: `model` is not quantized.
    """
    if not is_quantized(model):
        raise InputError(
            f"{model} is not an FP8 checkpoint",
            want="an FP8 checkpoint folder with --from-fp8",
            hint="leave --from-fp8 out to quantize a 16-bit model",
            got="weights in 16 or 32 bits",
        )
    if scheme is not None and not isinstance(scheme, Scheme):
        scheme = parse_scheme(scheme)
    checkpoint = open_checkpoint(model)
    with console.progress("converting") as shown:
        return recast(
            checkpoint,
            out,
            format=format,
            scheme=scheme,
            requantize=requantize,
            shard_bytes=shard_bytes,
            progress=lambda done, total: shown.step(done, f"of {total} layers"),
            overwrite=overwrite,
        )


def command(
    model: str,
    out: Path,
    *,
    scheme: str | None,
    as_json: bool,
    calib: Path | None,
    format: str | None,
    from_fp8: bool,
    requantize: bool,
    shard_bytes: int,
    overwrite: bool,
    **options: Any,
) -> None:
    """The verb: quantize, then say what was written and what to do with it."""
    if from_fp8:
        converted = recast_checkpoint(
            model,
            out,
            format=format,
            scheme=scheme,
            requantize=requantize,
            shard_bytes=shard_bytes,
            overwrite=overwrite,
        )
        _tell_recast(converted, out, as_json)
        return
    if requantize:
        raise InputError("--requantize without --from-fp8", hint="add --from-fp8")
    report = quantize_checkpoint(
        model,
        out,
        scheme=scheme or "fp8",
        calib=calib,
        format=format,
        shard_bytes=shard_bytes,
        overwrite=overwrite,
        **options,
    )
    if as_json:
        console.data_json(asdict(report))
        return
    if format is None and "modelopt" not in formats_for(Scheme.parse(report.scheme)):
        console.talk(
            f"layout {report.format}: ModelOpt's has no algorithm for {report.scheme} (--format)"
        )
    ratio = report.bytes_out / report.bytes_in
    console.data(
        f"{len(report.layers)} linear layers in {report.scheme}, "
        f"{console.size(report.bytes_in)} -> {console.size(report.bytes_out)} ({ratio:.0%})"
    )
    for name, why in report.excluded[:5]:
        console.data(f"left in 16 bits: {name} ({why})")
    if len(report.excluded) > 5:
        console.data(f"left in 16 bits: {len(report.excluded) - 5} more")
    for rule in report.unmatched_rules:
        console.talk(f"warning: --exclude {rule} matched no layer")
    console.talk(f"next: anyfp8 run {out} -p 'What is FP8?'")


def _tell_recast(report: RecastReport, out: Path, as_json: bool) -> None:
    if as_json:
        console.data_json(asdict(report))
        return
    schemes = ", ".join(f"{count} in {name}" for name, count in report.schemes.items())
    console.data(
        f"{report.source_format} -> {report.format}: {schemes}, "
        f"{console.size(report.bytes_in)} -> {console.size(report.bytes_out)}"
    )
    console.data(f"{console.counted(report.exact, 'layer')} with every code as it was")
    if report.requantized:
        console.data(
            f"{console.counted(len(report.requantized), 'layer')} quantized again, "
            f"relative error {report.relative_error:.2e}"
        )
    console.talk(f"next: anyfp8 run {out} -p 'What is FP8?'")
