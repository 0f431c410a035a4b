"""anyfp8 tables list|show|check|import|export: what a person reads of `tables`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import typer

from anyfp8 import env
from anyfp8.errors import InputError
from anyfp8.tools import console, tables


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


def check_command(name: str, *, compiles: bool, as_json: bool) -> None:
    """What is wrong with a table; exit status 1 when something is."""
    table = tables.open_table(name)
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
