"""anyfp8 tune: what a person reads of it, from the plan to the command that uses the rows."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
import typer

import anyfp8
from anyfp8 import env
from anyfp8.device import Device, find_device, planning_device, runtime
from anyfp8.errors import DeviceError, InputError
from anyfp8.select.table import Header, file_name
from anyfp8.tools import console
from anyfp8.tools.quantize import parse_scheme
from anyfp8.tools.tune import GpuWorker, LocalQueue, Tuned, run_gpu
from anyfp8.tools.tune_cells import OPS, Cell, Shape, cells_of, grid, read_shapes
from anyfp8.tools.tune_child import ChildFailed
from anyfp8.tools.tune_compile import COMMAND, Pool
from anyfp8.tools.tune_devices import (
    chosen,
    from_json,
    named_ordinals,
    no_gpu,
    worker_environments,
)
from anyfp8.tools.tune_journal import Book
from anyfp8.tools.tune_plan import plan_json, plan_text, ranker_choices
from anyfp8.tools.tune_readback import Missed, read_back
from anyfp8.tools.tune_search import FULL, QUICK, Effort

EFFORTS: dict[str, Effort | None] = {"none": None, "quick": QUICK, "full": FULL}
METHOD = (
    "µs of one call, CUDA graphs over rotating weight copies that the L2 does not hold; finalists, "
    "the default path and peers raced in pairs, two runs; ours is the default's µs / paired ratio, "
    "and at least the default's where a run did not tell them apart"
)


def command(
    models: Sequence[str],
    *,
    device: str | None,
    effort: str,
    m: str | None,
    tp: int,
    scheme: str | None,
    op: str | None,
    dry_run: bool,
    explain: bool,
    output: Path | None,
    peers: Path | None,
    as_json: bool,
) -> None:
    """Tune, or say what would be tuned.

    Exit status 1: a candidate computes a wrong product, a cell has no row, or a row is not found
    again.

    Raises:
        InputError, CheckpointError: models, shapes or options that cannot be read.
        DeviceError: no GPU for a real run.
        TableError: the table is another tuner's, or cannot be written.
    """
    if effort not in EFFORTS or op not in (None, *OPS):
        raise InputError(
            "not a way to tune",
            got=f"--effort {effort} --op {op}",
            want=f"--effort {', '.join(EFFORTS)}; --op {' or '.join(OPS)}",
        )
    shapes, notes = read_shapes(models, None if scheme is None else parse_scheme(scheme), tp)
    ms = grid(effort, m)
    ops = OPS if op is None else (op,)
    for note in notes:
        console.talk(f"note: {note}")
    todo = EFFORTS[effort]
    if dry_run or explain or todo is None:
        target = planning_device() if device is None else _target(device)
        if target.vendor == "cpu":
            raise _no_gpu_to_plan_for()
        cells = cells_of(shapes, target, ms, ops)
        if todo is None:
            _show_ranker(cells, target, as_json)
            return
        path = _path(output, target)
        if as_json:
            console.data_json(plan_json(shapes, cells, target, todo, path, explain))
        else:
            console.data(plan_text(shapes, cells, target, todo, path, explain))
        return
    _tune(shapes, ms, ops, device, todo, effort, output, peers, as_json)


def _no_gpu_to_plan_for() -> DeviceError:
    """There is no GPU here and none was named."""
    return DeviceError(
        "there is no GPU to plan for",
        got="no --device and no GPU here",
        want="the GPU that will be tuned",
        hint="--device h200",
    )


def _tune(
    shapes: Sequence[Shape],
    ms: Sequence[int],
    ops: Sequence[str],
    device: str | None,
    effort: Effort,
    effort_name: str,
    output: Path | None,
    peers: Path | None,
    as_json: bool,
) -> None:
    environments = worker_environments(os.environ, runtime(), torch.cuda.device_count())
    if not environments:
        raise no_gpu(os.environ)
    if device is None or named_ordinals(device):
        environments = chosen(environments, device)
    command = (*COMMAND, "measure")
    folder = None if peers is None else str(peers)
    workers = [GpuWorker(e, command, max(ms), peers=folder) for e in environments]
    try:
        workers, target, header = _greet(workers, device)
        cells = cells_of(shapes, target, ms, ops)
        path = _path(output, target)
        request = {
            "cells": [cell.key for cell in cells], "effort": effort_name,
            "header": {k: header[k] for k in ("gpu", "driver", "torch", "triton", "anyfp8")},
        }  # fmt: skip
        book = Book(path, _header(target, header), request)
        complete = False
        try:
            found = _run(workers, cells, target, book, effort, _about(header))
            complete = True
        finally:
            book.close(complete)
    finally:
        for worker in workers:
            worker.close()
    missed = read_back(found, path.parent, target) if _is_looked_up(path, target) else []
    _report(found, missed, book, path, target, as_json)


def _greet(
    workers: list[GpuWorker], device: str | None
) -> tuple[list[GpuWorker], Device, dict[str, Any]]:
    """The workers whose GPUs are alike, what GPU that is, and its header."""
    hellos = []
    with console.progress(f"starting {len(workers)} workers"):
        for worker in workers:
            try:
                hellos.append((worker, worker.hello()))
            except ChildFailed as failure:
                console.talk(f"warning: a GPU is left out: {failure}")
    wanted = None if device is None or named_ordinals(device) else _target(device).name
    name = wanted or (hellos[0][1]["device"]["name"] if hellos else "")
    alike = [(worker, hello) for worker, hello in hellos if hello["device"]["name"] == name]
    others = {hello["device"]["name"] for _, hello in hellos} - {name}
    if not alike:
        raise DeviceError(
            "there is no such GPU here to tune",
            got=", ".join(sorted(others)) or "no GPU that starts a process",
            want=name or "a GPU that works",
            hint="--dry-run plans for a GPU that is not here; anyfp8 doctor tests those that are",
        )
    if others:
        console.talk(f"note: tuning {name}; not {', '.join(sorted(others))}: --device names one")
    first = alike[0][1]
    return [worker for worker, _ in alike], from_json(first["device"]), first["header"]


def _run(
    workers: Sequence[GpuWorker],
    cells: Sequence[Cell],
    device: Device,
    book: Book,
    effort: Effort,
    about: str,
) -> list[Tuned]:
    left = [cell for cell in cells if cell.key not in book.done]
    cells_kept, timings_kept = book.resumed
    if cells_kept or timings_kept:
        console.talk(f"resumed: {cells_kept} cells and {timings_kept} timings are there already")
    found = [_from_journal(cell, book) for cell in cells if cell.key in book.done]
    queue = LocalQueue(left)
    pool = Pool(device)
    with console.progress(f"tuning {device.name}", len(left)) as shown:

        def report(tuned: Tuned) -> None:
            found.append(tuned)
            shown.step(note=str(tuned.cell))
            console.talk(line_of(tuned))

        def one(worker: GpuWorker) -> None:
            run_gpu(queue, worker, pool, book, device, about, effort, report)

        try:
            threads = [threading.Thread(target=one, args=(w,), daemon=True) for w in workers[1:]]
            for thread in threads:
                thread.start()
            one(workers[0])
            for thread in threads:
                thread.join()
        finally:
            pool.close()
    return found


def _from_journal(cell: Cell, book: Book) -> Tuned:
    from anyfp8.select.schema import row_of

    kept = book.done[cell.key]
    winners = {op: row and row_of(row) for op, row in kept["winners"].items()}
    return Tuned(cell, winners, kept["refused"])


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


def _report(
    found: Sequence[Tuned],
    missed: Sequence[Missed],
    book: Book,
    path: Path,
    device: Device,
    as_json: bool,
) -> None:
    winners = [(t.cell, op, row) for t in found for op, row in t.winners.items()]
    empty = [(cell, op) for cell, op, row in winners if row is None]
    wrong = [r for r in book.refusals if r[3].kind == "wrong"]
    kinds = Counter(r[3].kind for r in book.refusals)
    if as_json:
        console.data_json(
            {
                "device": device.name,
                "table": str(path),
                "cells": [_cell_json(tuned) for tuned in found],
                "refused": [
                    {"cell": c, "backend": b, "config": config, "kind": r.kind, "reason": r.reason}
                    for c, b, config, r in book.refusals
                ],
                "missed": [{"cell": x.cell.key, "op": x.op, "why": x.why} for x in missed],
                "use": use_of(path, device),
            }
        )
    else:
        ours = sum(row is not None and row.role == "ours" for _, _, row in winners)
        console.data(f"{path}: {len(winners) - len(empty)} of {len(winners)} cells have rows")
        console.data(f"a backend of ours is faster than the default path in {ours}")
        if kinds:
            console.data("refused: " + ", ".join(f"{n} {kind}" for kind, n in kinds.items()))
        for line in use_of(path, device):
            console.data(line)
    for cell, backend, config, refusal in wrong[:5]:
        console.talk(
            f"warning: {backend} {config} computes a wrong product for {cell}: it "
            f"{refusal.reason}. It was not taken. Please report this as a bug."
        )
    for cell, op in empty[:5]:
        console.talk(f"warning: no row for {op} {cell}: the ranker decides there")
    for miss in missed[:5]:
        console.talk(f"warning: {miss.op} {miss.cell} is not found again: {miss.why}")
    if wrong or empty or missed:
        raise typer.Exit(1)


def _cell_json(tuned: Tuned) -> dict[str, Any]:
    cell = tuned.cell
    rows = {op: None if row is None else row.to_dict() for op, row in tuned.winners.items()}
    return {
        "scheme": cell.scheme.name, "n": cell.n, "k": cell.k, "m": cell.m, "timed": tuned.timed,
        "seconds": round(tuned.seconds, 2), "winners": rows,
    }  # fmt: skip


def use_of(path: Path, device: Device) -> list[str]:
    """What a shell needs so that the rows are used."""
    if not _is_looked_up(path, device):
        return [f"to use it: move it to a folder as {file_name(device.name)}"]
    if env.text("ANYFP8_TABLE_DIR") == str(path.parent):
        return [
            f"ANYFP8_TABLE_DIR names this folder: layers made on a {device.name} use these rows"
        ]
    return ["to use it:", f"  export ANYFP8_TABLE_DIR={path.parent}"]


def _is_looked_up(path: Path, device: Device) -> bool:
    return path.name == file_name(device.name)


def _show_ranker(cells: Sequence[Cell], device: Device, as_json: bool) -> None:
    entries = ranker_choices(cells, device)
    if as_json:
        console.data_json({"device": device.name, "cells": entries})
        return
    console.talk("--effort none times nothing and writes nothing: what serves an untuned GPU")
    rows = [
        [f"{e['n']}x{e['k']}", str(e["m"]), e["op"], e["backend"], e["config"], e["us"]]
        for e in entries
    ]
    console.data(console.table(["N x K", "M", "op", "backend", "config", "est. µs"], rows))


def _target(name: str) -> Device:
    """A GPU of the catalogue for planning; "cuda" is the one here."""
    return planning_device() if named_ordinals(name) else find_device(name)


def _path(output: Path | None, device: Device) -> Path:
    """--output FILE, else the user's table of the GPU."""
    if output is not None:
        return output / file_name(device.name) if output.is_dir() else output
    import platformdirs

    folder = env.text("ANYFP8_TABLE_DIR")
    return Path(folder or platformdirs.user_data_path("anyfp8") / "tables") / file_name(device.name)


def _header(device: Device, header: Mapping[str, Any]) -> Header:
    facts = {
        "arch": device.arch.name, "sms": device.sms, "shared_memory": device.shared_memory,
        "l2_bytes": device.l2_bytes, "bandwidth_gbs": device.bandwidth_gbs,
    }  # fmt: skip
    facts |= {k: header.get(k) for k in ("torch", "triton", "driver", "anyfp8", "clocks_mhz")}
    facts["method"] = METHOD
    source = "measured by anyfp8 tune"
    return Header(device.name, source, date.today().isoformat(), tuple(facts.items()))


def _about(header: Mapping[str, Any]) -> str:
    names = ("torch", "triton", "driver")
    versions = " ".join(f"{name} {header.get(name)}" for name in names)
    return f"{header.get('date')} anyfp8 {anyfp8.__version__} {versions}"
