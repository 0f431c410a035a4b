"""anyfp8 eval MODEL."""

from __future__ import annotations

from typing import Annotated

import typer

from anyfp8.cli.options import Device, DynamicFallback, Json, Model, Text


def evaluate(
    model: Model,
    text: Text = None,
    source: Annotated[
        str | None, typer.Option(help="16-bit original: adds KL, top-1 and per-layer errors.")
    ] = None,
    windows: Annotated[int, typer.Option(help="Windows of text.")] = 8,
    length: Annotated[int, typer.Option(help="Tokens in a window.")] = 512,
    bound: Annotated[
        float | None,
        typer.Option(help="Largest relative error of a layer  [default: from fresh rounding]"),
    ] = None,
    scheme: Annotated[
        str | None, typer.Option(help="Quantize a 16-bit checkpoint while loading.")
    ] = None,
    device: Device = None,
    emulate: Annotated[
        str | None,
        typer.Option(
            help="w8a8: compute what a GPU's FP8 units would, where there are none; "
            "compressed-tensors, quark, modelopt: what that runtime computes, in its arithmetic."
        ),
    ] = None,
    dynamic_fallback: DynamicFallback = False,
    tasks: Annotated[
        str | None, typer.Option(help="Scores in lm-eval's tasks instead, such as gsm8k.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Questions of each task  [default: all]")
    ] = None,
    json: Json = False,
) -> None:
    """Perplexity, agreement with 16 bits, bad layers; or tasks."""
    options = {
        "source": source,
        "scheme": scheme,
        "device": device,
        "emulate": emulate,
        "dynamic_fallback": dynamic_fallback,
        "as_json": json,
    }
    if tasks is not None:
        from anyfp8.tools import tasks as scoring

        scoring.command(model, tasks=tasks, limit=limit, **options)
        return
    from anyfp8.tools import evaluate_command as tool

    tool.command(model, text=text, windows=windows, length=length, bound=bound, **options)
