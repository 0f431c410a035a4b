"""Cells of `bench decode` → lines, a table and a summary that names the worst cell first.

Times in the table are of the whole model, with ~ where they follow from fewer layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from anyfp8.tools import console
from anyfp8.tools.gemm_contenders import KILL_SWITCH, SELECTION
from anyfp8.tools.gemm_report import Ratios, middle, verdict
from anyfp8.tools.timing import geometric_mean

DENSE = "torch bf16"


@dataclass(frozen=True)
class Step:
    """One contender's time of one step.

    Attributes:
        us: of the layers that were built, with embedding and lm_head. interval_us: 95 %.
        layer_us: of one layer: (us - ends) / layers.
        model_us: of all layers. extrapolated: whether that is more layers than were built.
        tokens_per_s: of the whole model.
        linears: kind -> backend, config, source, reason.
        error: the greatest relative error of a judged linear.
    """

    name: str
    us: float
    interval_us: tuple[float, float]
    layer_us: float
    model_us: float
    extrapolated: bool
    tokens_per_s: float
    linears: dict[str, dict[str, Any]]
    error: float | None = None


@dataclass(frozen=True)
class Cell:
    """One (phase, batch).

    Attributes:
        tokens: of one step: rows of its linears. context: tokens attended to.
        ends_us: of embedding, last norm and lm_head.
        floor_us: of the linears of all built layers, by the roof; None without one.
        ratios: "b / a" -> time(b) / time(a), a run each; a is the first of `ours`.
        logits: name -> relative difference of its logits to the first of ours.
        wrong: name -> what is wrong with it. failed: name -> why it has no result.
    """

    phase: str
    batch: int
    tokens: int
    context: int
    rounds: int
    ends_us: float
    floor_us: float | None
    ours: tuple[Step, ...]
    others: tuple[Step, ...]
    ratios: dict[str, Ratios]
    logits: dict[str, float]
    wrong: dict[str, str]
    failed: dict[str, str]

    @property
    def name(self) -> str:
        return f"{self.phase} batch={self.batch}"

    def to_dict(self) -> dict[str, Any]:
        cell = asdict(self)
        cell["verdicts"] = {name: verdict(ratios) for name, ratios in self.ratios.items()}
        return cell


def line(cell: Cell) -> str:
    """A cell as it is measured."""
    parts = [cell.name]
    for step in (*cell.ours, *cell.others):
        whole = f" (whole model {step.model_us:.0f}, extrapolated)" if step.extrapolated else ""
        parts.append(f"{step.name} {step.us:.0f} µs{whole}")
    parts += [f"{n} {middle(r):.3f} {verdict(r)}" for n, r in cell.ratios.items()]
    parts += [f"WRONG {name}: {why}" for name, why in cell.wrong.items()]
    return " | ".join(parts)


def table(cells: Sequence[Cell]) -> str:
    """One row a cell; times are of the whole model, with ~ where extrapolated."""
    rows = []
    for cell in cells:
        steps = {step.name: step for step in (*cell.ours, *cell.others)}
        row = [cell.phase, str(cell.batch), str(cell.context)]
        for name in (SELECTION, KILL_SWITCH, DENSE):
            step = steps.get(name)
            mark = "~" if step is not None and step.extrapolated else ""
            row.append("-" if step is None else f"{mark}{step.model_us / 1e3:.3f}")
        for name in (KILL_SWITCH, DENSE):
            ratios = cell.ratios.get(f"{name} / {SELECTION}")
            row.append("-" if ratios is None else f"{middle(ratios):.3f} {verdict(ratios)}")
        first = cell.ours[0] if cell.ours else None
        row.append("-" if first is None else f"{first.tokens_per_s:.0f}")
        rows.append(row)
    header = ["phase", "batch", "context", "ms", "ms kill switch", "ms bf16", "off/on", "bf16/ours"]
    return console.table([*header, "tokens/s"], rows)


def summarize(cells: Sequence[Cell]) -> dict[str, Any]:
    """The worst cell first, then what the table and the kill switch differ by."""
    found = [(middle(r), cell, name) for cell in cells for name, r in cell.ratios.items()]
    summary: dict[str, Any] = {"worst": None}
    if found:
        ratio, cell, name = min(found, key=lambda entry: entry[0])
        said = verdict(cell.ratios[name])
        summary["worst"] = {
            "cell": cell.name, "what": name, "ratio": round(ratio, 3), "verdict": said
        }  # fmt: skip
    summary["wrong_results"] = {cell.name: cell.wrong for cell in cells if cell.wrong}
    summary["ours_wrong"] = sum(bool(cell.wrong) for cell in cells)
    means: dict[str, list[float]] = {}
    for ratio, cell, name in found:
        means.setdefault(f"{cell.phase}: {name}", []).append(ratio)
    summary["geometric_means"] = {n: round(geometric_mean(v), 3) for n, v in sorted(means.items())}
    summary["fewest_rounds"] = min((cell.rounds for cell in cells), default=0)
    summary["extrapolated"] = any(s.extrapolated for cell in cells for s in cell.ours)
    return summary
