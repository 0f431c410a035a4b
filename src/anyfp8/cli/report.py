"""anyfp8 report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anyfp8.cli.options import Json


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="One run: shown. Two: the second compared to the first.")
    ],
    html: Annotated[Path | None, typer.Option(help="Write one page with plots.")] = None,
    noise: Annotated[float, typer.Option(help="Share below which a change is none.")] = 0.04,
    anchored: Annotated[
        bool, typer.Option("--anchored", help="Divide by what the peers' times changed.")
    ] = False,
    json: Json = False,
) -> None:
    """What a benchmark or the tuner wrote; exit status 1 when the second run is slower."""
    from anyfp8.tools import report_command as tool

    tool.command(runs, html=html, noise=noise, anchored=anchored, as_json=json)
