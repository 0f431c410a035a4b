"""What `anyfp8 tune --dry-run` says: which cells, which candidates, how long, into which file.

Needs no GPU. Where cores are few, compiling takes longer than timing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from anyfp8 import gemm
from anyfp8.device import Device
from anyfp8.gemm.base import Config
from anyfp8.select import Request
from anyfp8.select.predict import estimate
from anyfp8.select.selection import select
from anyfp8.tools import console
from anyfp8.tools.tune_cells import Cell, Shape, space_of, willing
from anyfp8.tools.tune_compile import cores
from anyfp8.tools.tune_contest import Contest
from anyfp8.tools.tune_search import Effort

# seconds on an H200: until the first is timed, one configuration, a race and what a row adds to it;
# compiling one on a core, and how their number grows with the cells, which share most of them
_START_S, _TIMING_S, _RACE_S, _ROW_S = 20.0, 0.016, 0.22, 2.3e-4
_COMPILE_S, _GROWTH = 1.4, 0.7


def seconds_of(cells: Sequence[Cell], device: Device, effort: Effort) -> float:
    """About how long a run takes on one GPU with the cores here."""
    if not cells:
        return 0.0
    alike: dict[tuple[object, ...], list[Cell]] = {}
    for cell in cells:
        alike.setdefault((cell.scheme, cell.dtype), []).append(cell)
    timing = forms = 0.0
    for some in alike.values():
        contest = Contest(some[0], device, {}, effort)
        searches = len({backend for backend, _ in contest.asks()})
        timing += searches * len(some) * _TIMING_S * (effort.most + effort.again)
        timing += sum(len(c.ops) * (_RACE_S + _ROW_S * c.m) for c in some)
        forms += searches * effort.most * len(some) ** _GROWTH
    return _START_S + max(timing, _COMPILE_S * forms / max(1, cores() - 2))


def plan_json(
    shapes: Sequence[Shape],
    cells: Sequence[Cell],
    device: Device,
    effort: Effort,
    path: Path,
    explain: bool,
) -> dict[str, Any]:
    """The plan as `--json` prints it."""
    return {
        "device": device.name,
        "table": str(path),
        "cells": [_cell(cell, device, explain) for cell in cells],
        "layers": [
            {"name": s.name, "scheme": s.scheme.name, "n": s.n, "k": s.k, "count": s.count}
            for s in shapes
        ],
        "configurations_a_search": effort.most,
        "seconds": round(seconds_of(cells, device, effort)),
    }


def plan_text(
    shapes: Sequence[Shape],
    cells: Sequence[Cell],
    device: Device,
    effort: Effort,
    path: Path,
    explain: bool,
) -> str:
    """The plan for a person."""
    rows = []
    for shape in shapes:
        mine = [c for c in cells if c.shape == (shape.scheme, shape.n, shape.k, shape.dtype)]
        if not mine:
            continue
        spaces = [f"{name} {len(order)}" for name, order in _spaces(mine[0], device)]
        rows.append(
            [
                shape.name,
                shape.scheme.name,
                f"{shape.n}x{shape.k}",
                str(shape.count),
                str(len(mine)),
                ", ".join(spaces) or "none",
            ]
        )
    heading = ["layer", "scheme", "N x K", "layers", "Ms", "configurations to choose from"]
    lines = [console.table(heading, rows, left=2), ""]
    ms = sorted({cell.m for cell in cells})
    lines.append(f"M: {', '.join(map(str, ms))}")
    seconds = seconds_of(cells, device, effort)
    lines.append(
        f"{count(len(cells), 'cell')} on {device.name}, at most {effort.most} configurations "
        f"timed in a search; about {_time(seconds)} on one GPU with {cores()} cores to "
        "compile"
    )
    lines.append(f"then {_races(cells)} against the default path and what else is installed")
    lines.append(f"rows go to {path}")
    if explain:
        for cell in cells:
            lines += ["", *_explained(cell, device, effort)]
    return "\n".join(lines)


def ranker_choices(cells: Sequence[Cell], device: Device) -> list[dict[str, Any]]:
    """What an untuned GPU runs: the answer of the selection without a table."""
    found = []
    for cell in cells:
        for op in cell.ops:
            problem = cell.problem(op)
            choice = select(problem, device, Request(tune=True))
            backend = gemm.backend(choice.backend)
            us = estimate(problem, device, backend, choice.config)
            found.append(
                {
                    "op": op,
                    "scheme": cell.scheme.name,
                    "n": cell.n,
                    "k": cell.k,
                    "m": cell.m,
                    "backend": choice.backend,
                    "config": choice.config.to_dict(),
                    "us": None if us is None else round(us, 2),
                    "source": choice.source,
                }
            )
    return found


def _cell(cell: Cell, device: Device, explain: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "ops": list(cell.ops), "scheme": cell.scheme.name, "n": cell.n, "k": cell.k, "m": cell.m,
        "spaces": {name: len(order) for name, order in _spaces(cell, device)},
    }  # fmt: skip
    if explain:
        found["first"] = [
            {"backend": name, "config": ask.config.to_dict()}
            for name, ask in Contest(cell, device, {}, Effort()).asks()
        ]
    return found


def _explained(cell: Cell, device: Device, effort: Effort) -> Iterator[str]:
    spaces = dict(_spaces(cell, device))
    yield f"{cell} {cell.scheme.name}, timed first:"
    for name, ask in Contest(cell, device, {}, effort).asks():
        space = spaces[name]
        place = list(space).index(ask.config) + 1 if ask.config in space else 0
        why = f"{space[ask.config]:.1f} µs estimated, number {place}" if place else "the default"
        shown = " ".join(f"{k}={v}" for k, v in ask.config.to_dict().items())
        yield f"  {name} {shown}: {why}"


def _spaces(cell: Cell, device: Device) -> Iterator[tuple[str, dict[Config, float]]]:
    for backend in willing(cell, cell.ops[0], device, {}):
        order = space_of(backend, cell, device)
        if len(order) > 1:
            yield backend.name, order


def _races(cells: Sequence[Cell]) -> str:
    ops = sorted({op for cell in cells for op in cell.ops})
    races = sum(len(cell.ops) for cell in cells)
    return f"{count(races, 'paired race')} ({' and '.join(ops)})"


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
