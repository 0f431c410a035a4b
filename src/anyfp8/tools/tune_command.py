"""anyfp8 tune: what a person reads of it, from the plan to the command that uses the rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from anyfp8 import env
from anyfp8.device import Device
from anyfp8.errors import DeviceError, InputError
from anyfp8.select.table import file_name
from anyfp8.tools import console
from anyfp8.tools.quantize import parse_scheme
from anyfp8.tools.tune import Tuned
from anyfp8.tools.tune_cells import OPS, Cell, cells_of, gaps, grid, read_shapes, with_missed
from anyfp8.tools.tune_plan import count, plan_json, plan_text, ranker_choices
from anyfp8.tools.tune_search import FULL, QUICK, Effort
from anyfp8.tools.tune_session import Session, Wanted, is_looked_up, run, table_path, target_of

EFFORTS: dict[str, Effort | None] = {"none": None, "quick": QUICK, "full": FULL}
_GAPS = (
    "between two rows the nearer one serves, which can be slower than no row where they lie far "
    "apart: M = "
)
# warnings of one kind that are printed; --json has them all
_SHOWN = 5


def command(
    models: Sequence[str],
    *,
    device: str | None,
    effort: str,
    m: str | None,
    tp: int,
    scheme: str | None,
    op: str | None,
    missed: Path | None,
    dry_run: bool,
    explain: bool,
    output: Path | None,
    peers: Path | None,
    as_json: bool,
    **injected: Any,
) -> None:
    """Tune, or say what would be tuned.

    Exit status 1: a candidate computes a wrong product, a cell has no row, or a row is not found
    again.

    Args:
        injected: for tests: the measuring process, the compiler.

    Raises:
        InputError, CheckpointError: models, shapes or options that cannot be read.
        DeviceError: no GPU for a real run.
        TableError: the table is another tuner's, or cannot be written.
    """
    if effort not in EFFORTS or op not in (None, *OPS):
        raise InputError(
            "not a way to tune",
            got=f"--effort {effort}" + (f" --op {op}" if op else ""),
            want=f"--effort {', '.join(EFFORTS)}; --op {' or '.join(OPS)}",
        )
    schemes = [] if scheme is None else map(parse_scheme, scheme.split(","))
    shapes, notes = read_shapes(models, *schemes, tp=tp)
    if missed is not None:
        shapes, left_out = with_missed(shapes, missed, device)
        notes += left_out
    if not shapes:
        raise InputError(
            "nothing to tune",
            got="no MODEL" + (f" and no shape in {missed}" if missed else ""),
            want="a model, shapes such as 6144,4096, or --missed FILE",
        )
    ms = grid(m)
    if apart := gaps(ms):
        notes = [*notes, _GAPS + ", ".join(f"{low} and {high}" for low, high in apart)]
    ops = OPS if op is None else (op,)
    for note in notes:
        console.talk(f"note: {note}")
    todo = EFFORTS[effort]
    if todo is not None and not dry_run and not explain:
        wanted = Wanted(shapes, ms, ops, device, (effort, todo), output, peers)
        _report(run(wanted, _won, **injected), as_json)
        return
    target = target_of(device)
    if target.vendor == "cpu":
        raise DeviceError(
            "there is no GPU to plan for",
            got="no --device and no GPU here" if device is None else f"--device {device}",
            want="the GPU that will be tuned",
            hint="--device h200",
        )
    cells = cells_of(shapes, target, ms, ops)
    if todo is None:
        _show_ranker(cells, target, as_json)
        return
    path = table_path(output, target)
    if as_json:
        console.data_json(plan_json(shapes, cells, target, todo, path, explain))
    else:
        console.data(plan_text(shapes, cells, target, todo, path, explain))


def _won(tuned: Tuned) -> None:
    console.talk(line_of(tuned))


def line_of(tuned: Tuned) -> str:
    """One line of progress: what won a cell."""
    parts = []
    for op, row in tuned.winners.items():
        if row is None:
            parts.append(f"{op}: nothing could be timed")
        else:
            what = "default path, " if row.role == "default" else ""
            parts.append(f"{op}: {what}{row.backend} {row.us:.1f} µs")
    tail = f"{tuned.timed} timed, {tuned.seconds:.1f} s"
    return f"{tuned.cell}  {'; '.join(parts)}  ({tail})"


def use_of(path: Path, device: Device) -> list[str]:
    """What a shell needs so that the rows are used."""
    if not is_looked_up(path, device):
        return [f"to use it: move it to a folder as {file_name(device.name)}"]
    if env.text("ANYFP8_TABLE_DIR") == str(path.parent):
        return [f"ANYFP8_TABLE_DIR names its folder: layers made on a {device.name} use it"]
    return ["to use it:", f"  export ANYFP8_TABLE_DIR={path.parent}"]


def _report(session: Session, as_json: bool) -> None:
    winners = [(t.cell, op, row) for t in session.tuned for op, row in t.winners.items()]
    empty = [(cell, op) for cell, op, row in winners if row is None]
    wrong = [r for r in session.refusals if r[3].kind == "wrong"]
    use = use_of(session.path, session.device)
    if as_json:
        console.data_json(_json(session, use))
    else:
        ours = sum(row is not None and row.role == "ours" for _, _, row in winners)
        console.data(f"{session.path}: {len(winners) - len(empty)} of {len(winners)} have rows")
        console.data(f"a configuration of ours beats the default path in {ours}")
        console.data(
            f"{count(len(session.tuned), 'cell')} in {session.seconds:.0f} s on "
            f"{count(session.gpus, 'GPU')}"
        )
        kinds = Counter(r[3].kind for r in session.refusals)
        if kinds:
            counts = ", ".join(f"{number} {kind}" for kind, number in kinds.items())
            console.data(f"candidates refused: {counts}; --json lists them")
        for line in use:
            console.data(line)
    for cell, backend, config, refusal in wrong[:_SHOWN]:
        console.talk(
            f"warning: {backend} {config} computes a wrong product for {cell}: it "
            f"{refusal.reason}. It was not taken. Please report this as a bug."
        )
    for cell, op in empty[:_SHOWN]:
        console.talk(f"warning: no row for {op} {cell}: the ranker decides there")
    for miss in session.missed[:_SHOWN]:
        console.talk(f"warning: {miss.op} {miss.cell} is not found again: {miss.why}")
    if wrong or empty or session.missed:
        raise typer.Exit(1)


def _json(session: Session, use: list[str]) -> dict[str, Any]:
    return {
        "device": session.device.name,
        "table": str(session.path),
        "cells": [_cell_json(tuned) for tuned in session.tuned],
        "refused": [
            {"cell": c, "backend": b, "config": config, "kind": r.kind, "reason": r.reason}
            for c, b, config, r in session.refusals
        ],
        "missed": [{"cell": x.cell.key, "op": x.op, "why": x.why} for x in session.missed],
        "gpus": session.gpus,
        "seconds": round(session.seconds, 1),
        "use": use,
    }


def _cell_json(tuned: Tuned) -> dict[str, Any]:
    cell = tuned.cell
    rows = {op: None if row is None else row.to_dict() for op, row in tuned.winners.items()}
    return {
        "scheme": cell.scheme.name, "n": cell.n, "k": cell.k, "m": cell.m, "timed": tuned.timed,
        "seconds": round(tuned.seconds, 2), "winners": rows,
    }  # fmt: skip


def _show_ranker(cells: Sequence[Cell], device: Device, as_json: bool) -> None:
    entries = ranker_choices(cells, device)
    if as_json:
        console.data_json({"device": device.name, "choices": entries})
        return
    console.talk("--effort none times nothing and writes nothing: what serves an untuned GPU")
    rows = [
        [
            f"{e['n']}x{e['k']}", str(e["m"]), e["op"], e["backend"],
            " ".join(f"{k}={v}" for k, v in e["config"].items()),
            "-" if e["us"] is None else f"{e['us']:.1f}",
        ]
        for e in entries
    ]  # fmt: skip
    console.data(console.table(["N x K", "M", "op", "backend", "config", "est. µs"], rows))
