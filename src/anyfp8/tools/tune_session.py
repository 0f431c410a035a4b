"""A real run of `anyfp8 tune`: this machine's GPUs, from their workers' start to the read-back.

The parent process makes no CUDA context: each GPU belongs to one worker, and even its name and
figures are what the worker tells.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

import anyfp8
from anyfp8 import env
from anyfp8.device import Device, find_device, planning_device, runtime
from anyfp8.errors import DeviceError
from anyfp8.select.schema import row_of
from anyfp8.select.table import Header, file_name
from anyfp8.tools import console
from anyfp8.tools.tune import GpuWorker, LocalQueue, Tuned, run_gpu
from anyfp8.tools.tune_cells import Cell, Shape, cells_of
from anyfp8.tools.tune_child import ChildFailed
from anyfp8.tools.tune_compile import COMMAND, Compiler, Pool
from anyfp8.tools.tune_contest import Contest
from anyfp8.tools.tune_devices import (
    chosen,
    from_json,
    named_ordinals,
    no_gpu,
    worker_environments,
)
from anyfp8.tools.tune_journal import Book, Refusal
from anyfp8.tools.tune_readback import Missed, read_back
from anyfp8.tools.tune_search import Effort

METHOD = (
    "µs of one call, CUDA graphs over rotating weight copies that the L2 does not hold; finalists, "
    "the default path and peers raced in pairs, two runs; ours is the default's µs / paired ratio, "
    "and at least the default's where a run did not tell them apart"
)


@dataclass(frozen=True)
class Wanted:
    """What a run is asked for.

    Attributes:
        device: as `--device` says, None for every visible GPU.
        effort: its name, and what it means. output: table or folder, None for the user's own.
        peers: folder of other libraries.
    """

    shapes: Sequence[Shape]
    ms: Sequence[int]
    ops: Sequence[str]
    device: str | None
    effort: tuple[str, Effort]
    output: Path | None = None
    peers: Path | None = None


@dataclass(frozen=True)
class Session:
    """What a run did.

    Attributes:
        path: of the table. refusals: (cell key, backend, configuration, Refusal) of candidates.
        missed: cells whose look-up does not give what was won.
        gpus, seconds: how many worked, and how long it took.
    """

    device: Device
    path: Path
    tuned: tuple[Tuned, ...]
    refusals: tuple[tuple[str, str, dict[str, Any], Refusal], ...]
    missed: tuple[Missed, ...]
    gpus: int
    seconds: float


def run(
    wanted: Wanted,
    report: Callable[[Tuned], None],
    *,
    command: tuple[str, ...] = (*COMMAND, "measure"),
    compiler: Callable[[Device], Compiler] = Pool,
) -> Session:
    """Tune.

    Args:
        report: called with each cell as it is won.
        command: of the measuring processes. compiler: for the GPU that is tuned.

    Raises:
        DeviceError: no visible GPU, or not the one that was named.
        TableError: the table is another tuner's, or cannot be written.
    """
    start = time.monotonic()
    environments = worker_environments(os.environ, runtime(), torch.cuda.device_count())
    if not environments:
        raise no_gpu(os.environ)
    if wanted.device is None or named_ordinals(wanted.device):
        environments = chosen(environments, wanted.device)
    folder = None if wanted.peers is None else str(wanted.peers)
    workers = [GpuWorker(e, command, max(wanted.ms), peers=folder) for e in environments]
    try:
        alike, device, header = _greet(workers, wanted.device)
        cells = cells_of(wanted.shapes, device, wanted.ms, wanted.ops)
        path = table_path(wanted.output, device)
        name, effort = wanted.effort
        request = {
            "cells": [cell.key for cell in cells], "effort": name, "peers": folder,
            "header": {k: header[k] for k in ("gpu", "driver", "torch", "triton", "anyfp8")},
        }  # fmt: skip
        book = Book(path, _header(device, header), request)
        complete = False
        try:
            tuned = _tune(alike, cells, device, book, effort, _about(header), report, compiler)
            complete = True
        finally:
            book.close(complete)
    finally:
        for worker in workers:
            worker.close()
    seconds = time.monotonic() - start
    missed = read_back(tuned, path.parent, device) if is_looked_up(path, device) else []
    return Session(
        device, path, tuple(tuned), tuple(book.refusals), tuple(missed), len(alike), seconds
    )


def target_of(name: str | None) -> Device:
    """A GPU of the catalogue to plan for; None or "cuda" is the one here."""
    local = name is None or named_ordinals(name)
    return planning_device() if local or name is None else find_device(name)


def table_path(output: Path | None, device: Device) -> Path:
    """--output FILE or FOLDER, else the user's table of the GPU."""
    if output is not None:
        return output if output.suffix == ".jsonl" else output / file_name(device.name)
    import platformdirs

    folder = env.text("ANYFP8_TABLE_DIR") or platformdirs.user_data_path("anyfp8") / "tables"
    return Path(folder) / file_name(device.name)


def is_looked_up(path: Path, device: Device) -> bool:
    """Whether a folder of tables answers for the GPU with this file."""
    return path.name == file_name(device.name)


def _greet(
    workers: list[GpuWorker], named: str | None
) -> tuple[list[GpuWorker], Device, dict[str, Any]]:
    """The workers whose GPUs are alike, what GPU that is, and its header."""
    hellos = []
    with console.progress(f"starting {len(workers)} measuring process(es)"):
        for worker in workers:
            try:
                hellos.append((worker, worker.hello()))
            except ChildFailed as failure:
                console.talk(f"warning: a GPU is left out: {failure}")
    wanted = None if named is None or named_ordinals(named) else find_device(named).name
    name = wanted or (hellos[0][1]["device"]["name"] if hellos else "")
    alike = [(worker, hello) for worker, hello in hellos if hello["device"]["name"] == name]
    others = {hello["device"]["name"] for _, hello in hellos} - {name}
    if not alike:
        raise DeviceError(
            "there is no such GPU here to tune",
            got=", ".join(sorted(others)) or "no GPU on which a process starts",
            want=name or "a GPU that works",
            hint="--dry-run plans for a GPU that is not here; anyfp8 doctor tests those that are",
        )
    if others:
        console.talk(f"note: tuning {name}; not {', '.join(sorted(others))}: --device names one")
    first = alike[0][1]
    return [worker for worker, _ in alike], from_json(first["device"]), first["header"]


def _tune(
    workers: Sequence[GpuWorker],
    cells: Sequence[Cell],
    device: Device,
    book: Book,
    effort: Effort,
    about: str,
    report: Callable[[Tuned], None],
    compiler: Callable[[Device], Compiler],
) -> list[Tuned]:
    kept_cells, kept_timings = book.resumed
    if kept_cells or kept_timings:
        console.talk(f"resumed: {kept_cells} cells and {kept_timings} timings are there already")
    found = [_from_journal(cell, book) for cell in cells if cell.key in book.done]
    left = [cell for cell in cells if cell.key not in book.done]
    queue, failures = LocalQueue(left), []
    pool = compiler(device)
    if isinstance(pool, Pool):
        pool.prepare(_opening(left, device, effort))
    with console.progress(f"tuning {device.name}", len(left)) as shown:

        def won(tuned: Tuned) -> None:
            found.append(tuned)
            report(tuned)
            shown.step(note=str(tuned.cell))

        def one(worker: GpuWorker) -> None:
            try:
                run_gpu(queue, worker, pool, book, device, about, effort, won)
            except Exception as error:
                failures.append(error)

        try:
            threads = [threading.Thread(target=one, args=(w,), daemon=True) for w in workers[1:]]
            for thread in threads:
                thread.start()
            one(workers[0])
            for thread in threads:
                thread.join()
        finally:
            if isinstance(pool, Pool):
                pool.close()
    if failures:
        raise failures[0]
    return found


def _opening(
    cells: Iterable[Cell], device: Device, effort: Effort
) -> Iterator[tuple[Cell, str, dict[str, Any]]]:
    """What each cell times first, unless the GPU refuses a backend."""
    for cell in cells:
        for backend, ask in Contest(cell, device, {}, effort).asks():
            yield cell, backend, ask.config.to_dict()


def _from_journal(cell: Cell, book: Book) -> Tuned:
    kept = book.done[cell.key]
    winners = {op: row and row_of(row) for op, row in kept["winners"].items()}
    return Tuned(cell, winners, kept["refused"])


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
    """Of one row: when and with what it was measured."""
    names = ("torch", "triton", "driver")
    versions = " ".join(f"{name} {header.get(name)}" for name in names)
    return f"{header.get('date')} anyfp8 {anyfp8.__version__} {versions}"
