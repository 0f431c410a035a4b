"""us(B) / us(A), cell by cell, worst first: is the second run slower than noise explains?

Two runs are two processes, so their rounds do not pair up: the interval of a change comes from both
runs' own intervals, and a change counts only where that whole interval lies beyond `noise` (medians
of separate runs differ by 1 to 4 %). What the peers, which nobody changed, took more or less is the
drift of the machine: shown, and divided out only on request.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from anyfp8.errors import InputError
from anyfp8.tools.report import OURS, Cell, Entry, Panel, Run

NOISE = 0.04
# a software that a peer's time depends on
VERSIONS = ("torch", "triton", "driver")


@dataclass(frozen=True)
class Change:
    """One contender of ours in one cell of both runs.

    Attributes:
        ratio: us(B) / us(A). low, high: its 95 % interval; equal to it where a run has none.
        verdict: "slower", "faster", "same", or "broken" (a time in A, none in B).
        why: of "broken". served: the backend of B, with A's before it where it is another.
    """

    panel: str
    x_label: str
    x: int
    name: str
    a_us: float
    b_us: float | None
    ratio: float | None
    low: float | None
    high: float | None
    verdict: str
    served: str
    why: str = ""

    @property
    def bad(self) -> bool:
        return self.verdict in ("slower", "broken")


@dataclass(frozen=True)
class Comparison:
    """Two runs.

    Attributes:
        changes: worst first.
        drift: median of us(B) / us(A) of the peers, None without common ones.
        anchored: whether the changes were divided by it.
        only_a, only_b: cells that one run has.
        differs: header field -> (A, B).
    """

    a: str
    b: str
    noise: float
    changes: tuple[Change, ...]
    drift: float | None
    peers: int
    anchored: bool
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    differs: dict[str, tuple[Any, Any]]

    @property
    def regressions(self) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.bad)

    def to_dict(self) -> dict[str, Any]:
        found = asdict(self)
        found["regressions"] = len(self.regressions)
        return found


def compare(a: Run, b: Run, noise: float = NOISE, anchored: bool = False) -> Comparison:
    """The changes from run A to run B.

    Args:
        noise: share by which a whole interval must be off before it counts.
        anchored: divide by the drift of the peers.

    Raises:
        InputError: the runs are of different things or GPUs, or no cell is common; or there is no
            common peer to anchor to.
    """
    if not 0 <= noise < 1:
        raise InputError(
            "not a share of noise", got=str(noise), want="from 0 up to 1, such as 0.04"
        )
    _check(a, b)
    pairs = list(_pairs(a, b))
    drifts = [
        theirs.us / ours.us
        for _, x, y in pairs
        for ours, theirs in _common(x, y, ours=False)
        if ours.us and theirs.us
    ]
    drift = statistics.median(drifts) if drifts else None
    if anchored and drift is None:
        raise InputError(
            "there is nothing to anchor to",
            got="no peer that both runs measured",
            want="runs with torch or another library in them",
        )
    by = drift if anchored and drift is not None else 1.0
    changes = [
        _change(panel.title, panel.x_label, x, y, ours, noise, by)
        for panel, x, y in pairs
        for ours in x.entries
        if ours.role == OURS and ours.us
    ]
    if not changes:
        raise _nothing(a, b)
    changes.sort(key=lambda c: -math.inf if c.ratio is None else -c.ratio)
    one, two = _names(a), _names(b)
    differs = {
        name: (a.header.get(name), b.header.get(name))
        for name in (*VERSIONS, "anyfp8", "power_limit_w")
        if a.header.get(name) != b.header.get(name)
    }
    return Comparison(
        a.path, b.path, noise, tuple(changes), drift, len(drifts), anchored,
        tuple(name for name in one if name not in two),
        tuple(name for name in two if name not in one), differs,
    )  # fmt: skip


def _check(a: Run, b: Run) -> None:
    for what, one, two in (("operation", a.op, b.op), ("GPU", a.gpu, b.gpu)):
        if one != two:
            raise InputError(
                f"these runs cannot be compared: another {what}",
                got=f"{one} in {a.path}, {two} in {b.path}",
                want=f"two runs of one {what}",
                hint="anyfp8 report RUN shows each alone",
            )


def _nothing(a: Run, b: Run) -> InputError:
    one, two = (", ".join(panel.key for panel in run.panels[:2]) or "nothing" for run in (a, b))
    return InputError(
        "these runs have no cell in common",
        got=f"{one} in A, {two} in B",
        want="the same scheme, shapes and Ms (or model, layers and batches) in both",
    )


def _names(run: Run) -> dict[str, None]:
    return {
        f"{panel.title}, {panel.x_label} = {cell.x}, {entry.name}": None
        for panel in run.panels
        for cell in panel.cells
        for entry in cell.entries
        if entry.role == OURS
    }


def _pairs(a: Run, b: Run) -> Iterator[tuple[Panel, Cell, Cell]]:
    others = {panel.key: {cell.x: cell for cell in panel.cells} for panel in b.panels}
    for panel in a.panels:
        for cell in panel.cells:
            other = others.get(panel.key, {}).get(cell.x)
            if other is not None:
                yield panel, cell, other


def _common(a: Cell, b: Cell, ours: bool) -> Iterator[tuple[Entry, Entry]]:
    for entry in a.entries:
        other = b.entry(entry.name)
        if (entry.role == OURS) == ours and other is not None:
            yield entry, other


def _change(
    panel: str, x_label: str, a: Cell, b: Cell, ours: Entry, noise: float, by: float
) -> Change:
    assert ours.us is not None
    other = b.entry(ours.name)
    if other is None or not other.us:
        why = b.wrong.get(ours.name) or b.refused.get(ours.name) or "it is not in the second run"
        return Change(
            panel, x_label, a.x, ours.name, ours.us, None, None, None, None, "broken",
            ours.backend, why,
        )  # fmt: skip
    ratio = other.us / ours.us / by
    spread = math.hypot(_spread(ours), _spread(other))
    low, high = ratio * math.exp(-spread), ratio * math.exp(spread)
    verdict = "slower" if low > 1 + noise else "faster" if high < 1 / (1 + noise) else "same"
    before, after = (f"{e.backend} {e.config}".strip() for e in (ours, other))
    served = after if before == after else f"{before} → {after}"
    return Change(
        panel, x_label, a.x, ours.name, ours.us, other.us, ratio, low, high, verdict, served
    )


def _spread(entry: Entry) -> float:
    """Half of the interval of log µs; 0 where the run has none."""
    if entry.interval is None or entry.interval[0] <= 0:
        return 0.0
    return math.log(entry.interval[1] / entry.interval[0]) / 2
