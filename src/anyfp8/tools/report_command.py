"""anyfp8 report RUN [RUN]: one run as text or a page; two runs compared, exit 1 on a regression."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import typer

from anyfp8.errors import InputError
from anyfp8.tools import console
from anyfp8.tools.report import OURS, RACED, Panel, Run
from anyfp8.tools.report_compare import Change, Comparison, compare
from anyfp8.tools.report_read import read_run

# of a comparison, where nothing is wrong
SHOWN = 12


def command(
    paths: Sequence[Path], *, html: Path | None, noise: float, anchored: bool, as_json: bool
) -> None:
    """Show one run, or compare two: exit status 1 when the second is slower beyond noise."""
    if len(paths) not in (1, 2):
        raise InputError("report takes one run, or two to compare", got=f"{len(paths)} files")
    runs = [read_run(path) for path in paths]
    if html is not None and len(runs) == 2:
        raise InputError(
            "a page is of one run", got="--html with two runs", want="--html with one of them"
        )
    if len(runs) == 1:
        _show(runs[0], html, as_json)
        return
    found = compare(runs[0], runs[1], noise, anchored)
    if as_json:
        console.data_json(found.to_dict())
    else:
        _show_comparison(found)
    if found.regressions:
        figures = "figure is" if len(found.regressions) == 1 else "figures are"
        console.talk(f"warning: {len(found.regressions)} {figures} slower in B, or gone")
        raise typer.Exit(1)


def write_page(run: Run, path: Path) -> None:
    """Write a run's page."""
    from anyfp8.tools.report_html import page

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(run), encoding="utf-8")
    console.talk(f"page: {path}")


def _show(run: Run, html: Path | None, as_json: bool) -> None:
    if html is not None:
        write_page(run, html)
    if as_json:
        console.data_json(asdict(run))
    elif html is None:
        from anyfp8.tools.report_html import facts

        console.data(f"{run.op}: {run.about}")
        console.data(", ".join(f"{name} {value}" for name, value in facts(run)))
        for note in run.notes:
            console.data(f"note: {note}")
        for panel in run.panels:
            console.data("")
            console.data(panel.title)
            console.data(_table(panel))
        console.talk("hint: --html FILE writes a page with plots")


def _table(panel: Panel) -> str:
    """One row a cell: ours, and the fastest raced."""
    rows = []
    for cell in panel.cells:
        first = cell.first
        floor = "-" if cell.floor_us is None else f"{cell.floor_us:.2f}"
        raced = [e for e in cell.entries if e.role == RACED and e.ratio is not None]
        best = min(raced, key=lambda e: e.ratio[0] if e.ratio else 0.0, default=None)
        second = next((e for e in cell.entries if e.role == OURS and e is not first), None)
        row = [str(cell.x), floor]
        if first is None or first.us is None:
            row += ["-", "-", "-" if first is None else first.backend]
        else:
            share = "-" if first.share is None else f"{first.share:.2f}"
            row += [f"{first.us:.2f}", share, first.backend or "-"]
        row.append("-" if second is None or not second.ratio else f"{second.ratio[0]:.3f}")
        row.append("-" if best is None else best.name)
        row.append("-" if best is None or not best.ratio else f"{best.ratio[0]:.3f} {best.verdict}")
        rows.append(row)
    header = [panel.x_label, "floor µs", "µs", "share", "served by", "2nd/1st", "fastest raced"]
    return console.table([*header, "its time/ours"], rows)


def _show_comparison(found: Comparison) -> None:
    console.data(f"A {found.a}")
    console.data(f"B {found.b}")
    for name, (one, two) in found.differs.items():
        console.data(f"note: {name} differs: {one} in A, {two} in B")
    if found.drift is not None:
        how = "divided out" if found.anchored else "not divided out; --anchored does that"
        console.data(
            f"drift: the same peers took {found.drift:.3f} of their time in B "
            f"(median of {found.peers}; {how})"
        )
    bad = found.regressions
    shown = list(found.changes[: max(SHOWN, len(bad))])
    header = ["cell", "contender", "A µs", "B µs", "B/A", "95 %", "verdict", "served by"]
    console.data(console.table(header, [_line(change) for change in shown], left=2))
    if len(shown) < len(found.changes):
        console.data(f"and {len(found.changes) - len(shown)} more, none slower")
    for name, cells in (("A", found.only_a), ("B", found.only_b)):
        if cells:
            console.data(f"only in {name}: {len(cells)} figures, first {cells[0]}")
    counts = {
        said: sum(change.verdict == said for change in found.changes)
        for said in ("slower", "broken", "same", "faster")
    }
    text = ", ".join(f"{count} {said}" for said, count in counts.items() if count)
    console.data(f"{text} (beyond {found.noise:.0%})")


def _line(change: Change) -> list[str]:
    cell = f"{change.panel}, {change.x_label} = {change.x}"
    if change.ratio is None or change.b_us is None:
        return [cell, change.name, f"{change.a_us:.2f}", "-", "-", "-", change.verdict, change.why]
    return [
        cell,
        change.name,
        f"{change.a_us:.2f}",
        f"{change.b_us:.2f}",
        f"{change.ratio:.3f}",
        f"{change.low:.3f}-{change.high:.3f}",
        change.verdict,
        change.served,
    ]
