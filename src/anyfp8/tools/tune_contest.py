"""One cell, from its first candidate to its rows: a search a backend, then a race an op.

The rows say what the paired race said: where our backend did not beat the default path in both
runs, its µs is at least the default's, and the look-up (which wants 2 %) takes the default.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from anyfp8.device import Device
from anyfp8.gemm.base import Backend, Config
from anyfp8.select.table import Row, ranked
from anyfp8.tools.tune_cells import Cell, searched, space_of, willing
from anyfp8.tools.tune_search import Ask, Effort, Search, search

DEFAULT = "default"
# finalists of a backend that race once more with the quantization
_RACED_AGAIN = 3


@dataclass(frozen=True)
class Race:
    """What a final race measured.

    Attributes:
        us: of each entry and peer. ratios: time of the default path / time of it: (middle, low,
            high); empty where the default path has no time.
        refused: {entry or peer: (kind, reason)}. peers: names in `us` that are not ours.
    """

    us: Mapping[str, float]
    ratios: Mapping[str, tuple[float, float, float]]
    refused: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    peers: tuple[str, ...] = ()


class Contest:
    """The searches of one cell, driven by whoever can time: `asks`, `tell`, then `entries`."""

    def __init__(
        self, cell: Cell, device: Device, refused: Mapping[str, str], effort: Effort
    ) -> None:
        self.cell, self.device = cell, device
        self.refused = dict(refused)
        self._backends = {op: willing(cell, op, device, self.refused) for op in cell.ops}
        self._waiting: dict[str, dict[Config, Ask]] = {}
        self._times: dict[str, dict[Config, float | None]] = {}
        self._searches: dict[str, Search] = {}
        self._finalists: dict[str, tuple[Config, ...]] = {}
        self.timed = 0
        for backend in searched(self._backends[cell.ops[0]], cell, device):
            order = space_of(backend, cell, device)
            first = backend.default_config(cell.problem(cell.ops[0]), device)
            self._searches[backend.name] = search(order, effort, first)
            self._advance(backend.name)

    @property
    def searching(self) -> bool:
        return bool(self._waiting)

    def asks(self) -> Iterator[tuple[str, Ask]]:
        """(backend, what to time) of everything that has not been told yet."""
        for name, waiting in list(self._waiting.items()):
            for ask in list(waiting.values()):
                yield name, ask

    def tell(self, backend: str, ask: Ask, us: float | None) -> None:
        """What one ask took, None where it has no time."""
        waiting = self._waiting[backend]
        del waiting[ask.config]
        self.timed += ask.share == 1
        self._times[backend][ask.config] = us
        if not waiting:
            self._advance(backend)

    def entries(self, op: str) -> tuple[dict[str, tuple[Backend, Config]], str]:
        """Who races, by name, and the name of the default path among them ("" without one)."""
        problem = self.cell.problem(op)
        found: dict[str, tuple[Backend, Config]] = {}
        for place, backend in enumerate(self._backends[op]):
            default = backend.default_config(problem, self.device)
            if place == 0 and backend.default:
                found[DEFAULT] = (backend, default)
            own = self._finalists.get(backend.name)
            if own is None:
                own = () if place == 0 and backend.default else (default,)
            for number, config in enumerate(own):
                found[f"{backend.name}#{number + 1}"] = (backend, config)
        return found, DEFAULT if DEFAULT in found else ""

    def narrow(self, race: Race) -> None:
        """Leave each backend the best few of a race: quantizing takes all the same time."""
        for backend, own in self._finalists.items():
            us = {c: race.us.get(f"{backend}#{i + 1}", math.inf) for i, c in enumerate(own)}
            self._finalists[backend] = tuple(sorted(own, key=lambda c: us[c])[:_RACED_AGAIN])

    def rows(self, op: str, race: Race, about: str) -> list[Row]:
        """One row a backend of ours, one of the default path, one a peer.

        Args:
            about: of the measurement: date and versions.
        """
        entries, default = self.entries(op)
        timed = sorted((n for n in entries if n in race.us), key=lambda n: race.us[n])
        default_us = race.us.get(default) if default else None
        rows = []
        best: dict[str, str] = {}
        for name in timed:
            best.setdefault(entries[name][0].name, name)
        for backend, name in best.items():
            extra: dict[str, Any] = {"measured": about}
            second = next((n for n in timed if n != name and entries[n] != entries[name]), None)
            if name == timed[0] and second is not None:
                other = entries[second]
                extra["runner_up"] = {
                    "backend": other[0].name, "config": other[1].to_dict(),
                    "us": round(race.us[second], 3),
                }  # fmt: skip
            us = judged_us(race, name, default_us)
            rows.append(self._row(op, backend, "ours", entries[name][1], us, extra))
        if default_us is not None:
            extra = {"measured": about}
            rows.append(self._row(op, entries[default][0].name, DEFAULT, None, default_us, extra))
        for name in race.peers:
            rows.append(self._row(op, name, "peer", None, race.us[name], {"measured": about}))
        return rows

    def winner(self, op: str, rows: list[Row]) -> Row | None:
        """The row that a look-up on this GPU takes: ours, else the default path's."""
        names = tuple(backend.name for backend in self._backends[op])
        first = next(iter(ranked([r for r in rows if r.op == op], names, names[0])), None)
        if first is not None:
            return first
        return next((r for r in rows if r.op == op and r.role == DEFAULT), None)

    def _row(
        self,
        op: str,
        backend: str,
        role: str,
        config: Config | None,
        us: float,
        extra: dict[str, Any],
    ) -> Row:
        cell = self.cell
        return Row(
            cell.scheme.name, cell.n, cell.k, cell.m, backend, role,
            None if config is None else tuple(config.to_dict().items()), round(us, 3), op,
            cell.dtype, cell.dtype, cell.accumulate, tuple(extra.items()),
        )  # fmt: skip

    def _advance(self, name: str) -> None:
        steps = self._searches[name]
        try:
            times = self._times.pop(name, None)
            asks = next(steps) if times is None else steps.send(times)
        except StopIteration as stop:
            self._waiting.pop(name, None)
            self._finalists[name] = stop.value
            return
        self._waiting[name] = {ask.config: ask for ask in asks}
        self._times[name] = {}


def judged_us(race: Race, name: str, default_us: float | None) -> float:
    """µs of an entry as the pair saw it: default µs / ratio; in a tie at least the default's."""
    ratio = race.ratios.get(name)
    if default_us is None or ratio is None:
        return race.us[name]
    middle, low, _ = ratio
    us = default_us / middle
    return us if low > 1 else max(us, default_us)
