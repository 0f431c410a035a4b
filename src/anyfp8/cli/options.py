"""The options that several verbs share, each worded once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Model = Annotated[str, typer.Argument(help="Checkpoint folder, or a GGUF file.")]
Device = Annotated[str | None, typer.Option(help="cuda, cuda:1, cpu; a GPU if there is one.")]
Emulate = Annotated[
    str | None,
    typer.Option(help="w8a8: compute what a GPU's FP8 units would, where there are none."),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(help="Layers left in 16 bits; names, globs or re:...  [default: lm_head]"),
]
DynamicFallback = Annotated[
    bool,
    typer.Option(
        "--dynamic-fallback", help="Quantize x dynamically where a static scale is unusable."
    ),
]
Text = Annotated[Path | None, typer.Option(help="UTF-8 text  [default: one that ships in Python]")]
