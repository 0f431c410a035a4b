"""anyfp8 explain MODEL|N,K --device GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anyfp8.cli.options import Exclude, Json


def explain(
    model: Annotated[
        str,
        typer.Argument(help="Checkpoint folder, GGUF file, config.json, qwen3-8b, or a shape N,K."),
    ],
    device: Annotated[
        list[str] | None,
        typer.Option(help="GPU, such as h200, mi300x, sm_120, cpu; repeat it  [default: this one]"),
    ] = None,
    m: Annotated[
        str | None, typer.Option("--m", help="Rows, such as 1,16; or all  [default: six of them]")
    ] = None,
    scheme: Annotated[
        str | None, typer.Option(help="Of a shape or a 16-bit model  [default: fp8-channel]")
    ] = None,
    exclude: Exclude = None,
    fused: Annotated[
        bool, typer.Option("--fused", help="q/k/v and gate/up in one, as engines run them.")
    ] = False,
    tp: Annotated[int, typer.Option(min=1, help="One rank of so many.")] = 1,
    accumulate: Annotated[str, typer.Option(help="auto, fast or fp32_128.")] = "auto",
    compile: Annotated[
        bool, typer.Option("--compile", help="Compile each kernel: registers, shared memory.")
    ] = False,
    estimate: Annotated[
        bool, typer.Option(help="Estimate the times that are not measured.")
    ] = True,
    html: Annotated[Path | None, typer.Option(help="Write one page: layers x GPUs.")] = None,
    json: Json = False,
) -> None:
    """Which kernel serves each layer on a GPU, and why.

    Needs no GPU and no weights. Times are estimates unless a tuned table has measured them; their
    known error is printed. Exit status 1 where something cannot be served there.
    """
    from anyfp8.tools import explain as tool

    tool.command(
        model,
        devices=device or [],
        ms=m,
        scheme=scheme,
        exclude=exclude or ["lm_head"],
        fuse=fused,
        tp=tp,
        accumulate=accumulate,
        compiles=compile,
        estimates=estimate,
        html=html,
        as_json=json,
    )
