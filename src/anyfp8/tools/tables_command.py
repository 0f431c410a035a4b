"""anyfp8 tables list|show|check|import|export: what a person reads of `tables`."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from anyfp8 import env
from anyfp8.device import planning_device
from anyfp8.errors import InputError
from anyfp8.select.table import MARGIN, write_table
from anyfp8.tools import console, tables

if TYPE_CHECKING:
    from anyfp8.tools.tables_measure import Outcome


def list_command(*, as_json: bool) -> None:
    """Every table: whose, of which GPU, how many rows, from where."""
    found = tables.list_tables()
    if as_json:
        console.data_json([asdict(entry) for entry in found])
        return
    rows = [
        [t.device, t.origin, str(t.rows), str(t.shapes), t.date or "-", t.source] for t in found
    ]
    header = ["device", "origin", "rows", "shapes", "date", "source"]
    console.data(console.table(header, rows, left=2))


def show_command(name: str, *, n: int | None, k: int | None, as_json: bool) -> None:
    """The rows of one table."""
    table = tables.open_table(name)
    rows = tables.show(table, n, k)
    if as_json:
        console.data_json({"header": table.header.to_dict(), "rows": [r.to_dict() for r in rows]})
        return
    console.talk(f"from: {table.header.provenance}")
    cells = []
    for row in rows:
        config = " ".join(f"{key}={value}" for key, value in row.config or ())
        us = "-" if row.us is None else f"{row.us:.2f}"
        name = row.backend if row.role == "ours" else f"{row.role} {row.backend}".rstrip()
        cells.append([f"{row.n}x{row.k}", str(row.m), row.op, row.accumulate, us, name, config])
    header = ["N x K", "M", "op", "accumulate", "µs", "backend", "config"]
    console.data(console.table(header, cells))


def check_command(
    name: str | None, *, compiles: bool, as_json: bool, measuring: dict[str, Any] | None = None
) -> None:
    """What is wrong with a table, this GPU's by default; exit status 1 when something is.

    Args:
        measuring: options that only --measure takes, which must not be set.
    """
    given = [option for option, value in (measuring or {}).items() if value not in (None, False)]
    if given:
        raise InputError(
            "an option of --measure without it", got=", ".join(given), want="--measure beside it"
        )
    table = tables.open_table(name or planning_device().name)
    configs = sum(row.config is not None for row in table.rows)
    with console.progress(f"checking {configs} configurations of {table.header.device}") as shown:
        findings = []
        for finding in tables.check(table, compiles):
            findings.append(finding)
            shown.step(note=finding.where)
    errors = [f for f in findings if f.severity == "error"]
    if as_json:
        console.data_json({"configs": configs, "findings": [asdict(f) for f in findings]})
    else:
        for finding in findings:
            console.data(f"{finding.severity}: {finding.where}: {finding.message}")
        how = "compile and fit" if compiles else "are legal"
        console.data(f"{configs - len(errors)} of {configs} configurations {how}")
    if errors:
        raise typer.Exit(1)


def measure_command(
    name: str | None,
    *,
    index: int | None,
    shapes: list[str],
    m: str | None,
    drop: bool,
    to: Path | None,
    seconds: float,
    as_json: bool,
    **injected: Any,
) -> None:
    """Race the rows of this GPU's table; exit status 1 while it holds a row that loses.

    Args:
        name: device or path; by default the table of the GPU at hand.
        drop: write the table without the rows that lose, to `to` or in its place.
        injected: for tests: a timer, a place.
    """
    import torch

    from anyfp8.tools import tables_measure as work
    from anyfp8.tools.bench_command import integers
    from anyfp8.tools.gemm_shapes import parse_shapes

    if to is not None and not drop:
        raise InputError("--to says where --drop writes", got="no --drop", want="both, or neither")
    if index is not None and torch.cuda.is_available():
        if index >= torch.cuda.device_count():
            raise InputError(
                "no such GPU",
                got=f"--device-index {index}",
                want=f"0 to {torch.cuda.device_count() - 1}",
            )
        torch.cuda.set_device(index)
    if "place" not in injected:
        device = work.device_for(None if name is None else tables.open_table(name))
        name = name or device.name
    assert name is not None
    table = tables.open_table(name)
    outcome = work.measure(
        table,
        shapes=[(shape.n, shape.k) for shape in parse_shapes(shapes)],
        ms=integers(m, "--m") if m else (),
        seconds=seconds,
        **injected,
    )
    bad = outcome.bad
    written = None
    if drop and bad:
        written = to or Path(table.path)
        write_table(written, work.without(table, outcome))
    if as_json:
        console.data_json(
            {
                "table": table.path,
                "device": table.header.device,
                "margin": MARGIN,
                "rows": [entry.to_dict() for entry in outcome.raced],
                "default_rows": outcome.answered,
                "skipped": [{"where": _key_text(key), "why": why} for key, why in outcome.skipped],
                "dropped": len(bad) if written else 0,
                "written": None if written is None else str(written),
                "seconds": outcome.seconds,
            }
        )
    else:
        _show_raced(table.header.device, outcome)
        if written is not None:
            console.data(f"{written}: written without {len(bad)} rows")
    if not bad:
        console.talk("hint: docs/adding-a-table.md says how to contribute this table")
    elif written is None:
        console.talk("hint: --drop lets the default path serve where a row loses")
    if outcome.wrong_default or (bad and written is None):
        raise typer.Exit(1)


def _show_raced(device: str, outcome: Outcome) -> None:
    """What is not won, worst first, then the counts."""
    order = sorted(outcome.raced, key=lambda e: -1.0 if e.ratio is None else e.ratio)
    cells = []
    for entry in order:
        if entry.verdict in ("won", "tie"):
            continue
        row = entry.row
        times = ["-" if us is None else f"{us:.2f}" for us in (entry.us, entry.default_us)]
        ratio = "-" if entry.ratio is None else f"{entry.ratio:.3f}"
        where = f"{row.op} {row.scheme} {row.n}x{row.k}"
        cells.append(
            [where, str(row.m), *times, ratio, row.backend, entry.default, entry.verdict, entry.why]
        )
    if cells:
        header = ["op scheme N x K", "M", "µs", "default µs", "default/row", "row", "default"]
        console.data(console.table([*header, "verdict", "why"], cells))
    counts = Counter(entry.verdict for entry in outcome.raced)
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    console.data(f"{len(outcome.raced)} rows raced on {device}: {said or 'none'}")
    timed = [entry for entry in order if entry.ratio is not None]
    if timed:
        row, ratio = timed[0].row, timed[0].ratio
        console.data(f"worst: {row.n}x{row.k} M={row.m} {row.scheme}: {ratio:.3f}")
    console.data(f"{outcome.answered} keys are the default path's already")
    for key, why in outcome.skipped:
        console.data(f"skipped {_key_text(key)}: {why}")


def _key_text(key: tuple[Any, ...]) -> str:
    op, scheme, _, _, accumulate, n, k = key[:7]
    m = f" M={key[7]}" if len(key) > 7 else ""
    return f"{op} {scheme} {accumulate} N={n} K={k}{m}"


def import_command(paths: list[Path], *, folder: Path | None, source: str, as_json: bool) -> None:
    """Add the engines' files to the user's tables."""
    named = env.text("ANYFP8_TABLE_DIR")
    if folder is None and not named:
        raise InputError(
            "there is no folder for the tables",
            got="neither --to nor ANYFP8_TABLE_DIR",
            want="a folder of yours",
            hint="anyfp8 tables import FILE... --to FOLDER, then ANYFP8_TABLE_DIR=FOLDER",
        )
    written = tables.import_files(paths, folder or Path(named), source)
    _report(written, as_json)


def export_command(name: str, *, folder: Path, engine: str, as_json: bool) -> None:
    """Write a table as an engine's files."""
    written = tables.export_files(tables.open_table(name), folder, engine)
    _report(written, as_json)


def _report(written: list[Path], as_json: bool) -> None:
    if as_json:
        console.data(json.dumps([str(path) for path in written]))
    else:
        for path in dict.fromkeys(written):
            console.data(str(path))
