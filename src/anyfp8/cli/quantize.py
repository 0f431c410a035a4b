"""anyfp8 quantize MODEL OUT."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anyfp8.cli.options import Device, Exclude, Json, Text


def quantize(
    model: Annotated[str, typer.Argument(help="16-bit checkpoint folder, or a GGUF file.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; must be empty or absent.")],
    scheme: Annotated[
        str | None,
        typer.Option(help="fp8 (static), fp8-channel, fp8-block, or a full name  [default: fp8]"),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(help="modelopt, compressed-tensors, finegrained  [default: first that can]"),
    ] = None,
    from_fp8: Annotated[
        bool, typer.Option("--from-fp8", help="Convert an FP8 checkpoint, codes as they are.")
    ] = False,
    requantize: Annotated[
        bool, typer.Option("--requantize", help="With --from-fp8: what cannot stay, lossy.")
    ] = False,
    calib: Text = None,
    calib_windows: Annotated[int, typer.Option(help="Calibration windows.")] = 16,
    calib_length: Annotated[int, typer.Option(help="Tokens in a calibration window.")] = 512,
    exclude: Exclude = None,
    device: Device = None,
    shard_size: Annotated[float, typer.Option(help="Largest shard, GB.")] = 5.0,
    overwrite: Annotated[bool, typer.Option(help="Replace the folder when done.")] = False,
    json: Json = False,
) -> None:
    """Write an FP8 checkpoint of a 16-bit model.

    Schemes: fp8 = w8a8-tensor-static (calibrated), fp8-channel = w8a8-channel-token,
    fp8-block = w8a16-block128x128. The layout is ModelOpt's where it holds the scheme.
    """
    from anyfp8.tools import quantize as tool

    tool.command(
        model,
        out,
        scheme=scheme,
        format=format,
        from_fp8=from_fp8,
        requantize=requantize,
        calib=calib,
        calib_windows=calib_windows,
        calib_length=calib_length,
        exclude=exclude or ["lm_head"],
        device=device,
        shard_bytes=round(shard_size * 1e9),
        overwrite=overwrite,
        as_json=json,
    )
