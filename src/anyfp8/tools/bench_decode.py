"""TPOT and prefill of a decoder stack: the work of `anyfp8 bench decode`.

A stack with random weights runs with the selection's kernels, with the kill switch on and in bf16,
each step one CUDA graph, replayed in alternating blocks. Every linear of the first and the last
layer is judged on the inputs that it meets, before anything is timed. The surprise: fewer layers
than the model has give the time of one layer, and the whole model's follows from it; figures made
that way say "extrapolated". Without a GPU the stack runs eagerly: right, but no figure to quote.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from anyfp8.device import device_of
from anyfp8.errors import DeviceError, InputError
from anyfp8.linear import Fp8Linear
from anyfp8.linear.warm import warmup
from anyfp8.problem import Scheme
from anyfp8.select import Request
from anyfp8.tools import console, timing
from anyfp8.tools.bench_gemm import Budget, Timer, contestants
from anyfp8.tools.decode_judge import judged
from anyfp8.tools.decode_report import DENSE, Cell, Step, line, summarize
from anyfp8.tools.decode_shapes import Decoder
from anyfp8.tools.decode_stack import Stack, Weights, applied, by_kind
from anyfp8.tools.gemm_contenders import SELECTION, Setting, first_line
from anyfp8.tools.gemm_roof import Roof, measure_roof
from anyfp8.tools.timing import Call, Timing

ENDS = "ends"
PHASES = ("decode", "prefill")
RUNS, BLOCK_US = 2, 20_000.0
# left for activations, graphs and the libraries' own
SPARE_BYTES = 12 * 10**9


def run(
    shape: Decoder,
    *,
    layers: int | None = None,
    batches: Sequence[int] = (1, 8, 32),
    context: int = 1024,
    prefill: int = 512,
    scheme: Scheme | None = None,
    kill_switch: str = "both",
    dense: bool = True,
    seconds: float = 100.0,
    rounds: int = 15,
    seed: int | None = None,
    warm: bool = True,
    sink: Callable[[dict[str, Any]], None] | None = None,
    place: str | None = None,
    timer: Timer | None = None,
    roof: Roof | None = None,
) -> dict[str, Any]:
    """Measure every (phase, batch).

    Args:
        layers: to build; all by default.
        context: tokens that a decode step attends to. prefill: tokens of a prompt; 0 leaves it out.
        dense: race a bf16 stack too, where memory allows.
        place: "cuda" where there is a GPU, else "cpu".
        warm: compile kernels in parallel processes first.
        sink: called with the header, each cell and the summary as they come: the JSON Lines.

    Returns:
        {"header", "cells": [Cell …], "summary"}.

    Raises:
        InputError: an option that cannot be measured. DeviceError: the stack does not fit.
    """
    began = time.monotonic()
    place = place or ("cuda" if torch.cuda.is_available() else "cpu")
    where = torch.device(place)
    device = device_of(where)
    on_gpu = where.type == "cuda"
    scheme = scheme or Scheme("channel", "token", True)
    built = shape.layers if layers is None else min(layers, shape.layers)
    if min(built, context, *batches) < 1 or prefill < 0:
        raise InputError(
            "cannot build this stack",
            got=f"layers {built}, context {context}, prefill {prefill}, batch {list(batches)}",
            want="positive numbers",
        )
    names = contestants(kill_switch)
    ms = sorted({*batches, *(b * prefill for b in batches if prefill)})
    setting = Setting("linear", scheme, tuple(ms), names)
    failed = _room(shape, built, max(batches), max(context, prefill), where) if dense else {}
    seed = int(time.time()) if seed is None else seed
    header: dict[str, Any] = {
        **timing.header(), "op": "decode", "model": shape.name, "decoder": shape.to_dict(),
        "scheme": scheme.name, "layers": built, "of": shape.layers, "context": context,
        "prefill": prefill, "mode": "cuda graph" if on_gpu else "eager", "device": device.name,
        "seed": seed, "runs": RUNS, "most_rounds": rounds, "missing": failed,
    }  # fmt: skip
    sink = sink or (lambda _: None)
    timer = timer or (timing.race if on_gpu else eager_race)
    if warm and on_gpu:
        from anyfp8.tools.gemm_warm import warm_up

        header["warm_up_s"] = warm_up(setting, shape.linears, None, False)
    cells: list[Cell] = []
    with torch.inference_mode():
        if roof is None and on_gpu:
            roof = measure_roof([(s.n, s.k) for s in shape.linears], timer)
        header["roof"] = None if roof is None else asdict(roof)
        weights = Weights(shape, built, scheme, where, seed)
        linears = {name: weights.fp8_linears(_request(name, device.vendor)) for name in names}
        for name in names:
            _warm(name, linears[name], ms)
        if dense and DENSE not in failed:
            linears[DENSE] = weights.dense_linears()
        sink({"kind": "header", **header})
        phases = PHASES if prefill else PHASES[:1]
        budget = Budget(seconds - (time.monotonic() - began), len(batches) * len(phases))
        for batch in sorted(batches):
            for phase in phases:
                cell = _measure(
                    phase, batch, weights, linears, header, roof, budget, rounds, timer, failed
                )
                cells.append(cell)
                sink({"kind": "cell", "op": "decode", **cell.to_dict()})
                console.talk(line(cell))
                if on_gpu:
                    # a graph's memory goes back to the driver only when asked
                    torch.cuda.empty_cache()
    summary = {**summarize(cells), "seconds": round(time.monotonic() - began, 1)}
    sink({"kind": "summary", **summary})
    return {"header": header, "cells": cells, "summary": summary}


def _warm(name: str, layers: torch.nn.ModuleList, ms: Sequence[int]) -> None:
    """What a caller does before it captures a graph."""
    try:
        warmup(layers, ms)
    except Exception as error:
        # whoever cannot be warmed fails again, and is named, where it is judged
        console.talk(f"warning: {name} is not warmed: {first_line(error)}")


def _measure(
    phase: str,
    batch: int,
    weights: Weights,
    linears: Mapping[str, torch.nn.ModuleList],
    header: Mapping[str, Any],
    roof: Roof | None,
    budget: Budget,
    most_rounds: int,
    timer: Timer,
    failed: dict[str, str],
) -> Cell:
    began = time.monotonic()
    shape, context, length = weights.shape, header["context"], header["prefill"]
    stack = Stack(weights, batch, context, length)
    tokens = batch if phase == "decode" else batch * length
    step = stack.decode if phase == "decode" else stack.prefill
    wrong: dict[str, str] = {}
    errors: dict[str, float] = {}
    found: dict[str, torch.Tensor] = {}
    for name, layers in linears.items():
        try:
            if name == DENSE:
                step(applied(layers))
                continue
            found[name], errors[name], complaint = judged(step, layers, weights)
        except Exception as error:
            complaint = first_line(error)
        if complaint:
            wrong[name] = complaint
    right = {name: layers for name, layers in linears.items() if name not in wrong}
    calls: dict[str, list[Call]] = {
        name: [lambda a=applied(layers): step(a)] for name, layers in right.items()
    }
    start = stack.tokens if phase == "decode" else stack.prompt
    calls[ENDS] = [lambda: stack.ends(start)]
    floor = None if roof is None else weights.layers * _floor(shape, roof, tokens)
    guess = floor or 1e4
    rounds = budget.rounds(most_rounds, len(calls) * max(BLOCK_US, 2 * guess) / 1e6)
    timed = time.monotonic()
    races = [timer(calls, rounds, BLOCK_US, 1) for _ in range(RUNS)]
    spent = time.monotonic() - timed
    budget.finished(max(0.0, time.monotonic() - began - spent))
    ends_us = min(race[ENDS].us for race in races)

    def timed_step(name: str) -> Step:
        us = min(race[name].us for race in races)
        layer_us = (us - ends_us) / weights.layers
        extrapolated = weights.layers < shape.layers
        model_us = ends_us + layer_us * shape.layers if extrapolated else us
        interval = timing.interval_us([race[name] for race in races])
        served = _served(right[name], tokens)
        return Step(
            name, us, interval, layer_us, model_us, extrapolated, tokens / model_us * 1e6, served,
            errors.get(name),
        )  # fmt: skip

    steps = {name: timed_step(name) for name in right}
    ours = tuple(s for name, s in steps.items() if name != DENSE)
    first = ours[0].name if ours else ""
    ratios = {
        f"{name} / {first}": tuple(timing.ratio(race[name], race[first]) for race in races)
        for name in steps
        if ours and name != first
    }
    base = found.get(first)
    logits = {} if base is None else {n: _difference(y, base) for n, y in found.items()}
    others = tuple(s for name, s in steps.items() if name == DENSE)
    return Cell(
        phase, batch, tokens, context if phase == "decode" else length, rounds, ends_us, floor,
        ours, others, ratios, logits, wrong, failed,
    )  # fmt: skip


def _request(name: str, vendor: str) -> Request:
    return Request(tune=name == SELECTION, emulate=vendor == "cpu", force_weight_only=False)


def _served(layers: torch.nn.ModuleList, tokens: int) -> dict[str, dict[str, Any]]:
    served: dict[str, dict[str, Any]] = {}
    for kind, linear in by_kind(layers)[0].items():
        if isinstance(linear, Fp8Linear):
            choice = linear.plan().choice(tokens)
            served[kind] = {
                "backend": choice.backend,
                "config": choice.config.to_dict(),
                "source": choice.source,
                "reason": choice.reason,
            }
    return served


def _floor(shape: Decoder, roof: Roof, tokens: int) -> float:
    return sum(
        roof.us(s.n, s.k, tokens, 2 * tokens * (s.k + s.n)) for s in shape.linears
    )  # bf16 in and out


def _room(
    shape: Decoder, layers: int, batch: int, length: int, place: torch.device
) -> dict[str, str]:
    """{DENSE: why} where a bf16 stack does not fit beside the FP8 one; raises if neither does."""
    free = torch.cuda.mem_get_info(place)[0] if place.type == "cuda" else _free_memory()
    if free is None:
        return {}
    ends = 4 * shape.vocabulary * shape.hidden
    codes = layers * shape.weights_a_layer
    # the CPU multiplies a 16-bit copy of the weights
    stored = codes + SPARE_BYTES if place.type == "cuda" else 2 * codes
    need = stored + ends + shape.kv_bytes(batch, length, layers)
    if need > free:
        raise DeviceError(
            f"{layers} layers of {shape.name} do not fit",
            got=f"{free / 1e9:.0f} GB free, {need / 1e9:.0f} GB needed",
            want="fewer layers, a smaller batch or a shorter context",
            hint="--layers 8 measures eight layers and extrapolates, or --tp for one rank's part",
        )
    if need + 2 * codes > free:
        return {DENSE: f"{2 * codes / 1e9:.0f} GB of 16-bit weights do not fit beside the FP8 ones"}
    return {}


def _free_memory() -> int | None:
    """Bytes of main memory that can be had, None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvail"))
    except (OSError, StopIteration):
        return None


def _difference(y: torch.Tensor, base: torch.Tensor) -> float:
    return float((y.float() - base.float()).norm() / base.float().norm())


def eager_race(
    contenders: Mapping[str, Sequence[Call]],
    rounds: int = 5,
    block_us: float = 0.0,
    at_least: int = 1,
) -> dict[str, Timing]:
    """`timing.race` by the clock on the wall, without graphs: for machines without a GPU."""
    names = list(contenders)
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            start = time.perf_counter()
            for call in contenders[name]:
                call()
            spent = 1e6 * (time.perf_counter() - start)
            found[name].append(spent / len(contenders[name]))
    return {
        name: Timing(statistics.median(t), min(t), max(t), tuple(t), len(contenders[name]))
        for name, t in found.items()
    }
