"""anyfp8 eval: what a person reads of `evaluate`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import typer

from anyfp8.integrations.transformers import load_tokenizer
from anyfp8.tools import console
from anyfp8.tools.evaluate import Agreement, LayerError, agreement, layer_errors
from anyfp8.tools.run import emulation, load_model, serving
from anyfp8.tools.runtimes import RUNTIMES, emulate_runtime
from anyfp8.tools.texts import read_text
from anyfp8.tools.texts import windows as cut

# windows for the per-layer comparison: relative errors settle within one
LAYER_WINDOWS = 2


def command(
    path: str,
    *,
    text: Path | None,
    source: str | None,
    windows: int,
    length: int,
    bound: float | None,
    scheme: str | None,
    device: str | None,
    emulate: str | None,
    dynamic_fallback: bool,
    as_json: bool,
) -> None:
    """The verb. Exit status 1 when a layer is past its bound or the perplexity is not finite."""
    runtime = emulate if emulate in RUNTIMES else None
    # what the layers' own errors are compared with quantizes activations too
    emulated = runtime is not None or emulation(emulate, RUNTIMES)
    content, title = read_text(text)
    pieces = cut(load_tokenizer(path), content, length, windows)
    model = load_model(
        path,
        device=device,
        scheme=scheme,
        emulate=emulated,
        dynamic_fallback=dynamic_fallback,
        title=f"loading {path}",
    )
    original = None
    if source is not None:
        original = load_model(source, device=device, title=f"loading {source}")
    served = serving(model) if runtime is None else [emulate_runtime(model, runtime)]
    for line in served:
        console.talk(line)
    with console.progress(f"reading {len(pieces)} windows of {title}", len(pieces)) as shown:
        found = agreement(model, pieces, original, shown.step)
    layers: list[LayerError] = []
    if original is not None:
        with console.progress("comparing layers") as shown:
            layers = layer_errors(model, original, pieces[:LAYER_WINDOWS], bound, shown.step)
    suspects = [layer for layer in layers if layer.suspect]
    if as_json:
        document = {"text": title, "windows": len(pieces), "length": pieces[0].shape[1]}
        document |= asdict(found) | {"layers": [asdict(layer) for layer in layers]}
        first = suspects[0].name if suspects else None
        console.data_json(document | {"first_suspect": first, "served": served})
    else:
        for line in report(found, layers):
            console.data(line)
    if suspects or not math.isfinite(found.perplexity):
        raise typer.Exit(1)


def report(found: Agreement, layers: Sequence[LayerError]) -> list[str]:
    """The figures as lines of text."""
    lines = [f"perplexity        {found.perplexity:.3f}  ({found.tokens} tokens)"]
    if found.source_perplexity is not None:
        change = found.perplexity / found.source_perplexity - 1
        lines.append(f"16-bit perplexity {found.source_perplexity:.3f}  ({change:+.2%} in FP8)")
        lines.append(f"KL divergence     {found.kl:.5f} nats a token")
        lines.append(f"top-1 agreement   {found.top1:.2%}")
    if layers:
        lines += ["", *layer_report(layers)]
    return lines


def layer_report(layers: Sequence[LayerError], most: int = 5) -> list[str]:
    """The worst layers, and the first one past its bound."""
    worst = sorted(layers, key=lambda layer: -layer.error)[:most]
    rows = [
        [layer.name, f"{layer.error:.4f}", f"{layer.expected:.4f}", "suspect" * layer.suspect]
        for layer in worst
    ]
    header = ["layers with the largest error", "error", "fresh", ""]
    lines = console.table(header, rows).splitlines()
    suspects = [layer for layer in layers if layer.suspect]
    if not suspects:
        lines.append(f"all {len(layers)} layers err as fresh FP8 rounding does")
    else:
        first = suspects[0]
        lines.append(
            f"first layer past its bound: {first.name} errs {first.error:.4f}, "
            f"fresh rounding {first.expected:.4f} ({len(suspects)} of {len(layers)} are suspect)"
        )
    return lines
