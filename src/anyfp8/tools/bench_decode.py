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
from dataclasses import asdict, dataclass
from typing import Any

import torch

from anyfp8 import reference
from anyfp8.device import device_of
from anyfp8.errors import DeviceError, InputError
from anyfp8.linear import Fp8Linear
from anyfp8.linear.warm import warmup
from anyfp8.problem import Scheme
from anyfp8.select import Request
from anyfp8.tools import console, timing
from anyfp8.tools.bench_gemm import Budget, Timer, contestants
from anyfp8.tools.decode_shapes import Decoder
from anyfp8.tools.decode_stack import Apply, Stack, Weights, applied
from anyfp8.tools.gemm_contenders import KILL_SWITCH, SELECTION, Setting, first_line
from anyfp8.tools.gemm_operands import Exact, judge, slack
from anyfp8.tools.gemm_report import Ratios, middle, verdict
from anyfp8.tools.gemm_roof import Roof, measure_roof
from anyfp8.tools.timing import Call, Timing, geometric_mean

DENSE, ENDS = "torch bf16", "ends"
PHASES = ("decode", "prefill")
RUNS, BLOCK_US = 2, 20_000.0
JUDGED_ROWS = 256
# left for activations, graphs and the libraries' own
SPARE_BYTES = 12 * 10**9


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
            found[name], errors[name], complaint = _judged(step, layers, weights)
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


def _judged(
    step: Callable[[Apply], torch.Tensor], layers: torch.nn.ModuleList, weights: Weights
) -> tuple[torch.Tensor, float, str]:
    """(logits, the greatest error of a judged linear, what is wrong or "")."""
    inner, judged = applied(layers), {0, len(layers) - 1}
    worst, complaints = 0.0, []

    def listening(layer: int, kind: str, x: torch.Tensor) -> torch.Tensor:
        nonlocal worst
        y = inner(layer, kind, x)
        if layer in judged:
            linear = layers[layer][kind]  # type: ignore[reportIndexIssue]
            error, complaint = _judge_linear(linear, x, y, weights, layer, kind)
            worst = max(worst, error)
            if complaint:
                complaints.append(f"{kind} of layer {layer}: {complaint}")
        return y

    logits = step(listening)
    if not bool(logits.isfinite().all()):
        complaints.append("logits are not finite")
    return logits, worst, complaints[0] if complaints else ""


def _judge_linear(
    linear: Fp8Linear, x: torch.Tensor, y: torch.Tensor, weights: Weights, layer: int, kind: str
) -> tuple[float, str]:
    m, k = x.shape
    choice = linear.plan().choice(m)
    few = min(m, JUDGED_ROWS)
    # the first and the last row, and evenly between
    rows = torch.linspace(0, m - 1, few, device=x.device).round().long()
    x, y = x[rows], y[rows]
    q = reference.quantize_activation(x, weights.scheme, linear.input_scale)
    weight = weights.quantized[layer][kind]
    a = x if q is None or not choice.quantizes else reference.dequantize(q)
    exact = a.double() @ reference.dequantize(weight.q).double().T
    exact = (exact if weight.bias is None else exact + weight.bias.double()).float()
    rounding = float((exact.bfloat16().float() - exact).norm() / exact.norm())
    mode = choice.accumulate if choice.quantizes else "fp32"
    return judge(y, Exact(exact, rounding), few, slack(mode, k, own_quantizer=False))


def _request(name: str, vendor: str) -> Request:
    return Request(tune=name == SELECTION, emulate=vendor == "cpu", force_weight_only=False)


def _served(layers: torch.nn.ModuleList, tokens: int) -> dict[str, dict[str, Any]]:
    served: dict[str, dict[str, Any]] = {}
    for kind, linear in layers[0].items():  # type: ignore[reportCallIssue]
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
    if place.type != "cuda":
        return {}
    free = torch.cuda.mem_get_info(place)[0]
    ends = 4 * shape.vocabulary * shape.hidden
    codes = layers * shape.weights_a_layer
    need = codes + ends + shape.kv_bytes(batch, length, layers) + SPARE_BYTES
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
