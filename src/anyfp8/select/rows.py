"""What a table holds, which of its rows beat the default path, and which M serves another.

A row is the time of one backend, of the default path or of a peer at one (scheme, N, K, M).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

FORMAT = 1

# a backend of ours must beat the default path by more than this to be taken
MARGIN = 0.02


@dataclass(frozen=True)
class Header:
    """First line of a table.

    Attributes:
        device: canonical name. source: where the figures come from. date: ISO.
        facts: sms, shared_memory, l2_bytes, bandwidth_gbs, torch, triton, driver, anyfp8, method, …
    """

    device: str
    source: str = ""
    date: str = ""
    facts: tuple[tuple[str, Any], ...] = ()

    @property
    def provenance(self) -> str:
        return ", ".join(part for part in (self.device, self.source, self.date) if part)

    def to_dict(self) -> dict[str, Any]:
        head = {"format": FORMAT, "device": self.device, "source": self.source, "date": self.date}
        return head | dict(self.facts)


@dataclass(frozen=True)
class Row:
    """One measured (or imported) point.

    Attributes:
        op, scheme, x_dtype, out_dtype, accumulate, n, k, m: its key; scheme by canonical name.
        backend: its name; of the default path the backend that it was, "" where nobody recorded it.
        role: "ours", "default" or "peer".
        config: of the backend, as stored; None for roles without one.
        us: time of one call, or None for imported rows.
        extra: fields that this version does not know; written back as they were.
    """

    scheme: str
    n: int
    k: int
    m: int
    backend: str = ""
    role: str = "ours"
    config: tuple[tuple[str, Any], ...] | None = None
    us: float | None = None
    op: str = "gemm"
    x_dtype: str = "bf16"
    out_dtype: str = "bf16"
    accumulate: str = "fast"
    extra: tuple[tuple[str, Any], ...] = ()

    @property
    def key(self) -> tuple[Any, ...]:
        """What two rows of one measurement share but the backend."""
        return (*self.group, self.m)

    @property
    def group(self) -> tuple[Any, ...]:
        x_dtype = self.x_dtype if self.op == "linear" else ""
        return (self.op, self.scheme, x_dtype, self.out_dtype, self.accumulate, self.n, self.k)

    def to_dict(self) -> dict[str, Any]:
        names = (
            "op",
            "scheme",
            "x_dtype",
            "out_dtype",
            "accumulate",
            "n",
            "k",
            "m",
            "backend",
            "role",
        )
        row: dict[str, Any] = {name: getattr(self, name) for name in names}
        row["config"] = None if self.config is None else dict(self.config)
        row["us"] = self.us
        return row | dict(self.extra)


@dataclass(frozen=True)
class Table:
    """A header and its rows; of rows with one key, backend and role the last one counts."""

    header: Header
    rows: tuple[Row, ...]
    path: str = ""
    _groups: dict[tuple[Any, ...], dict[int, list[Row]]] = field(
        default_factory=dict, repr=False, compare=False
    )

    @cached_property
    def backends(self) -> frozenset[str]:
        """Every backend that a row names."""
        return frozenset(row.backend for row in self.rows)

    def group(self, key: tuple[Any, ...]) -> dict[int, list[Row]]:
        """The rows of a group by M."""
        if not self._groups and self.rows:
            latest = {(row.key, row.backend, row.role): row for row in self.rows}
            for row in latest.values():
                self._groups.setdefault(row.group, {}).setdefault(row.m, []).append(row)
        return self._groups.get(key, {})


def ranked(rows: Iterable[Row], backends: tuple[str, ...], default: str = "") -> list[Row]:
    """The rows of these backends that beat the default path, fastest first.

    Args:
        rows: of one key. default: the default path's backend here; its µs count only if it is the
            one that was measured (or the row does not say which that was).
    """
    rows = list(rows)
    limit = None
    for row in rows:
        if row.role == "default" and default in ("", row.backend):
            limit = row.us
    mine = [row for row in rows if row.role != "default" and row.backend in backends]
    if limit is not None:
        mine = [row for row in mine if row.us is None or row.us <= limit * (1 - MARGIN)]
    return sorted(mine, key=lambda row: 0.0 if row.us is None else row.us)


def winner_of(rows: Iterable[Row], backends: tuple[str, ...]) -> Row | None:
    """The fastest row of these backends, or None where the default path won."""
    return next(iter(ranked(rows, backends)), None)


def nearest_m(ms: Iterable[int], m: int) -> int | None:
    """The M whose row serves m: nearest within a factor of 4, ties to the smaller.

    Above the largest row the largest serves; None where nothing is near. `Tables.find` goes on to
    the next larger M where the nearest row would take longer with another row of tiles.
    """
    known = sorted(ms)
    if not known:
        return None
    if m >= known[-1]:
        return known[-1]
    near = [have for have in known if have <= 4 * m and m <= 4 * have]
    return min(near, key=lambda have: (abs(have - m), have)) if near else None
