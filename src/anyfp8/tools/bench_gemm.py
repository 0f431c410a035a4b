"""µs, share of the roof and ratios of a linear layer: the work of `anyfp8 bench gemm|linear`.

"gemm" multiplies quantized operands through `select`; "linear" takes bf16 through `linear.dispatch`
exactly as a layer does. Ours (selection on, kill switch, each backend's default) and all others of
a cell run in one race over rotating weight copies. Every contender is judged against exact products
first, on fresh random data: a wrong one gets no number, and when it is ours the command fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch

from anyfp8 import gemm
from anyfp8.errors import DeviceError, InputError
from anyfp8.gemm.base import Config
from anyfp8.problem import Scheme
from anyfp8.tools import console, timing
from anyfp8.tools.gemm_contenders import (
    KILL_SWITCH,
    SELECTION,
    Contender,
    Layer,
    Setting,
    first_line,
)
from anyfp8.tools.gemm_operands import Operands, judge
from anyfp8.tools.gemm_peers import baselines, find_peers
from anyfp8.tools.gemm_report import Cell, Other, Own, line, summarize
from anyfp8.tools.gemm_roof import Roof, measure_roof
from anyfp8.tools.gemm_shapes import MS, Shape
from anyfp8.tools.timing import Call, Timing

MIN_ROUNDS, RUNS = 5, 2
# a part of a linear, timed beside
QUANTIZER = "quantizer alone"
BLOCK_US = 800.0


class Timer(Protocol):
    """`timing.race`, or a test's stand-in."""

    def __call__(
        self,
        contenders: Mapping[str, Sequence[Call]],
        rounds: int = ...,
        block_us: float = ...,
        at_least: int = ...,
    ) -> dict[str, Timing]: ...


class Budget:
    """Seconds shared by the cells to come: rounds shrink before anything is left out."""

    def __init__(
        self, seconds: float, cells: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock, self._cells = clock, cells
        self._end = clock() + seconds
        self._overheads: list[float] = []

    @property
    def left(self) -> float:
        return self._end - self._clock()

    def rounds(self, most: int, seconds_a_round: float) -> int:
        """Rounds of each run that the next cell may take, at least MIN_ROUNDS."""
        overhead = sum(self._overheads) / max(1, len(self._overheads))
        share = self.left / max(1, self._cells) - overhead
        return max(MIN_ROUNDS, min(most, int(share / (RUNS * seconds_a_round))))

    def finished(self, overhead: float) -> None:
        """A cell is done and spent `overhead` seconds outside its timed rounds."""
        self._cells -= 1
        self._overheads.append(overhead)


def measure(
    layer: Layer, m: int, *, roof: Roof, budget: Budget, most_rounds: int, timer: Timer
) -> Cell:
    """Judge and race one cell; once the budget is spent, at the fewest rounds."""
    began = time.monotonic()
    setting, shape, operands = layer.setting, layer.shape, layer.operands
    contenders, failed = layer.contenders(m)
    errors: dict[str, float] = {}
    wrong: dict[str, str] = {}
    for contender in contenders:
        try:
            errors[contender.name], complaint = judged(contender, operands, m)
        except Exception as error:
            # a call of ours that raises is as wrong as a number
            report = failed if contender.choice is None else wrong
            report[contender.name] = first_line(error)
            continue
        if complaint:
            wrong[contender.name] = complaint
    right = [c for c in contenders if c.name in errors and c.name not in wrong]
    moved = _bytes(setting, shape, m)
    roof_us = roof.us(shape.n, shape.k, m, moved - shape.n * shape.k)
    at_least = max(operands.copies, min(64, round(BLOCK_US / roof_us)))
    # a graph to warm up and a block of the same length or of BLOCK_US
    cost = len(right) * (1.5 * at_least * roof_us + max(BLOCK_US, 1.5 * at_least * roof_us)) / 1e6
    rounds = budget.rounds(most_rounds, max(cost, 1e-6))
    start = time.monotonic()
    calls = {c.name: c.calls for c in right}
    quantizer = layer.quantizer(m)
    if quantizer and calls:
        calls[QUANTIZER] = quantizer
    races, dropped = raced(calls, timer, rounds, at_least)
    failed |= dropped
    right = [c for c in right if c.name not in dropped]
    spent = time.monotonic() - start
    budget.finished(
        max(0.0, time.monotonic() - began - spent) + max(0.0, spent - cost * 2 * rounds)
    )

    def us(name: str) -> float:
        return min(race[name].us for race in races)

    def interval(name: str) -> tuple[float, float]:
        return timing.interval_us([race[name] for race in races])

    own = tuple(
        _own(c, us(c.name), errors[c.name], shape, m, moved, roof_us, interval(c.name))
        for c in right
        if c.choice is not None
    )
    others = tuple(
        Other(
            c.name,
            us(c.name),
            errors[c.name],
            c.beside,
            {o.name: tuple(timing.ratio(r[c.name], r[o.name]) for r in races) for o in own},
            interval(c.name),
        )
        for c in right
        if c.choice is None
    )
    among = {
        f"{a.name} / {b.name}": tuple(timing.ratio(r[a.name], r[b.name]) for r in races)
        for b in own[:1]
        for a in own[1:]
    }
    mine = tuple(c.name for c in contenders if c.choice is not None and c.name in wrong)
    return Cell(
        setting.op, shape.name, shape.n, shape.k, m, setting.scheme.name, layer.accumulate,
        operands.copies, rounds, roof_us, own, others, among, wrong, mine, failed,
        us(QUANTIZER) if QUANTIZER in calls and QUANTIZER not in dropped else None,
    )  # fmt: skip


def run(
    op: str,
    shapes: Sequence[Shape],
    *,
    ms: Sequence[int] = MS,
    scheme: Scheme | None = None,
    accumulate: str = "auto",
    kill_switch: str = "both",
    all_backends: bool = False,
    peers_folder: str | Path | None = None,
    slow_peers: bool = False,
    seconds: float = 150.0,
    rounds: int = 15,
    seed: int | None = None,
    warm: bool = True,
    sink: Callable[[dict[str, Any]], None] | None = None,
    timer: Timer = timing.race,
    place: str = "cuda",
    roof: Roof | None = None,
) -> dict[str, Any]:
    """Measure every cell.

    Args:
        kill_switch: "off" races the selection, "on" the default path, "both" both.
        all_backends: race each willing backend's default configuration too.
        peers_folder: of other libraries, see `gemm_peers`.
        seconds: for everything; rounds shrink to fit, to MIN_ROUNDS at least.
        seed: of the data; the time of day without one.
        warm: compile kernels in parallel processes first.
        sink: called with the header, each cell and the summary as they come: the JSON Lines.
        roof: measured here unless given.

    Returns:
        {"header", "cells": [Cell …], "summary"}.

    Raises:
        DeviceError: no CUDA GPU. InputError: a scheme or an option that cannot be raced.
    """
    if place == "cuda" and not torch.cuda.is_available():
        raise DeviceError(
            f"cannot time a {op}",
            got="no CUDA GPU",
            want="a machine with one",
            hint="anyfp8 explain shows what would be chosen on any GPU",
        )
    began = time.monotonic()
    scheme = scheme or Scheme("channel", "token", True)
    ours = contestants(kill_switch)
    if all_backends:
        kinds = ("w8a8",) if op == "gemm" else ("w8a8", "weight_only")
        # the last resort refuses nothing and dequantizes the weight in every call
        ours += tuple(b.name for b in gemm.backends() if b.kind in kinds and b.name != "dequant")
    setting = Setting(op, scheme, tuple(sorted(ms)), ours, accumulate)
    seed = int(time.time()) if seed is None else seed
    sink = sink or (lambda _: None)
    peers, missing = find_peers(peers_folder, slow_peers)
    header = {
        **timing.header(), "op": op, "scheme": scheme.name, "seed": seed, "runs": RUNS,
        "most_rounds": rounds, "missing": missing,
    }  # fmt: skip
    if warm:
        from anyfp8.tools.gemm_warm import warm_up

        header["warm_up_s"] = warm_up(setting, shapes, peers_folder, slow_peers)
    everyone = [*baselines(), *peers]
    with torch.inference_mode():
        roof = roof or measure_roof([(s.n, s.k) for s in shapes], timer)
        header["roof"] = asdict(roof)
        sink({"kind": "header", **header})
        cells: list[Cell] = []
        left = seconds - (time.monotonic() - began)
        budget = Budget(left, len(shapes) * len(setting.ms))
        for shape in shapes:
            copies = copies_for(shape, place)
            operands = Operands(shape.n, shape.k, setting.ms[-1], place, seed, copies)
            layer = Layer(setting, shape, operands, everyone)
            for m in setting.ms:
                cell = measure(layer, m, roof=roof, budget=budget, most_rounds=rounds, timer=timer)
                cells.append(cell)
                sink({"kind": "cell", **cell.to_dict()})
                console.talk(line(cell))
    summary = {**summarize(cells), "seconds": round(time.monotonic() - began, 1)}
    sink({"kind": "summary", **summary})
    return {"header": header, "cells": cells, "summary": summary}


def contestants(kill_switch: str) -> tuple[str, ...]:
    """Names of ours for "off", "on" or "both". Raises InputError for any other text."""
    found = {"off": (SELECTION,), "on": (KILL_SWITCH,), "both": (SELECTION, KILL_SWITCH)}
    if kill_switch not in found:
        raise InputError("not a kill switch", got=kill_switch, want="on, off or both")
    return found[kill_switch]


def copies_for(shape: Shape, place: str) -> int:
    """Weight copies that make the L2 cold."""
    if place == "cpu":
        return 2
    l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return timing.buffers_for(shape.n * shape.k, l2)


def raced(
    calls: dict[str, list[Call]], timer: Timer, rounds: int, at_least: int
) -> tuple[list[dict[str, Timing]], dict[str, str]]:
    """RUNS races, without whoever cannot be captured into a graph: {name: why}."""
    dropped: dict[str, str] = {}
    if not calls:
        return [], dropped
    try:
        return [timer(calls, rounds, BLOCK_US, at_least) for _ in range(RUNS)], dropped
    except Exception as failure:
        for name, each in calls.items():
            try:
                timer({name: each}, 1, BLOCK_US, at_least)
            except Exception as error:
                dropped[name] = f"cannot be timed: {first_line(error)}"
        if not dropped:
            raise failure
    rest = {name: each for name, each in calls.items() if name not in dropped}
    return [timer(rest, rounds, BLOCK_US, at_least) for _ in range(RUNS)] if rest else [], dropped


def judged(contender: Contender, operands: Operands, m: int) -> tuple[float, str]:
    """(error, complaint or "") on poisoned memory; of the last copy, so that copies are judged."""
    nan = float("nan")
    poison = torch.full((m, operands.n), nan, dtype=torch.bfloat16, device=operands.place)
    del poison
    y = contender.calls[-1]()
    assert isinstance(y, torch.Tensor)
    exact = operands.exact(contender.weight, contender.activation)
    return judge(y, exact, m, contender.allowed)


def _bytes(setting: Setting, shape: Shape, m: int) -> int:
    """Weights and activations as they arrive, and the bf16 output."""
    x_bytes = 2 if setting.op == "linear" else 1
    return shape.n * shape.k + m * shape.k * x_bytes + 2 * m * shape.n


def _own(
    c: Contender,
    us: float,
    error: float,
    shape: Shape,
    m: int,
    moved: int,
    roof_us: float,
    interval: tuple[float, float],
) -> Own:
    assert c.choice is not None
    config: Config = c.choice.config
    return Own(
        c.name, c.choice.backend, config.to_dict(), c.choice.source, c.choice.reason, us,
        2 * m * shape.n * shape.k / us / 1e6, moved / us / 1e3, roof_us / us, error, interval,
    )  # fmt: skip
