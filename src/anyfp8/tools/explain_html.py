"""Explanations → one self-contained HTML page: layers down, GPUs across, for a wall or a browser.

Everything is inline: no script, no font, no image is fetched. Colour repeats what the text says, so
that it reads in black and white.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from importlib import resources
from typing import Any

import jinja2

from anyfp8 import __version__
from anyfp8.select import Choice
from anyfp8.tools import explain_text
from anyfp8.tools.explain import Explanation, Kind, Run

# hues far apart, also for most colour-blind readers; text is always dark on a light ground
_HUES = {
    "cutlass": 205,
    "torch_scaled_mm": 28,
    "triton_row": 150,
    "triton_block": 175,
    "triton_w8a16": 265,
    "marlin": 300,
    "deep_gemm": 230,
    "flashinfer": 340,
    "dequant": 0,
}


def page(found: Sequence[Explanation], today: date | None = None) -> str:
    """The page of one model on one or more GPUs."""
    source = resources.files("anyfp8.tools").joinpath("templates/explain.html").read_text("utf-8")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    first = found[0]
    rows = [
        {"kind": _kind(kind), "cells": [_cell(one.kinds[i]) for one in found]}
        for i, kind in enumerate(first.kinds)
    ]
    totals = [
        {"m": m, "cells": [_total(one, m) for one in found]}
        for m in first.ms
        if any(one.forward_us(m) is not None for one in found)
    ]
    used = {r.choice.backend for one in found for k in one.kinds for r in k.runs}
    return environment.from_string(source).render(
        model=first.model,
        gpus=[_gpu(one) for one in found],
        rows=rows,
        totals=totals,
        hues={name: _HUES.get(name, 60) for name in sorted(used)},
        errors=sorted({text for one in found for text in explain_text.errors_of(one)}),
        version=__version__,
        today=(today or date.today()).isoformat(),
    )


def _gpu(one: Explanation) -> dict[str, Any]:
    facts, *how = explain_text.facts(one)
    refused = [
        (backend, why, "" if len(names) == len(one.kinds) else ", ".join(names))
        for backend, why, names in one.refused
    ]
    return {
        "name": one.device.name,
        "arch": one.device.arch.name,
        "size": facts,
        "how": how,
        "tables": one.tables,
        "trouble": one.trouble,
        "refused": refused,
    }


def _kind(kind: Kind) -> dict[str, Any]:
    layer = kind.layer
    return {
        "name": kind.name,
        "shape": f"{layer.n} × {layer.k}{' + bias' if layer.bias else ''}",
        "scheme": layer.scheme.name,
        "count": kind.count,
    }


def _cell(kind: Kind) -> list[dict[str, Any]]:
    return [_run(run) for run in kind.runs]


def _run(run: Run) -> dict[str, Any]:
    ms = run.ms
    return {
        "m": str(ms[0]) if len(ms) == 1 else f"{ms[0]}–{ms[-1]}",
        "backend": run.choice.backend,
        "us": _times(run),
        "source": run.choice.source,
        "reason": run.choice.reason,
        "config": _config(run.choice),
        "resources": None if run.resources is None else str(run.resources),
        "fits": run.resources is None or run.resources.fits,
    }


def _times(run: Run) -> str:
    text = explain_text.times(run).replace(" part est.", "").removesuffix(" est.")
    how = {"no": "", "product": ", product measured", "yes": ", measured"}[run.measured]
    return text.replace("..", "–") + how


def _config(choice: Choice) -> str:
    """A tile in the words of its readers; other configurations as they are."""
    fields = choice.config.to_dict()
    if "block_m" not in fields or fields.get("how") == "chunked":
        return explain_text.config_of(choice)
    tile = "×".join(str(fields.pop(f"block_{side}")) for side in "mnk")
    how, warps, stages = fields.pop("how", ""), fields.pop("num_warps"), fields.pop("num_stages")
    first = ["weight first"] if fields.pop("swap", False) else []
    # 1 is "not split"
    rest = [f"{name} {value}" for name, value in fields.items() if value != 1] + first
    return ", ".join([f"{how} {tile}".strip(), f"{warps} warps", f"{stages} stages", *rest])


def _total(one: Explanation, m: int) -> str:
    us = one.forward_us(m)
    if us is None:
        return "–"
    return f"{explain_text.figure(us / 1e3)} ms, {explain_text.figure(us / m)} µs a token"
