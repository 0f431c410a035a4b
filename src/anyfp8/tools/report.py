"""Runs in one form: panels of cells of entries, whatever benchmark (or the tuner) made them.

A panel is one layer (or quantizer, or phase), a cell one M (or batch) of it, an entry one contender
there. `report_read` makes them of files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

OURS, RACED, BESIDE = "ours", "raced", "beside"


@dataclass(frozen=True)
class Entry:
    """One contender of a cell.

    Attributes:
        role: OURS, RACED, or BESIDE (shown, not raced: `why`).
        us: None where nobody measured it. interval: 95 %, None where the file has none.
        backend: what served it, with its configuration; "" for others. source: of that choice.
        share: floor / us.
        ratio: time of this one / time of the first of ours, with its interval over all runs.
        verdict: "won" (ours is faster), "tie", "lost", or "".
        note: what else there is to say of the time.
    """

    name: str
    role: str
    us: float | None
    interval: tuple[float, float] | None = None
    backend: str = ""
    config: str = ""
    source: str = ""
    share: float | None = None
    ratio: tuple[float, float, float] | None = None
    verdict: str = ""
    why: str = ""
    note: str = ""


@dataclass(frozen=True)
class Cell:
    """One M (or batch): `x`. refused: name -> why it has no time; wrong: name -> what is wrong."""

    x: int
    floor_us: float | None
    entries: tuple[Entry, ...]
    refused: Mapping[str, str] = field(default_factory=dict)
    wrong: Mapping[str, str] = field(default_factory=dict)

    @property
    def first(self) -> Entry | None:
        """The first of ours."""
        return next((e for e in self.entries if e.role == OURS), None)

    def entry(self, name: str) -> Entry | None:
        return next((e for e in self.entries if e.name == name), None)


@dataclass(frozen=True)
class Panel:
    """Cells that share everything but x; `key` is the same in every run of the same thing."""

    key: str
    title: str
    x_label: str
    floor_label: str
    cells: tuple[Cell, ...]

    @property
    def names(self) -> list[str]:
        """Of all entries, ours first, then the raced, then the others."""
        found: dict[str, str] = {}
        for cell in self.cells:
            for entry in cell.entries:
                found.setdefault(entry.name, entry.role)
        order = (OURS, RACED, BESIDE)
        return sorted(found, key=lambda name: order.index(found[name]))

    def role(self, name: str) -> str:
        return next(e.role for c in self.cells for e in c.entries if e.name == name)


@dataclass(frozen=True)
class Run:
    """One file. `about` says what was run; missing: name -> why it took no part."""

    path: str
    op: str
    about: str
    header: Mapping[str, Any]
    panels: tuple[Panel, ...]
    missing: Mapping[str, str]
    summary: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def gpu(self) -> str:
        return str(self.header.get("gpu") or self.header.get("device") or "no GPU")
