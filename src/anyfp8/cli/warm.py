"""anyfp8 warm MODEL|N,K --device GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anyfp8.cli.options import Exclude, Json


def warm(
    model: Annotated[
        str, typer.Argument(help="Checkpoint folder, GGUF file, config.json, or a shape N,K.")
    ],
    device: Annotated[
        str | None, typer.Option(help="GPU, such as h200, mi300x, sm_120  [default: this one]")
    ] = None,
    m: Annotated[
        str | None,
        typer.Option("--m", help="Rows, such as 1,16; or all  [default: 1 to 512, and above]"),
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="Folder for the kernels  [default: where Triton looks]")
    ] = None,
    scheme: Annotated[
        str | None, typer.Option(help="Of a shape or a 16-bit model  [default: fp8-channel]")
    ] = None,
    exclude: Exclude = None,
    fused: Annotated[
        bool, typer.Option("--fused", help="q/k/v and gate/up in one, as engines run them.")
    ] = False,
    tp: Annotated[int, typer.Option(min=1, help="One rank of so many.")] = 1,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes that compile  [default: one a core]")
    ] = None,
    json: Json = False,
) -> None:
    """Compile every kernel that a model needs on a GPU, offline, into a folder.

    Needs no GPU and no weights. A process with the same Triton and Python that finds the folder
    (TRITON_CACHE_DIR) compiles nothing. Exit status 1 where a kernel does not compile.
    """
    from anyfp8.tools import warm as tool

    tool.command(
        model,
        device=device,
        ms=m,
        cache=cache,
        scheme=scheme,
        exclude=exclude or ["lm_head"],
        fuse=fused,
        tp=tp,
        workers=workers,
        as_json=json,
    )
