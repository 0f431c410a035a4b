"""RUN.jsonl → Run: what each benchmark and the tuner wrote, every figure taken over unrounded.

The surprise: a tuned table is a run too; its "selection" is the row that the look-up would take.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from anyfp8.errors import InputError
from anyfp8.tools.gemm_report import config_text
from anyfp8.tools.report import BESIDE, OURS, RACED, Cell, Entry, Panel, Run


def read_run(path: Path) -> Run:
    """What a benchmark or the tuner wrote.

    Raises:
        InputError: a file that is no run, naming the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"cannot read {path}", got=str(error), want="what anyfp8 bench --json FILE wrote"
        ) from error
    return run_of(path, _documents(path, text))


def run_of(path: Path, lines: list[dict[str, Any]]) -> Run:
    """The run of a file's documents. Raises InputError: they are none."""
    first = lines[0]
    if "format" in first and "device" in first:
        return _of_table(path)
    if {"table", "cells", "refused"} <= set(first):
        return _of_tune(path, first)
    if isinstance(first.get("header"), dict) and "protocol" in first:
        return _of_quantize(path, first)
    if first.get("kind") == "header" and first.get("op") in ("gemm", "linear", "decode"):
        return _of_lines(path, lines)
    raise _no_run(path, f"a file that starts with {sorted(first)[:6]}")


def _documents(path: Path, text: str) -> list[dict[str, Any]]:
    """One document, or one a line; half a last line, as a killed run leaves it, is left out."""
    found = []
    lines = [line for line in text.splitlines() if line.strip()]
    try:
        for number, line in enumerate(lines):
            try:
                found.append(json.loads(line))
            except ValueError:
                if number == 0:
                    found = [json.loads(text)]
                    break
                if number + 1 < len(lines):
                    raise
    except ValueError as error:
        raise _no_run(path, str(error)) from error
    if not found or not all(isinstance(entry, dict) for entry in found):
        raise _no_run(path, "no JSON object")
    return found


def _no_run(path: Path, got: str) -> InputError:
    return InputError(
        f"{path} is no run",
        got=got,
        want="what anyfp8 bench --json FILE or anyfp8 tune --json wrote, or a tuned table",
        hint="anyfp8 bench linear --json RUN.jsonl",
    )


def _of_lines(path: Path, lines: list[dict[str, Any]]) -> Run:
    header = lines[0]
    cells = [entry for entry in lines if entry.get("kind") == "cell"]
    summary = next((entry for entry in lines if entry.get("kind") == "summary"), {})
    notes = () if summary else ("the run was cut short: it has no summary",)
    try:
        if header["op"] == "decode":
            panels = _decode_panels(header, cells)
            about = f"{header['model']}, {header['scheme']}"
            notes = (*notes, *_decode_notes(header))
        else:
            panels = _product_panels(cells)
            about = str(header["scheme"])
    except (KeyError, TypeError) as error:
        raise _no_run(path, f"a cell without {error}") from error
    return Run(
        str(path), header["op"], about, header, panels, header.get("missing", {}), summary, notes
    )


def _product_panels(cells: Iterable[dict[str, Any]]) -> tuple[Panel, ...]:
    def key(cell: dict[str, Any]) -> str:
        return f"{cell['op']} {cell['scheme']} {cell['accumulate']} N={cell['n']} K={cell['k']}"

    def title(cell: dict[str, Any]) -> str:
        size = f"{cell['n']} × {cell['k']}"
        named = "" if cell["shape"] == f"{cell['n']}x{cell['k']}" else f"{cell['shape']}, "
        return f"{named}N × K = {size}"

    return _panels(cells, key, title, "M", "floor", _product_cell)


def _product_cell(cell: dict[str, Any]) -> Cell:
    floor, first = cell["roof_us"], cell["ours"][0]["name"] if cell["ours"] else ""
    entries = []
    for own in cell["ours"]:
        entries.append(
            Entry(
                own["name"],
                OURS,
                own["us"],
                _pair(own.get("interval_us")),
                own["backend"],
                config_text(own["config"]),
                own["source"],
                own["roof_share"],
                *_ratio(cell["among"].get(f"{own['name']} / {first}")),
            )
        )
    for other in cell["others"]:
        ratio, verdict = _ratio(other["ratios"].get(first))
        beside = other["beside"]
        entries.append(
            Entry(
                other["name"],
                BESIDE if beside else RACED,
                other["us"],
                _pair(other.get("interval_us")),
                share=floor / other["us"],
                ratio=ratio,
                verdict="" if beside else verdict,
                why=beside,
            )
        )
    alone = cell.get("quantize_us")
    if alone is not None and cell["ours"]:
        entries.append(Entry("our quantizer alone", OURS, alone, why="a part of each of ours"))
    return Cell(cell["m"], floor, tuple(entries), cell["failed"], cell["wrong"])


def _decode_panels(header: Mapping[str, Any], cells: Iterable[dict[str, Any]]) -> tuple[Panel, ...]:
    tp = header["decoder"]["tp"]
    what = f"{header['model']} tp={tp} {header['scheme']} layers={header['layers']}"

    def key(cell: dict[str, Any]) -> str:
        return f"decode {what} {cell['phase']} tokens={cell['context']}"

    def title(cell: dict[str, Any]) -> str:
        if cell["phase"] == "decode":
            return f"decode step, {cell['context']} tokens of context"
        return f"prefill, {cell['context']} tokens a prompt"

    return _panels(cells, key, title, "batch", "floor of the linears", _decode_cell)


def _decode_cell(cell: dict[str, Any]) -> Cell:
    floor, first = cell["floor_us"], cell["ours"][0]["name"] if cell["ours"] else ""
    entries = []
    for role, steps in ((OURS, cell["ours"]), (BESIDE, cell["others"])):
        for step in steps:
            served = step["linears"]
            backends = dict.fromkeys(one["backend"] for one in served.values())
            configs: dict[str, list[str]] = {}
            for kind, one in served.items():
                text = f"{one['backend']} {config_text(one['config'])}".strip()
                configs.setdefault(text, []).append(kind)
            ratio, verdict = _ratio(cell["ratios"].get(f"{step['name']} / {first}"))
            entries.append(
                Entry(
                    step["name"],
                    role,
                    step["us"],
                    _pair(step["interval_us"]),
                    ", ".join(backends),
                    "; ".join(f"{', '.join(kinds)}: {what}" for what, kinds in configs.items()),
                    ", ".join(dict.fromkeys(one["source"] for one in served.values())),
                    None if floor is None else floor / step["us"],
                    ratio,
                    verdict if role == OURS else "",
                    "16-bit weights" if role == BESIDE else "",
                    f"whole ~{step['model_us'] / 1e3:.3f} ms" if step["extrapolated"] else "",
                )
            )
    return Cell(cell["batch"], floor, tuple(entries), cell["failed"], cell["wrong"])


def _decode_notes(header: Mapping[str, Any]) -> list[str]:
    notes = []
    if header["layers"] < header["of"]:
        notes.append(
            f"times are of {header['layers']} of {header['of']} layers, with embedding and "
            "lm_head; the whole model's are extrapolated from one layer's"
        )
    if header["mode"] == "eager":
        notes.append("run eagerly on a CPU: no figure to quote")
    return notes


def _of_quantize(path: Path, found: dict[str, Any]) -> Run:
    def key(cell: dict[str, Any]) -> str:
        return f"quantize {cell['kind']} K={cell['k']}"

    def title(cell: dict[str, Any]) -> str:
        return f"{cell['kind']}, K = {cell['k']}"

    try:
        panels = _panels(found["cells"], key, title, "M", "copy kernel", _quantize_cell)
    except (KeyError, TypeError) as error:
        raise _no_run(path, f"a cell without {error}") from error
    header = {"op": "quantize", **found["header"]}
    missing, summary = found.get("missing", {}), found.get("summary", {})
    left = found.get("unmeasured", [])
    notes = (f"time ended before {len(left)} cells, first {left[0]}",) if left else ()
    about = "activation quantizers"
    return Run(str(path), "quantize", about, header, panels, missing, summary, notes)


def _quantize_cell(cell: dict[str, Any]) -> Cell:
    floor = cell["copy_us"]
    times = {"ours": cell["us"], "ours, allocating": cell["allocating_us"]}
    entries = [Entry(name, OURS, us, share=floor / us) for name, us in times.items()]
    for name, us in cell["peer_us"].items():
        ratio, verdict = _ratio(cell["peers"][name])
        why = "against our allocating call" if name.endswith("*") else ""
        entries.append(
            Entry(name, RACED, us, share=floor / us, ratio=ratio, verdict=verdict, why=why)
        )
    return Cell(cell["m"], floor, tuple(entries), cell["failed"])


def _of_table(path: Path) -> Run:
    from anyfp8.select.table import read_table

    table = read_table(path)
    panels = []
    for group in dict.fromkeys(row.group for row in table.rows):
        op, scheme, _, out_dtype, accumulate, n, k = group
        cells = tuple(_table_cell(m, rows) for m, rows in sorted(table.group(group).items()))
        key = f"{op} {scheme} {accumulate} N={n} K={k}"
        title = f"{op}, {scheme}, {accumulate}, N × K = {n} × {k}"
        dtype = "" if out_dtype == "bf16" else f" {out_dtype}"
        panels.append(Panel(key + dtype, title + dtype, "M", "", cells))
    head = table.header
    header = {"gpu": head.device, "op": "table", "date": head.date, **dict(head.facts)}
    about = head.source or "a tuned table"
    return Run(str(path), "table", about, header, tuple(panels), {}, {})


def _of_tune(path: Path, found: dict[str, Any]) -> Run:
    """What `tune --json` printed: its table, and the candidates that were refused."""
    table = Path(found["table"])
    run = _of_table(table if table.is_file() else path.parent / table.name)
    missing = {
        f"{r['backend']} {config_text(r['config'])}, {r['cell']}": f"{r['kind']}: {r['reason']}"
        for r in found["refused"]
    }
    missed = [f"the look-up of {x['op']} {x['cell']} differs: {x['why']}" for x in found["missed"]]
    return replace(run, path=str(path), missing=missing, notes=(*run.notes, *missed))


def _table_cell(m: int, rows: Iterable[Any]) -> Cell:
    from anyfp8.select.table import winner_of

    rows = list(rows)
    default = next((row for row in rows if row.role == "default"), None)
    winner = winner_of(rows, tuple(row.backend for row in rows if row.role == "ours")) or default
    entries = []
    if winner is not None:
        what = "default" if winner is default else winner.backend
        config = config_text(dict(winner.config or ()))
        source = winner.backend if winner is default else "row"
        entries.append(
            Entry("selection", OURS, winner.us, backend=what, config=config, source=source)
        )
    base = None if winner is None else winner.us
    for row in rows:
        role = RACED if row.role == "peer" else OURS
        name = f"default path ({row.backend or 'unknown'})" if row is default else row.backend
        ratio = None if not base or not row.us else (row.us / base,) * 3
        entries.append(
            Entry(
                name, role, row.us, backend="" if row.role == "peer" else row.backend,
                config=config_text(dict(row.config or ())), ratio=ratio,
            )
        )  # fmt: skip
    return Cell(m, None, tuple(entries))


def _panels(
    cells: Iterable[dict[str, Any]],
    key: Callable[[dict[str, Any]], str],
    title: Callable[[dict[str, Any]], str],
    x_label: str,
    floor_label: str,
    of: Callable[[dict[str, Any]], Cell],
) -> tuple[Panel, ...]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for cell in cells:
        groups.setdefault(key(cell), []).append(cell)
    return tuple(
        Panel(
            name,
            title(found[0]),
            x_label,
            floor_label,
            tuple(sorted(map(of, found), key=lambda cell: cell.x)),
        )
        for name, found in groups.items()
    )


def _ratio(
    runs: list[dict[str, float]] | None,
) -> tuple[tuple[float, float, float] | None, str]:
    """(median and the widest interval of the runs, the verdict that all of them share or "tie")."""
    if not runs:
        return None, ""
    low, high = min(run["low"] for run in runs), max(run["high"] for run in runs)
    said = {"won" if r["low"] > 1 else "lost" if r["high"] < 1 else "tie" for r in runs}
    verdict = said.pop() if len(said) == 1 else "tie"
    return (statistics.median(run["value"] for run in runs), low, high), verdict


def _pair(values: Any) -> tuple[float, float] | None:
    return None if values is None else (float(values[0]), float(values[1]))
