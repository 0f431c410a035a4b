"""anyfp8 inspect MODEL."""

from __future__ import annotations

from typing import Annotated

import typer

from anyfp8.cli.options import DynamicFallback, Json


def inspect(
    model: Annotated[str, typer.Argument(help="Checkpoint folder, FP8 or 16-bit; or a GGUF file.")],
    layers: Annotated[bool, typer.Option(help="A line for every layer, with scales.")] = False,
    dynamic_fallback: DynamicFallback = False,
    json: Json = False,
) -> None:
    """What each layer is: scheme, shapes, scales."""
    from anyfp8.tools import inspect as tool

    tool.command(model, layers=layers, dynamic_fallback=dynamic_fallback, as_json=json)
