"""(device, problem) → the best measured backend and configuration: tuned tables.

One JSON Lines file a device: a header with the device's facts and how it was measured, then rows:
one for each backend of ours, one for the default path, some for peers, with µs where measured. The
winner is derived when a row is looked up, among the backends that are willing then.

The surprise: a row may say "default". It was measured too, and keeps a neighbour's tile from being
taken for an M where the default path is faster.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from anyfp8 import env, gemm
from anyfp8.device import CATALOGUE, Device, find_device, sibling
from anyfp8.errors import InputError, TableError
from anyfp8.gemm.base import Backend, Config
from anyfp8.problem import Problem
from anyfp8.select.rows import FORMAT, Header, Row, Table, nearest_m, ranked
from anyfp8.select.rows import MARGIN as MARGIN
from anyfp8.select.rows import winner_of as winner_of

log = logging.getLogger(__name__)

# waves of tiles may grow this much faster than M before a row of a larger M serves instead
_STRAIN = 1.2
# tiles that an SM computes side by side take this power of their number in time: two 1.27 to 1.36
# times as long as one, six 1.08 times as long as five (H200)
_GROWTH = 0.4


@dataclass(frozen=True)
class Winner:
    """What the rows of one M say.

    Attributes:
        what: the backend's name or "default". us: of one call, None of imported rows.
    """

    backend: Backend
    config: Config
    what: str
    us: float | None


@dataclass(frozen=True)
class Found:
    """What a look-up answers."""

    backend: Backend
    config: Config
    source: str
    reason: str
    provenance: str


@dataclass(frozen=True)
class Tables:
    """The tables that apply to a device, in order: the user's, then the shipped one.

    Attributes:
        tables: (source, table), source "user table" or "shipped table".
        borrowed: name of the sibling whose tables these are, or "".
    """

    device: Device
    tables: tuple[tuple[str, Table], ...]
    borrowed: str = ""

    @property
    def backends(self) -> frozenset[str]:
        """Every backend that a row names."""
        return frozenset(name for _, table in self.tables for name in table.backends)

    def find(self, problem: Problem, device: Device, willing: list[Backend]) -> Found | None:
        """The winner for a problem among the willing backends, or None where no row applies."""
        kinds = {backend.kind for backend in willing}
        for source, table in self.tables:
            for key in _groups_of(problem):
                by_m = table.group(key)
                if len(kinds) > 1 and (key[0] != problem.op or kinds - _kinds(by_m, willing)):
                    continue
                serving = self._serving(by_m, problem, device, willing)
                if serving is None:
                    continue
                m, row, why = serving
                lender = f" of {self.borrowed}" if self.borrowed else ""
                reason = f"the row of M={m}{lender} says {row.what}{why}"
                return Found(row.backend, row.config, source, reason, table.header.provenance)
        _say_once(
            f"no tuned row for N={problem.n}, K={problem.k}, {problem.scheme.name} on "
            f"{device.name}: the ranker decides; {file_name(device.name)} in ANYFP8_TABLE_DIR "
            f"would be read; `anyfp8 tune {problem.n},{problem.k}` makes it on that GPU, "
            "`anyfp8 tables import` from SGLang's or vLLM's files"
        )
        return None

    def _serving(
        self,
        by_m: dict[int, list[Row]],
        problem: Problem,
        device: Device,
        willing: list[Backend],
    ) -> tuple[int, Winner, str] | None:
        """The M whose rows serve, what they say, and why it is not the nearest M."""
        m = nearest_m(by_m, problem.m)
        found = None if m is None else self._winner(by_m[m], problem, device, willing)
        if m is None or found is None:
            return None
        above = next((have for have in sorted(by_m) if m < have <= 4 * problem.m), None)
        if m >= problem.m or found.what == "default" or above is None:
            return m, found, ""
        larger = self._winner(by_m[above], problem, device, willing)
        if larger is None or not _gives_way(found, larger, m, problem, device):
            return m, found, ""
        return above, larger, f"; that of M={m} would take longer with another row of tiles"

    def _winner(
        self, rows: list[Row], problem: Problem, device: Device, willing: list[Backend]
    ) -> Winner | None:
        by_name = {backend.name: backend for backend in willing}
        for row in ranked(rows, tuple(by_name), willing[0].name):
            backend = by_name[row.backend]
            config = usable(row, backend, problem, device)
            if config is not None:
                return Winner(backend, config, backend.name, row.us)
        default = next((row for row in rows if row.role == "default"), None)
        if default is None:
            return None
        backend = willing[0]
        us = default.us if default.backend in ("", backend.name) else None
        return Winner(backend, backend.default_config(problem, device), "default", us)


def usable(row: Row, backend: Backend, problem: Problem, device: Device) -> Config | None:
    """A row's configuration as it can run here, lowered if it must be; one log line if it is."""
    if row.config is None:
        return backend.default_config(problem, device)
    try:
        config = backend.config_class.from_dict(dict(row.config))
    except (InputError, TypeError) as error:
        _say_once(f"a row for {backend.name} is not read: {error}")
        return None
    why = backend.illegal(config, problem, device)
    if why is None:
        return config
    low = backend.lowered(config, problem, device)
    what = "dropped" if low is None else f"lowered to {low}"
    _say_once(f"{config} for M={row.m} N={row.n} K={row.k} is {what} on {device.name}: it {why}")
    return low


def _gives_way(row: Winner, larger: Winner, m: int, problem: Problem, device: Device) -> bool:
    """Whether the row of m, stretched to the problem's M, is slower than that of the next larger M.

    One token more may need one row of tiles more, and where those no longer are on the SMs at
    once, twice the time: 10.1 µs at M = 256 and 18.4 at 257 (4096 x 4096, H200), where the row of
    384 takes 13.7. Where they are, two share an SM. The larger M's tile is never slower than what
    it measured, which may even be less than at m.
    """
    asked = replace(problem, m=m)
    waves = row.backend.waves(row.config, asked, device)
    if row.backend.waves(row.config, problem, device) * m > _STRAIN * waves * problem.m:
        return True
    if row.us is None or larger.us is None:
        return False
    tiles = row.backend.tiles_an_sm(row.config, asked, device)
    growth = row.backend.tiles_an_sm(row.config, problem, device) / tiles
    return growth > 1 and larger.us < row.us * growth**_GROWTH


def _kinds(by_m: dict[int, list[Row]], willing: list[Backend]) -> set[str]:
    """Kinds of the willing backends that the rows have times of."""
    names = {row.backend for rows in by_m.values() for row in rows}
    return {backend.kind for backend in willing if backend.name in names}


def _groups_of(problem: Problem) -> Iterator[tuple[Any, ...]]:
    # time with quantization decides for a linear; without such rows the product's own time does,
    # but never between backends that quantize and backends that do not: those must have been raced
    for op in dict.fromkeys((problem.op, "gemm")):
        x_dtype = problem.x_dtype if op == "linear" else ""
        scheme = problem.scheme.name
        tail = (problem.out_dtype, problem.accumulate, problem.n, problem.k)
        yield (op, scheme, x_dtype, *tail)


@cache
def _say_once(message: str) -> None:
    log.info(message)


def load_tables(device: Device, snapshot: env.Snapshot | None = None) -> Tables:
    """The user's and the shipped tables for a device, or for its sibling.

    Raises:
        TableError: a file that is there cannot be read.
        DeviceError: ANYFP8_TABLE_DEVICE is unknown.
    """
    settings = env.snapshot() if snapshot is None else snapshot
    folder = str(settings["ANYFP8_TABLE_DIR"])
    named = str(settings["ANYFP8_TABLE_DEVICE"])
    name = find_device(named).name if named else device.name
    found = _tables_of(name, folder)
    if found or named:
        return Tables(device, found, name if named and name != device.name else "")
    other = sibling(device, [n for n in CATALOGUE if any(p.is_file() for p in _paths(n, folder))])
    return Tables(device, _tables_of(other, folder) if other else (), other or "")


def _tables_of(name: str, folder: str) -> tuple[tuple[str, Table], ...]:
    return tuple(
        (source, _read_cached(path, path.stat().st_mtime_ns))
        for source, path in zip(("shipped table", "user table"), _paths(name, folder), strict=False)
        if path.is_file()
    )[::-1]


def _paths(name: str, folder: str) -> list[Path]:
    """The shipped table's file and, with a folder of the user's, the one there."""
    return [shipped_path(name), *([Path(folder) / file_name(name)] if folder else [])]


def file_name(device_name: str) -> str:
    """`nvidia_l40s.jsonl` of "NVIDIA L40S"."""
    return re.sub(r"[^a-z0-9]+", "_", device_name.lower()).strip("_") + ".jsonl"


def shipped_folder() -> Path:
    return Path(str(resources.files("anyfp8.select"))) / "tables"


def shipped_path(device_name: str) -> Path:
    return shipped_folder() / file_name(device_name)


@cache
def _read_cached(path: Path, modified: int) -> Table:
    return read_table(path)


def read_table(path: Path) -> Table:
    """Read a table. Raises TableError: names the file and the line."""
    from anyfp8.select.schema import header_of, row_of

    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TableError(
            f"cannot read the table {path}",
            got=str(error),
            want="UTF-8 text that you may read",
            hint="move the file away, or set ANYFP8_TABLE_DIR to another folder",
        ) from error
    header: Header | None = None
    rows: list[Row] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
            if header is None:
                header = header_of(values)
            else:
                rows.append(row_of(values))
        except ValueError as error:
            # a killed run may leave half a last line: the rows before it are good
            if number == len(lines) and header is not None and not isinstance(error, InputError):
                log.warning("the last line of %s is cut short and left out", path)
                continue
            raise TableError(
                f"cannot read the table {path}",
                got=f"line {number}: {error}",
                want=f"a header of format {FORMAT}, then rows",
                hint="correct or remove that line, or move the file away",
            ) from error
    if header is None:
        raise TableError(
            f"the table {path} is empty",
            got="no line",
            want="a header line, then rows",
            hint="remove the file: without it the ranker decides",
        )
    return Table(header, tuple(rows), str(path))


def write_table(path: Path, table: Table) -> None:
    """Write a table in one piece: into a file beside it, then renamed."""
    lines = [table.header.to_dict(), *(row.to_dict() for row in table.rows)]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".tmp")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)


def merged(old: Table, new: Iterable[Row]) -> Table:
    """`old` with rows added; a new row replaces the one of the same key, backend and role."""
    rows = {(row.key, row.backend, row.role): row for row in (*old.rows, *new)}
    return replace(old, rows=tuple(rows.values()), _groups={})


def known_backend(name: str) -> bool:
    return name in {backend.name for backend in gemm.backends()}
