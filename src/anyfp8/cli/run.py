"""anyfp8 run MODEL -p TEXT."""

from __future__ import annotations

from typing import Annotated

import typer

from anyfp8.cli.options import Device, DynamicFallback, Emulate, Json, Model


def run(
    model: Model,
    prompt: Annotated[str, typer.Option("-p", "--prompt", help="What to say to the model.")],
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 64,
    scheme: Annotated[
        str | None, typer.Option(help="Quantize a 16-bit checkpoint while loading.")
    ] = None,
    raw: Annotated[bool, typer.Option(help="Continue the text; no chat template.")] = False,
    device: Device = None,
    emulate: Emulate = None,
    dynamic_fallback: DynamicFallback = False,
    backend: Annotated[str | None, typer.Option(help="Force one backend.")] = None,
    json: Json = False,
) -> None:
    """Load a checkpoint and generate text."""
    from anyfp8.tools import run as tool

    tool.command(
        model,
        prompt,
        max_tokens=max_tokens,
        scheme=scheme,
        raw=raw,
        device=device,
        emulate=emulate,
        dynamic_fallback=dynamic_fallback,
        backend=backend,
        as_json=json,
    )
