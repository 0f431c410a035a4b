"""anyfp8 tune MODEL|N,K..."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anyfp8.cli.options import Json


def tune(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="Checkpoint folder, GGUF file, config.json, a name such as qwen3-8b, or N,K."
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="cuda:0,1 of this machine; with --dry-run any GPU  [default: all here]"),
    ] = None,
    effort: Annotated[
        str,
        typer.Option(help="full: 25 configurations a cell; quick: 12; none: show the ranker."),
    ] = "full",
    m: Annotated[
        str | None, typer.Option("--m", help="Rows, such as 1,16,4096  [default: 21 to 8192]")
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="One rank of so many.")] = 1,
    scheme: Annotated[
        str | None,
        typer.Option(help="Of shapes and 16-bit models; A,B for both  [default: fp8-channel]"),
    ] = None,
    op: Annotated[
        str | None, typer.Option(help="gemm, or linear: quantization included  [default: both]")
    ] = None,
    missed: Annotated[
        Path | None, typer.Option(help="Shapes that ANYFP8_RECORD_MISSED recorded.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="What would be timed, how long. Needs no GPU.")
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="The same, with every first candidate.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(help="Table, or its folder  [default: ANYFP8_TABLE_DIR, else user data]"),
    ] = None,
    peers: Annotated[
        Path | None, typer.Option(help="Folder with other libraries to time beside: see bench.")
    ] = None,
    json: Json = False,
) -> None:
    """Find the fastest kernels for a model's layers on this machine's GPUs.

    Every candidate is checked and has a time limit. Rows are written as they are won; a run that
    was killed goes on where it was when it is started again. Exit status 1 where a candidate
    computes a wrong product, or a row is missing.
    """
    from anyfp8.tools import tune_command as tool

    tool.command(
        models or [],
        device=device,
        effort=effort,
        m=m,
        tp=tp,
        scheme=scheme,
        op=op,
        missed=missed,
        dry_run=dry_run,
        explain=explain,
        output=output,
        peers=peers,
        as_json=json,
    )
