"""Tables → what the command `anyfp8 tables` shows: list, rows, problems, import and export.

Functions return data; the command line prints it. `check` compiles every configuration for the
table's own GPU, which needs Triton and no GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from anyfp8 import env, gemm
from anyfp8.device import Device, find_device
from anyfp8.errors import AnyFp8Error, InputError, TableError
from anyfp8.gemm.compile import Source, compile_for
from anyfp8.integrations import sglang_tables
from anyfp8.problem import Problem, Scheme
from anyfp8.select import M_GRID
from anyfp8.select.table import (
    Row,
    Table,
    file_name,
    known_backend,
    merged,
    read_table,
    shipped_folder,
    shipped_path,
    usable,
    write_table,
)


@dataclass(frozen=True)
class Listed:
    """One table file: where it is, whose, and how much is in it."""

    path: str
    origin: str  # "user" or "shipped"
    device: str
    rows: int
    shapes: int
    source: str
    date: str


@dataclass(frozen=True)
class Finding:
    """Something that is wrong ("error") or worth knowing ("note") about a table."""

    severity: str
    where: str
    message: str


def list_tables(folder: str | None = None) -> list[Listed]:
    """The user's tables (ANYFP8_TABLE_DIR, or `folder`), then the shipped ones."""
    user = env.text("ANYFP8_TABLE_DIR") if folder is None else folder
    places = [("user", Path(user))] if user else []
    places.append(("shipped", shipped_folder()))
    found = []
    for origin, place in places:
        for path in sorted(place.glob("*.jsonl")):
            table = read_table(path)
            shapes = {(row.n, row.k) for row in table.rows}
            head = table.header
            found.append(
                Listed(
                    str(path),
                    origin,
                    head.device,
                    len(table.rows),
                    len(shapes),
                    head.source,
                    head.date,
                )
            )
    return found


def open_table(name: str) -> Table:
    """A table by path, or by device name (the user's before the shipped one).

    Raises:
        TableError: there is none.
    """
    if name.endswith(".jsonl"):
        return read_table(Path(name))
    device = find_device(name)
    folder = env.text("ANYFP8_TABLE_DIR")
    candidates = [Path(folder) / file_name(device.name)] if folder else []
    for path in (*candidates, shipped_path(device.name)):
        if path.is_file():
            return read_table(path)
    raise TableError(
        f"there is no table for {device.name}",
        want=f"{file_name(device.name)} in ANYFP8_TABLE_DIR or among the shipped ones",
        hint="anyfp8 tables list",
    )


def show(table: Table, n: int | None = None, k: int | None = None) -> list[Row]:
    """The rows of a table, all or of one shape, by shape and M."""
    rows = [row for row in table.rows if n in (None, row.n) and k in (None, row.k)]
    return sorted(rows, key=lambda row: (row.n, row.k, row.scheme, row.op, row.m, row.us or 0.0))


def check(table: Table, compiles: bool = True) -> Iterator[Finding]:
    """What is wrong with a table, row by row.

    Args:
        compiles: also compile every configuration for the table's GPU and compare its shared memory
            with what a block can have there.
    """
    try:
        device = find_device(table.header.device)
    except AnyFp8Error as error:
        yield Finding("error", "header", str(error))
        return
    counts = Counter((row.key, row.backend, row.role) for row in table.rows)
    for (key, backend, role), count in counts.items():
        if count > 1:
            yield Finding(
                "note", _where(key), f"{count} rows for {backend or role}: the last counts"
            )
    yield from _coverage(table)
    compiled: dict[Source, str | None] = {}
    for row in table.rows:
        if row.config is not None and row.role == "ours":
            yield from _check_row(row, device, compiles, compiled)


def _check_row(
    row: Row, device: Device, compiles: bool, compiled: dict[Source, str | None]
) -> Iterator[Finding]:
    where = _where(row.key)
    if not known_backend(row.backend):
        yield Finding("note", where, f"backend {row.backend!r} is unknown here: never taken")
        return
    backend = gemm.backend(row.backend)
    try:
        scheme = Scheme.parse(row.scheme)
        config = backend.config_class.from_dict(dict(row.config or ()))
    except (InputError, TypeError) as error:
        yield Finding("note", where, f"never taken: {error}")
        return
    names = (row.x_dtype, row.out_dtype)
    problem = Problem(row.op, scheme, row.m, row.n, row.k, *names, False, row.accumulate)
    refusal = backend.why_not(problem, device)
    if refusal:
        yield Finding("error", where, f"unreachable: {row.backend} {refusal}")
        return
    why = backend.illegal(config, problem, device)
    if why:
        low = usable(row, backend, problem, device)
        what = "dropped" if low is None else f"lowered to {low}"
        yield Finding("error", where, f"{what}: {config} {why}")
        return
    source_of: Callable[..., Source] | None = getattr(backend, "source", None)
    if not compiles or source_of is None:
        return
    source = source_of(problem, config, device)
    if source not in compiled:
        compiled[source] = _compiled(source, device)
    if compiled[source]:
        yield Finding("error", where, f"{config} {compiled[source]}")


def _compiled(source: Source, device: Device) -> str | None:
    try:
        need = compile_for(source, device.arch).metadata.shared
    except AnyFp8Error:
        raise
    except Exception as error:
        # Triton raises whatever its passes raise
        return f"does not compile for {device.arch.name}: {error}"
    if need > device.shared_memory:
        return f"needs {need:,} B of shared memory and {device.name} has {device.shared_memory:,}"
    return None


def _coverage(table: Table) -> Iterator[Finding]:
    """Ms of the grid that no row of a group serves."""
    for key in dict.fromkeys(row.group for row in table.rows):
        known = sorted(table.group(key))
        missing = [
            m for m in M_GRID if m < known[-1] and not any(h <= 4 * m and m <= 4 * h for h in known)
        ]
        if missing:
            text = ", ".join(map(str, missing))
            yield Finding("note", _where((*key, known[0])), f"no row near M = {text}: the ranker's")


def _where(key: tuple[object, ...]) -> str:
    op, scheme, _, out_dtype, accumulate, n, k, m = key
    return f"{op} {scheme} N={n} K={k} M={m} {out_dtype} {accumulate}"


def import_files(paths: Iterable[Path], folder: Path, source: str = "imported") -> list[Path]:
    """Add the engines' files to the tables in a folder; returns the tables written."""
    written = []
    for table in sglang_tables.read_files(paths, source):
        device = find_device(table.header.device)
        path = folder / file_name(device.name)
        header = replace(table.header, device=device.name)
        old = read_table(path) if path.is_file() else Table(header, ())
        write_table(path, merged(old, table.rows))
        written.append(path)
    return written


def export_files(table: Table, folder: Path, engine: str = "sglang") -> list[Path]:
    """Write a table as the engines' files. Raises InputError: neither "sglang" nor "vllm"."""
    if engine not in ("sglang", "vllm"):
        raise InputError("not an engine", got=repr(engine), want="'sglang' or 'vllm'")
    return sglang_tables.write_files(sglang_tables.export(table, engine), folder)
