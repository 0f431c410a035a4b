"""Cells → lines, a table and a summary that names the worst cell first.

A ratio is time(other) / time(ours): above 1 ours is faster. A cell is won or lost against another
only where the intervals of all runs say so, otherwise it is a tie; what is beside is never raced.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from anyfp8 import gemm
from anyfp8.tools import console
from anyfp8.tools.timing import Ratio, geometric_mean

Ratios = tuple[Ratio, ...]
TORCH, BF16 = "torch", "torch bf16"


@dataclass(frozen=True)
class Own:
    """One of ours in a cell.

    Attributes:
        name: "selection", "kill switch" or the backend that was forced.
        backend, config, source, reason: what served it, and why.
        tflops, gbps: of the useful work. roof_share: roof / us.
        error: relative rms error against the exact product.
        interval_us: 95 % interval over the runs.
    """

    name: str
    backend: str
    config: dict[str, Any]
    source: str
    reason: str
    us: float
    tflops: float
    gbps: float
    roof_share: float
    error: float
    interval_us: tuple[float, float] | None = None


@dataclass(frozen=True)
class Other:
    """Another library in a cell.

    Attributes:
        beside: why it is not raced, "" where it is.
        ratios: name of ours -> its ratio in each run.
        interval_us: 95 % interval over the runs.
    """

    name: str
    us: float
    error: float
    beside: str
    ratios: dict[str, Ratios]
    interval_us: tuple[float, float] | None = None


@dataclass(frozen=True)
class Cell:
    """One (shape, m): everything that was raced there.

    Attributes:
        among: "b / a" -> time(b) / time(a) between ours.
        wrong: name -> what is wrong with its result; it has no time.
        wrong_ours: those of them that are ours.
        failed: name -> why it has no result.
        quantize_us: of quantizing x alone, which a linear's time includes; None for products.
    """

    op: str
    shape: str
    n: int
    k: int
    m: int
    scheme: str
    accumulate: str
    copies: int
    rounds: int
    roof_us: float
    ours: tuple[Own, ...]
    others: tuple[Other, ...]
    among: dict[str, Ratios]
    wrong: dict[str, str]
    wrong_ours: tuple[str, ...]
    failed: dict[str, str]
    quantize_us: float | None = None

    @property
    def name(self) -> str:
        return f"{self.op} {self.shape} m={self.m}"

    @property
    def raced(self) -> tuple[Other, ...]:
        return tuple(other for other in self.others if not other.beside)

    def fastest(self, own: Own) -> Other | None:
        """Whoever is fastest against one of ours among those raced."""
        raced = [other for other in self.raced if own.name in other.ratios]
        return min(raced, key=lambda o: middle(o.ratios[own.name]), default=None)

    def to_dict(self) -> dict[str, Any]:
        """JSON-serializable, with the verdicts."""
        cell = asdict(self)
        for other, entry in zip(self.others, cell["others"], strict=True):
            entry["verdicts"] = {
                name: "beside" if other.beside else verdict(ratios)
                for name, ratios in other.ratios.items()
            }
        return cell


def verdict(ratios: Ratios) -> str:
    """ "won" or "lost" where every run says so, else "tie"."""
    said = {ratio.verdict for ratio in ratios}
    return said.pop() if len(said) == 1 else "tie"


def middle(ratios: Ratios) -> float:
    """The ratio over all runs."""
    return statistics.median(ratio.value for ratio in ratios)


def summarize(cells: Sequence[Cell]) -> dict[str, Any]:
    """The worst cell first, then what the project promises, then means of the first of ours."""
    summary: dict[str, Any] = {"worst": _worst(cells)}
    summary["wrong_results"] = {cell.name: cell.wrong for cell in cells if cell.wrong}
    summary["ours_wrong"] = sum(bool(cell.wrong_ours) for cell in cells)
    summary["not_slower_than_torch"] = _against_torch(cells)
    pairs = [(cell, own, cell.fastest(own)) for cell in cells for own in cell.ours[:1]]
    said = [verdict(other.ratios[own.name]) for _, own, other in pairs if other is not None]
    summary["against_the_fastest_raced"] = {w: said.count(w) for w in ("won", "tie", "lost")}
    among: dict[str, list[Ratios]] = {}
    ratios: dict[str, list[float]] = {}
    for cell in cells:
        for name, found in cell.among.items():
            among.setdefault(name, []).append(found)
        for own in cell.ours[:1]:
            for other in cell.others:
                name = f"{other.name} ({other.beside})" if other.beside else other.name
                ratios.setdefault(name, []).append(middle(other.ratios[own.name]))
    summary["among_ours"] = {name: _means(found) for name, found in among.items()}
    summary["geometric_means"] = {
        name: round(geometric_mean(found), 3) for name, found in sorted(ratios.items())
    }
    shares = [(own.roof_share, cell.name) for cell in cells for own in cell.ours[:1]]
    if shares:
        summary["roof_share"] = {
            "least": [round(min(shares)[0], 3), min(shares)[1]],
            "geometric_mean": round(geometric_mean([share for share, _ in shares]), 3),
        }
    if any(cell.op == "linear" for cell in cells):
        summary["fastest"] = _fastest(cells)
    summary["backends"] = _counted(f"{o.backend} ({o.source})" for c in cells for o in c.ours[:1])
    summary["fewest_rounds"] = min((cell.rounds for cell in cells), default=0)
    summary["failed"] = _failures(cells)
    return summary


def _fastest(cells: Sequence[Cell]) -> dict[str, Any]:
    """Whether FP8, weight-only or 16-bit weights are fastest, and where it is not FP8."""
    counts: dict[str, int] = {}
    exceptions = []
    for cell in cells:
        times: dict[str, float] = {}
        for own in cell.ours:
            kind = "fp8" if gemm.backend(own.backend).kind == "w8a8" else "weight-only"
            times[kind] = min(own.us, times.get(kind, own.us))
        dense = next((other.us for other in cell.others if other.name == BF16), None)
        if dense is not None:
            times["bf16"] = dense
        if not times:
            continue
        kind = min(times, key=times.__getitem__)
        counts[kind] = counts.get(kind, 0) + 1
        if kind != "fp8" and "fp8" in times:
            ratio = round(times["fp8"] / times[kind], 3)
            exceptions.append({"cell": cell.name, "kind": kind, "fp8_takes": ratio})
    return {"cells": counts, "not_fp8": exceptions}


def _worst(cells: Sequence[Cell]) -> dict[str, Any] | None:
    found = [
        (middle(other.ratios[own.name]), cell, own, other)
        for cell in cells
        for own in cell.ours[:1]
        for other in cell.raced
    ]
    if not found:
        return None
    ratio, cell, own, other = min(found, key=lambda entry: entry[0])
    return {
        "cell": cell.name,
        "ours": f"{own.backend} ({own.source})",
        "other": other.name,
        "ratio": round(ratio, 3),
        "verdict": verdict(other.ratios[own.name]),
    }


def _against_torch(cells: Sequence[Cell]) -> dict[str, Any]:
    """Is the selection nowhere slower than torch's product, our quantizer included?"""
    entries = [
        (middle(other.ratios["selection"]), cell, other)
        for cell in cells
        for other in cell.raced
        if other.name.startswith(TORCH) and "selection" in other.ratios
    ]
    slower = sorted(
        (entry for entry in entries if verdict(entry[2].ratios["selection"]) == "lost"),
        key=lambda entry: entry[0],
    )
    missing = [
        cell.name
        for cell in cells
        if not any(o.name.startswith(TORCH) and "selection" in o.ratios for o in cell.raced)
    ]
    return {
        # a cell without the comparison proves nothing
        "holds": bool(entries) and not slower and not missing,
        "cells": len({cell.name for _, cell, _ in entries}),
        "slower": [
            {"cell": cell.name, "other": other.name, "ratio": round(ratio, 3)}
            for ratio, cell, other in slower
        ],
        "not_compared": missing,
    }


def _means(found: Sequence[Ratios]) -> dict[str, Any]:
    said = [verdict(ratios) for ratios in found]
    mean = geometric_mean([middle(ratios) for ratios in found])
    return {"geometric_mean": round(mean, 3), **{w: said.count(w) for w in ("won", "tie", "lost")}}


def _failures(cells: Sequence[Cell]) -> dict[str, dict[str, Any]]:
    """name -> (cells without it, its first reason)."""
    found: dict[str, dict[str, Any]] = {}
    for cell in cells:
        for name, why in cell.failed.items():
            entry = found.setdefault(name, {"cells": 0, "why": why})
            entry["cells"] += 1
    return found


def _counted(names: Any) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return counts


def config_text(config: dict[str, Any]) -> str:
    """ "64x128x256 w4 s3" of a tile, "8x16x128 w4 s3 p8" of 8 parts, "a=1" of anything else."""
    if not {"block_m", "block_n", "block_k", "num_warps", "num_stages"} <= set(config):
        return " ".join(f"{key}={value}" for key, value in config.items())
    tile = "x".join(str(config[f"block_{axis}"]) for axis in "mnk")
    more = f" p{config['parts']}" if config.get("parts", 1) > 1 else ""
    more += " swap" if config.get("swap") else ""
    return f"{tile} w{config['num_warps']} s{config['num_stages']}{more}"


def line(cell: Cell) -> str:
    """A cell as it is measured, with everybody in it."""
    parts = [f"{cell.shape} {cell.n}x{cell.k} m={cell.m}"]
    for own in cell.ours:
        what = f"{own.backend} {config_text(own.config)}".rstrip()
        parts.append(
            f"{own.name} {own.us:.2f} µs {own.tflops:.0f} TFLOP/s {own.gbps:.0f} GB/s "
            f"roof {own.roof_share:.2f} [{what}, {own.source}]"
        )
    for own in cell.ours[:1]:
        for other in cell.others:
            said = "beside" if other.beside else verdict(other.ratios[own.name])
            parts.append(f"{other.name} {middle(other.ratios[own.name]):.3f} {said}")
    parts += [f"WRONG {name}: {why}" for name, why in cell.wrong.items()]
    return " | ".join(parts)


def table(cells: Sequence[Cell]) -> str:
    """One row a cell: the first of ours against torch, the default path and the fastest raced."""
    rows = []
    for cell in cells:
        if not cell.ours:
            gap = ["-"] * 9
            rows.append([cell.shape, str(cell.m), *gap])
            continue
        own = cell.ours[0]
        torch_rows = [other for other in cell.raced if other.name.startswith(TORCH)]
        others = [other for other in cell.raced if other not in torch_rows]
        best = min(others, key=lambda o: middle(o.ratios[own.name]), default=None)
        default = next(iter(cell.among.values()), None)
        rows.append(
            [
                cell.shape,
                str(cell.m),
                f"{own.us:.1f}",
                f"{own.tflops:.0f}",
                f"{own.gbps:.0f}",
                f"{own.roof_share:.2f}",
                f"{own.backend[:12]} {own.source[:6]}",
                _short(torch_rows[0].ratios[own.name] if torch_rows else None),
                _short(default),
                "-" if best is None else best.name[:12],
                _short(None if best is None else best.ratios[own.name]),
            ]
        )
    header = ["shape", "m", "µs", "TFLOP/s", "GB/s", "roof", "ours", "torch/ours", "off/on"]
    return console.table([*header, "peer", "peer/ours"], rows)


def _short(ratios: Ratios | None) -> str:
    return "-" if ratios is None else f"{middle(ratios):.2f} {verdict(ratios)}"
