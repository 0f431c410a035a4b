"""Cells → rows of a table: one measuring process a GPU, compilers beside it, everything kept.

`run_gpu` is the loop of one GPU: it keeps many cells open, so that while the candidates of one
compile those of another are timed. The queue, the measurer and the compiler are protocols: a
cluster's engine brings its own, a test brings fakes.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

from anyfp8.device import Device
from anyfp8.select.table import Row
from anyfp8.tools.tune_cells import Cell
from anyfp8.tools.tune_child import Child, ChildFailed
from anyfp8.tools.tune_compile import Compiler
from anyfp8.tools.tune_contest import Contest, Race
from anyfp8.tools.tune_journal import Book, Outcome, Refusal
from anyfp8.tools.tune_search import FULL, Ask, Effort

# cells that are open at once on one GPU: a search waits three times for compilers, 4 s and more
_OPEN = 16
# seconds: making operands and trying libraries, one candidate, one race
OPEN_LIMIT_S, TIME_LIMIT_S, RACE_LIMIT_S = 400.0, 30.0, 120.0


class WorkQueue(Protocol):
    """Where cells come from; several GPUs, or machines, may take from one."""

    def take(self) -> Cell | None:
        """The next cell, or None."""
        ...


class Measurer(Protocol):
    """One GPU that times candidates."""

    def open(self, cell: Cell) -> Mapping[str, str]:
        """Get ready for a cell; {backend: why it does not work on this GPU}."""
        ...

    def time(self, cell: Cell, backend: str, config: dict[str, Any], share: int) -> Outcome: ...

    def race(
        self, cell: Cell, op: str, entries: Mapping[str, dict[str, Any]], default: str
    ) -> Race: ...


@dataclass(frozen=True)
class Tuned:
    """One finished cell.

    Attributes:
        winners: {op: the row that a look-up takes, or None where nothing has a time}.
        refused: what its GPU said no to: {backend: why}.
        timed: configurations. seconds: that its GPU worked for it.
    """

    cell: Cell
    winners: Mapping[str, Row | None]
    refused: Mapping[str, str] = field(default_factory=dict)
    timed: int = 0
    seconds: float = 0.0


class LocalQueue:
    """Cells in order, shared by the threads of this process."""

    def __init__(self, cells: Iterable[Cell]) -> None:
        self._cells = deque(cells)
        self._taking = threading.Lock()

    def take(self) -> Cell | None:
        with self._taking:
            return self._cells.popleft() if self._cells else None


class GpuWorker:
    """A `Measurer` in a child process that sees one GPU; killed and started again when it must."""

    def __init__(
        self,
        environ: Mapping[str, str],
        command: tuple[str, ...],
        m_most: int,
        seed: int = 0,
        peers: str | None = None,
    ) -> None:
        """Args:
        environ: what makes the GPU the process's only one.
        m_most: rows that operands are made for. peers: folder of other libraries.
        """
        self._child = Child(command, environ)
        self._about = {"m_most": m_most, "seed": seed, "peers": peers}
        self._opened: tuple[Any, ...] = ()

    def hello(self) -> dict[str, Any]:
        """The header of the measurement and the GPU's name. Raises ChildFailed."""
        return self._child.call({"do": "hello"}, OPEN_LIMIT_S)

    def open(self, cell: Cell) -> Mapping[str, str]:
        answer = self._ask({"do": "open", "cell": cell.to_dict(), **self._about}, OPEN_LIMIT_S)
        self._opened = (cell.shape, self._child.generation)
        return answer["refused"]

    def time(self, cell: Cell, backend: str, config: dict[str, Any], share: int) -> Outcome:
        request = {"do": "time", "backend": backend, "config": config, "share": share}
        try:
            answer = self._at(cell, request, TIME_LIMIT_S)
        except ChildFailed as failure:
            return Refusal(failure.kind, str(failure))
        if "refused" in answer:
            return Refusal(answer["kind"], answer["refused"])
        return answer["us"]

    def race(
        self, cell: Cell, op: str, entries: Mapping[str, dict[str, Any]], default: str
    ) -> Race:
        request = {"do": "race", "op": op, "entries": dict(entries), "default": default}
        try:
            answer = self._at(cell, request | {"peers": True}, RACE_LIMIT_S)
        except ChildFailed:
            # the entries were timed before: more likely another library's fault
            answer = self._at(cell, request | {"peers": False}, RACE_LIMIT_S)
        return Race(
            answer["us"],
            {name: (r[0], r[1], r[2]) for name, r in answer["ratios"].items()},
            {name: (r[0], r[1]) for name, r in answer["refused"].items()},
            tuple(answer["peers"]),
        )

    def close(self) -> None:
        self._child.close()

    def _at(self, cell: Cell, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        if self._opened != (cell.shape, self._child.generation):
            self.open(cell)
        return self._ask(request | {"cell": cell.to_dict()}, limit_s)

    def _ask(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        answer = self._child.call(request, limit_s)
        if answer.get("last"):
            # it said that its context is lost
            self._child.close()
            self._opened = ()
        return answer


def run_gpu(
    queue: WorkQueue,
    measurer: Measurer,
    compiler: Compiler,
    book: Book,
    device: Device,
    about: str,
    effort: Effort = FULL,
    report: Callable[[Tuned], None] = lambda _: None,
) -> None:
    """Tune cells until the queue is empty; what has failed is in the book, never raised."""
    open_cells: list[_Open] = []
    while True:
        while len(open_cells) < _OPEN:
            cell = queue.take()
            if cell is None:
                break
            opened = _open(cell, measurer, compiler, book, device, effort)
            if opened is not None:
                open_cells.append(opened)
            else:
                report(Tuned(cell, dict.fromkeys(cell.ops)))
        if not open_cells:
            return
        current = next((o for o in open_cells if not o.contest.searching), None)
        if current is not None:
            open_cells.remove(current)
            report(current.finish(measurer, about))
            continue
        if not any(o.step(measurer) for o in open_cells):
            pending = [f for o in open_cells for f in o.compiling.values() if not f.done()]
            wait(pending, timeout=1.0, return_when=FIRST_COMPLETED)


def _open(
    cell: Cell, measurer: Measurer, compiler: Compiler, book: Book, device: Device, effort: Effort
) -> _Open | None:
    for attempt in range(2):
        try:
            return _Open(Contest(cell, device, measurer.open(cell), effort), compiler, book)
        except ChildFailed as failure:
            # another process's candidate may have left the GPU in disorder
            if attempt:
                book.timed(cell.key, "", {}, 0, Refusal(failure.kind, str(failure)))
    return None


class _Open:
    """A cell that is being tuned, and its candidates in the compilers' hands."""

    def __init__(self, contest: Contest, compiler: Compiler, book: Book) -> None:
        self.contest, self._compiler, self._book = contest, compiler, book
        self._seconds = 0.0
        self.compiling: dict[tuple[str, Any], Future[str]] = {}
        self._submit()

    def step(self, measurer: Measurer) -> bool:
        """Settle one ask that is known or compiled; False where none is."""
        cell = self.contest.cell
        for backend, ask in self.contest.asks():
            compiled = self.compiling.get((backend, ask.config))
            if compiled is not None and not compiled.done():
                continue
            config = ask.config.to_dict()
            known = self._book.known(cell.key, backend, config, ask.share)
            if known is not None:
                self._tell(backend, ask, known)
                return True
            if compiled is None:
                continue
            why = compiled.result()
            outcome: Outcome = Refusal("failed", why) if why else 0.0
            if not why:
                start = time.monotonic()
                outcome = _plausible(measurer.time(cell, backend, config, ask.share))
                self._seconds += time.monotonic() - start
            self._book.timed(cell.key, backend, config, ask.share, outcome)
            self._tell(backend, ask, outcome)
            return True
        return False

    def finish(self, measurer: Measurer, about: str) -> Tuned:
        """Race, write the rows."""
        contest, cell, start = self.contest, self.contest.cell, time.monotonic()
        rows: list[Row] = []
        for op in cell.ops:
            entries, default = contest.entries(op)
            asked = {
                name: {"backend": backend.name, "config": config.to_dict()}
                for name, (backend, config) in entries.items()
            }
            try:
                race = measurer.race(cell, op, asked, default)
            except ChildFailed as failure:
                self._book.timed(cell.key, f"race {op}", {}, 0, Refusal(failure.kind, str(failure)))
                continue
            for name, (kind, reason) in race.refused.items():
                refused = asked.get(name, {"backend": name, "config": {}})
                self._book.timed(cell.key, **refused, share=0, outcome=Refusal(kind, reason))
            rows += contest.rows(op, race, about)
            contest.narrow(race)
        winners = {op: contest.winner(op, rows) for op in cell.ops}
        if any(winners.values()):
            told = {op: None if row is None else row.to_dict() for op, row in winners.items()}
            summary = {"winners": told, "refused": contest.refused}
            self._book.finished(cell.key, rows, summary)
        seconds = self._seconds + time.monotonic() - start
        return Tuned(cell, winners, contest.refused, contest.timed, seconds)

    def _tell(self, backend: str, ask: Ask, outcome: Outcome) -> None:
        self.contest.tell(backend, ask, None if isinstance(outcome, Refusal) else outcome)
        self._submit()

    def _submit(self) -> None:
        cell = self.contest.cell
        for backend, ask in self.contest.asks():
            key = (backend, ask.config)
            config = ask.config.to_dict()
            if key not in self.compiling and (
                self._book.known(cell.key, backend, config, ask.share) is None
            ):
                self.compiling[key] = self._compiler.submit(cell, backend, config)


def _plausible(outcome: Outcome) -> Outcome:
    if isinstance(outcome, Refusal):
        return outcome
    if 0 < outcome < math.inf:
        # as the journal keeps it: a run that goes on asks for the same
        return round(outcome, 4)
    return Refusal("failed", f"was timed at {outcome} µs, which cannot be")
