"""anyfp8 quantize: a 16-bit model becomes an FP8 checkpoint on disk.

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
    Source,
    check_output,
    open_source,
    quantize_stream,
)
from anyfp8.errors import AnyFp8Error, InputError
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
    device: torch.device | str | None = None,
    shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
) -> QuantizeReport:
    """Quantize a 16-bit checkpoint and write it in the ModelOpt layout.

    Args:
        model: a Hugging Face folder in bf16, fp16 or fp32, or a GGUF file; never changed.
        out: folder to write; absent or empty unless `overwrite`.
        scheme: a `Scheme`, its name, or one of `ALIASES`.
        calib: for static schemes: a UTF-8 text file, token windows [B, T] int64, or None for the
            built-in text.
        calib_windows, calib_length: windows of a text, and tokens in each.
        exclude: layers left in 16 bits; rules as in a checkpoint's ignore list.
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
            shard_bytes=shard_bytes,
            progress=lambda done, total: shown.step(done, f"of {total} tensors"),
            overwrite=overwrite,
        )


def _linears(source: Source, exclude: list[str]) -> list[str] | None:
    """The model's own linears where transformers knows the model; None lets the names decide."""
    try:
        model = skeleton(source.config)
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
        raise InputError("no calibration data", got="0 batches", want="at least one [B, T] tensor")
    with console.progress("loading the 16-bit model"):
        model: Any = load(path, device=device)
    chosen = names if names is not None else quantizable(model, exclude)
    modules = {name: model.get_submodule(name) for name in chosen}
    with console.progress(f"calibrating {len(modules)} layers on {title}", len(batches)) as shown:
        return input_scales(model, modules, (b.to(device) for b in batches), shown.step)


def command(
    model: str, out: Path, *, scheme: str, as_json: bool, calib: Path | None, **options: Any
) -> None:
    """The verb: quantize, then say what was written and what to do with it."""
    report = quantize_checkpoint(model, out, scheme=scheme, calib=calib, **options)
    if as_json:
        console.data_json(asdict(report))
        return
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
