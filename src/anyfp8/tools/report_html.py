"""A run → one self-contained HTML page: a plot and a table for each layer, worst cells first.

Nothing is fetched: no script, no font, no image. The tables hold every figure unrounded in a data
attribute beside the rounded one, so that a page can be checked against its file.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from anyfp8.tools import report_plot
from anyfp8.tools.report import RACED, Cell, Entry, Panel, Run
from anyfp8.tools.timing import geometric_mean

TITLES = {
    "gemm": "products of quantized operands",
    "linear": "linear layers, quantization included",
    "quantize": "activation quantizers",
    "decode": "a decoder stack",
    "table": "a tuned table",
}
WORST = 6


def page(run: Run) -> str:
    """The page of one run."""
    source = resources.files("anyfp8.tools").joinpath("templates/report.html").read_text("utf-8")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(source).render(
        title=TITLES.get(run.op, run.op),
        run=run,
        facts=facts(run),
        panels=[_panel(panel, i) for i, panel in enumerate(run.panels)],
        worst=worst(run),
        rivals=rivals(run),
        refusals=refusals(run),
    )


def facts(run: Run) -> list[tuple[str, str]]:
    """(name, value) of what the header says about machine, software and method."""
    head = run.header
    clocks = head.get("clocks_mhz") or {}
    roof = head.get("roof") or {}
    found = [
        ("GPU", run.gpu),
        ("date", head.get("date")),
        ("driver", head.get("driver")),
        ("torch", head.get("torch")),
        ("Triton", head.get("triton")),
        ("anyfp8", head.get("anyfp8")),
        ("what", run.about),
        ("SM clock", f"{clocks['sm']} of {clocks['max_sm']} MHz" if clocks else None),
        ("power limit", f"{head['power_limit_w']} W" if head.get("power_limit_w") else None),
        ("SMs", head.get("sms")),
        ("roof", _roof(roof) if roof else None),
        ("seed", head.get("seed")),
        ("method", head.get("method")),
        ("checked", head.get("checked")),
    ]
    return [(name, str(value)) for name, value in found if value not in (None, "")]


def _roof(roof: dict[str, Any]) -> str:
    return (
        f"copy {roof['copy_gbps']:.0f} GB/s, product {roof['tflops']:.0f} TFLOP/s, "
        f"empty kernel {roof['empty_us']:.2f} µs, measured in the same run"
    )


def worst(run: Run) -> list[dict[str, Any]]:
    """The cells in which ours stands worst against whoever was raced, worst first."""
    found = [
        {"panel": panel, "cell": cell, "entry": entry, "first": cell.first}
        for panel in run.panels
        for cell in panel.cells
        for entry in cell.entries
        if entry.role == RACED and entry.ratio is not None and cell.first is not None
    ]
    return sorted(found, key=lambda item: item["entry"].ratio[0])[:WORST]


def rivals(run: Run) -> list[dict[str, Any]]:
    """Each other contender: the geometric mean of its time / ours, and won, tie and lost cells."""
    entries: dict[str, list[Entry]] = {}
    for panel in run.panels:
        for cell in panel.cells:
            for entry in cell.entries:
                if entry.ratio is not None:
                    entries.setdefault(entry.name, []).append(entry)
    return [
        {
            "name": name,
            "role": found[0].role,
            "why": found[0].why,
            "cells": len(found),
            "mean": geometric_mean([e.ratio[0] for e in found if e.ratio is not None]),
            **{said: sum(e.verdict == said for e in found) for said in ("won", "tie", "lost")},
        }
        for name, found in entries.items()
    ]


def refusals(run: Run) -> list[tuple[str, str, str]]:
    """(name, why, where) of everyone without a figure, the wrong ones first."""
    found: dict[tuple[str, str, bool], list[str]] = {}
    for panel in run.panels:
        for cell in panel.cells:
            where = f"{panel.title}, {panel.x_label} = {cell.x}"
            for wrong, names in ((True, cell.wrong), (False, cell.refused)):
                for name, why in names.items():
                    found.setdefault((name, why, wrong), []).append(where)
    listed = [
        (name, f"{'wrong result: ' if wrong else ''}{why}", _where(places))
        for (name, why, wrong), places in sorted(found.items(), key=lambda item: not item[0][2])
    ]
    return [*listed, *((name, why, "the whole run") for name, why in run.missing.items())]


def _where(places: list[str]) -> str:
    return places[0] if len(places) == 1 else f"{len(places)} cells, first {places[0]}"


def _panel(panel: Panel, index: int) -> dict[str, Any]:
    columns = [
        {
            "name": name,
            "role": panel.role(name),
            "why": next(
                (e.why for c in panel.cells if (e := c.entry(name)) is not None and e.why), ""
            ),
            # our own escaping: the drawing is markup
            "swatch": Markup(report_plot.swatch(report_plot.style_of(panel, name))),
        }
        for name in panel.names
    ]
    plots = [report_plot.time_plot(panel), report_plot.share_plot(panel)]
    return {
        "panel": panel,
        "id": f"p{index}",
        "columns": columns,
        "plots": [Markup(plot) for plot in plots if plot],
        "rows": [_row(panel, cell) for cell in panel.cells],
        "has_floor": any(cell.floor_us for cell in panel.cells),
    }


def _row(panel: Panel, cell: Cell) -> dict[str, Any]:
    first = cell.first
    return {
        "cell": cell,
        "first": first,
        "entries": [(name, cell.entry(name)) for name in panel.names],
        "missing": {**cell.refused, **{n: f"wrong: {why}" for n, why in cell.wrong.items()}},
    }
