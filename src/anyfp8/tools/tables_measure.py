"""time(default path) / time(row), for every row that a table would serve: `tables check --measure`.

A row is raced as the runtime would run it: through the look-up, in a table that holds this row
alone, against the kill switch, on fresh data and in pairs. It is lost where it takes more than 2 %
longer and no run's interval says otherwise; a wrong result loses without a race. The surprise: all
rows of a key that beat the table's own default time are raced, since dropping the first would let
the next one serve.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from typing import Any

import torch

from anyfp8 import gemm
from anyfp8.device import Device, device_of, find_device
from anyfp8.errors import AnyFp8Error, DeviceError, InputError
from anyfp8.problem import Scheme
from anyfp8.select.table import MARGIN, Header, Row, Table, Tables, ranked
from anyfp8.tools import console, timing
from anyfp8.tools.bench_gemm import BLOCK_US, Budget, Timer, copies_for, judged, raced
from anyfp8.tools.gemm_contenders import KILL_SWITCH, Contender, Layer, Setting, first_line
from anyfp8.tools.gemm_operands import Operands
from anyfp8.tools.gemm_report import Ratios, middle
from anyfp8.tools.gemm_shapes import Shape

# assumed of a row without µs when its graph is sized
GUESS_US = 50.0


@dataclass(frozen=True)
class Raced:
    """One row against the default path.

    Attributes:
        row: as the table has it. default: the default path's backend. us, default_us: measured.
        ratios: time(default) / time(row), a run each.
        verdict: "won", "tie", "lost" (by more than the margin), "slower" (by less), "wrong",
            "unreachable" (the look-up answers something else) or "failed".
        why: of the last three.
    """

    row: Row
    default: str
    us: float | None
    default_us: float | None
    ratios: Ratios
    verdict: str
    why: str = ""

    @property
    def bad(self) -> bool:
        """Whether the table is better without it."""
        return self.verdict in ("lost", "wrong", "failed")

    @property
    def ratio(self) -> float | None:
        return middle(self.ratios) if self.ratios else None

    def to_dict(self) -> dict[str, Any]:
        names = ("op", "scheme", "accumulate", "n", "k", "m", "backend")
        entry: dict[str, Any] = {name: getattr(self.row, name) for name in names}
        entry["config"] = None if self.row.config is None else dict(self.row.config)
        return entry | {
            "default": self.default,
            "us": self.us,
            "default_us": self.default_us,
            "ratio": self.ratio,
            "ratios": [asdict(ratio) for ratio in self.ratios],
            "verdict": self.verdict,
            "why": self.why,
        }


@dataclass(frozen=True)
class Outcome:
    """What `measure` found.

    Attributes:
        raced: in the table's order. answered: keys that the default path serves, by the table.
        skipped: (key, why) of what cannot be raced here.
        wrong_default: keys at which the default path itself gave a wrong result.
    """

    raced: tuple[Raced, ...]
    answered: int
    skipped: tuple[tuple[tuple[Any, ...], str], ...]
    wrong_default: tuple[tuple[Any, ...], ...]
    seconds: float

    @property
    def bad(self) -> tuple[Raced, ...]:
        return tuple(entry for entry in self.raced if entry.bad)


def device_for(table: Table | None) -> Device:
    """The GPU at hand, which must be the table's.

    Raises:
        DeviceError: there is none, or it is another one.
    """
    if not torch.cuda.is_available():
        raise DeviceError(
            "cannot race the rows of a table",
            got="no CUDA GPU",
            want="the GPU that the table is for",
            hint="anyfp8 tables check without --measure compiles every row on any machine",
        )
    device = device_of(torch.device("cuda", torch.cuda.current_device()))
    if table is not None and find_device(table.header.device).name != device.name:
        raise DeviceError(
            f"cannot race the rows of a table for {table.header.device}",
            got=f"this GPU is {device.name}",
            want="the table's own GPU",
            hint="--device-index takes another GPU of this machine",
        )
    return device


def measure(
    table: Table,
    *,
    shapes: Sequence[tuple[int, int]] = (),
    ms: Sequence[int] = (),
    seconds: float = 150.0,
    rounds: int = 15,
    seed: int | None = None,
    warm: bool = True,
    timer: Timer = timing.race,
    place: str = "cuda",
) -> Outcome:
    """Race the rows of a table that its own look-up would take.

    Args:
        shapes: only these (N, K); all by default. ms: only these M.
        seconds: for everything; rounds shrink to fit.

    Raises:
        InputError: no row is left to race.
    """
    began = time.monotonic()
    seed = int(time.time()) if seed is None else seed
    device = device_of(torch.device(place))
    groups = _groups(table, shapes, ms)
    if not groups:
        raise InputError(
            "no row of the table is left to race",
            got=f"--shape {shapes}, --m {ms}" if shapes or ms else "a table without rows of ours",
            want="a shape and an M that it has",
            hint="anyfp8 tables show",
        )
    if warm and place != "cpu":
        _warm(table.header, groups)
    count = sum(len(by_m) for by_m in groups.values())
    budget = Budget(seconds - (time.monotonic() - began), count)
    entries: list[Raced] = []
    skipped: list[tuple[tuple[Any, ...], str]] = []
    wrong_default: list[tuple[Any, ...]] = []
    answered = 0
    with torch.inference_mode(), console.progress("racing rows", count) as shown:
        for key, by_m in groups.items():
            try:
                layer = _layer(key, by_m, place, seed)
            except AnyFp8Error as error:
                skipped.append((key, error.what))
                continue
            for m, rows in by_m.items():
                shown.step(note=f"N={key[5]} K={key[6]} M={m}")
                try:
                    default = layer.contender(KILL_SWITCH, m)
                except AnyFp8Error as error:
                    skipped.append(((*key, m), error.what))
                    continue
                assert default.choice is not None
                serving = ranked(rows, _names(), default.choice.backend)
                if not serving:
                    answered += 1
                    continue
                complaint = _complaint(default, layer.operands, m)
                if complaint:
                    wrong_default.append((*key, m))
                    skipped.append(((*key, m), f"the default path is wrong: {complaint}"))
                    continue
                entries += _race(
                    layer, m, serving, default, table.header, device, budget, rounds, timer
                )
    spent = round(time.monotonic() - began, 1)
    return Outcome(tuple(entries), answered, tuple(skipped), tuple(wrong_default), spent)


def _names() -> tuple[str, ...]:
    return tuple(backend.name for backend in gemm.backends())


def _groups(
    table: Table, shapes: Sequence[tuple[int, int]], ms: Sequence[int]
) -> dict[tuple[Any, ...], dict[int, list[Row]]]:
    """group -> M -> rows, of those asked for."""
    found: dict[tuple[Any, ...], dict[int, list[Row]]] = {}
    for group in dict.fromkeys(row.group for row in table.rows):
        n, k = group[5:7]
        if shapes and (n, k) not in shapes:
            continue
        by_m = {m: rows for m, rows in sorted(table.group(group).items()) if not ms or m in ms}
        by_m = {m: rows for m, rows in by_m.items() if any(r.role == "ours" for r in rows)}
        if by_m:
            found[group] = by_m
    return found


def _layer(group: tuple[Any, ...], by_m: dict[int, Any], place: str, seed: int) -> Layer:
    op, scheme, x_dtype, out_dtype, accumulate, n, k = group
    if {x_dtype, out_dtype} - {"", "bf16"}:
        raise InputError(f"only bf16 rows are raced, not {x_dtype or out_dtype}")
    setting = Setting(op, Scheme.parse(scheme), tuple(by_m), (KILL_SWITCH,), accumulate)
    if setting.scheme.weight == "block" and (n % 128 or k % 128):
        raise InputError(f"blocks of {n}x{k} are not whole, which is not raced")
    shape = Shape(f"{n}x{k}", n, k)
    operands = Operands(n, k, max(by_m), place, seed, copies_for(shape, place))
    return Layer(setting, shape, operands, ())


def _race(
    layer: Layer,
    m: int,
    rows: Sequence[Row],
    default: Contender,
    header: Header,
    device: Device,
    budget: Budget,
    most_rounds: int,
    timer: Timer,
) -> Iterator[Raced]:
    began = time.monotonic()
    assert default.choice is not None
    name = default.choice.backend
    contenders: dict[str, tuple[Row, Contender]] = {}
    for row in rows:
        table = Tables(device, (("user table", Table(header, (row,))),))
        label = f"{row.backend} {m}"
        try:
            found = layer.of_tables(label, m, table)
        except AnyFp8Error as error:
            yield Raced(row, name, None, None, (), "unreachable", first_line(error))
            continue
        assert found.choice is not None
        if found.choice.source != "user table" or found.choice.backend != row.backend:
            why = dict(found.choice.refused).get(row.backend, found.choice.reason)
            yield Raced(row, name, None, None, (), "unreachable", f"{row.backend} {why}")
            continue
        complaint = _complaint(found, layer.operands, m)
        if complaint:
            yield Raced(row, name, None, None, (), "wrong", complaint)
            continue
        contenders[label] = (row, found)
    if not contenders:
        budget.finished(time.monotonic() - began)
        return
    calls = {label: found.calls for label, (_, found) in contenders.items()}
    calls[KILL_SWITCH] = default.calls
    guess = min(row.us or GUESS_US for row, _ in contenders.values())
    at_least = max(layer.operands.copies, min(64, round(BLOCK_US / guess)))
    cost = len(calls) * max(BLOCK_US, at_least * guess) / 1e6
    rounds = budget.rounds(most_rounds, cost)
    races, dropped = raced(calls, timer, rounds, at_least)
    for label, (row, _) in contenders.items():
        if label in dropped or KILL_SWITCH in dropped:
            why = dropped.get(label, dropped.get(KILL_SWITCH, ""))
            verdict = "failed" if label in dropped else "unreachable"
            yield Raced(row, name, None, None, (), verdict, why)
            continue
        ratios = tuple(timing.ratio(race[KILL_SWITCH], race[label]) for race in races)
        us, default_us = (min(race[who].us for race in races) for who in (label, KILL_SWITCH))
        yield Raced(row, name, us, default_us, ratios, verdict_of(ratios))
    budget.finished(max(0.0, time.monotonic() - began - 2 * rounds * cost))


def verdict_of(ratios: Ratios) -> str:
    """ "lost" by more than the margin, "slower" by less, "won" or "tie"; all runs must say so."""
    said = {ratio.verdict for ratio in ratios}
    if said == {"won"}:
        return "won"
    if said != {"lost"}:
        return "tie"
    return "lost" if middle(ratios) < 1 / (1 + MARGIN) else "slower"


def _complaint(contender: Contender, operands: Operands, m: int) -> str:
    try:
        return judged(contender, operands, m)[1]
    except Exception as error:
        # a call of ours that raises is as wrong as a number
        return first_line(error)


def without(table: Table, outcome: Outcome) -> Table:
    """The table without its bad rows; a key that loses one says "default" in its place."""
    bad = {(e.row.key, e.row.backend, e.row.role): e for e in outcome.bad}
    rows: list[Row] = []
    said = {row.key for row in table.rows if row.role == "default"}
    for row in table.rows:
        entry = bad.get((row.key, row.backend, row.role))
        if entry is None:
            rows.append(row)
        elif row.key not in said:
            said.add(row.key)
            plain = replace(row, backend=entry.default, role="default", config=None, extra=())
            rows.append(replace(plain, us=entry.default_us))
    facts = dict(table.header.facts)
    facts["checked"] = {
        "date": date.today().isoformat(),
        "raced": len(outcome.raced),
        "dropped": len(bad),
    }
    return Table(replace(table.header, facts=tuple(facts.items())), tuple(rows), table.path)


def _warm(header: Header, groups: dict[tuple[Any, ...], dict[int, list[Row]]]) -> None:
    """Compile what will be raced in parallel processes; see `gemm_warm`."""
    from anyfp8.tools.gemm_warm import in_processes, processes_for

    flat = [row.to_dict() for by_m in groups.values() for rows in by_m.values() for row in rows]
    # rows of one shape side by side, so that a process builds few operands
    count = processes_for(len(flat))
    step = -(-len(flat) // count)
    head = header.to_dict()
    index = torch.cuda.current_device()
    shares = [
        {"header": head, "rows": flat[start : start + step], "index": index}
        for start in range(0, len(flat), step)
    ]
    in_processes(__name__, shares)


def work(text: str) -> None:
    """One process's share: call each row and the default path once, whatever they give or raise."""
    from anyfp8.select.schema import header_of, row_of

    share = json.loads(text)
    place = "cpu"
    if share["index"] is not None:
        torch.cuda.set_device(share["index"])
        place = "cuda"
    header, rows = header_of(share["header"]), tuple(map(row_of, share["rows"]))
    device = device_of(torch.device(place))
    with torch.inference_mode():
        for group, by_m in _groups(Table(header, rows), (), ()).items():
            try:
                layer = _layer(group, by_m, place, 0)
            except AnyFp8Error:
                continue
            for m, found in by_m.items():
                for row in found:
                    one = Tables(device, (("user table", Table(header, (row,))),))
                    try:
                        layer.of_tables(f"{row.backend} {row.role} {m}", m, one).calls[0]()
                        layer.contender(KILL_SWITCH, m).calls[0]()
                    except Exception as error:
                        console.talk(f"{row.backend} {group} {m} {error}")
            if place == "cuda":
                torch.cuda.synchronize()
