"""MODEL or N,K, GPU → which kernel serves each layer at each M there, and why. No GPU needed.

The plan is the layer's own: `linear.plans.plan_for`, asked about a GPU of the catalogue (or one
that is known by capability only). Estimates are the ranker's model unless a tuned row was measured,
and their known error is part of the answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer

from anyfp8 import env, gemm
from anyfp8.checkpoint.kv_cache import kv_cache_refusal
from anyfp8.device import Device, find_device, planning_device
from anyfp8.errors import AnyFp8Error, InputError
from anyfp8.linear.plans import plan_for
from anyfp8.problem import DTYPE_NAMES, Problem, Scheme
from anyfp8.select import M_GRID, Choice, Plan, Request
from anyfp8.select.predict import estimate
from anyfp8.select.table import Row, Tables, file_name, load_tables
from anyfp8.tools import console
from anyfp8.tools.resources import Resources, resources_of
from anyfp8.tools.shapes import Layer, Model, fused, read_model, sharded

# decode alone, small and large batches, prefill
MS = (1, 16, 64, 256, 1024, 4096)


@dataclass(frozen=True)
class Run:
    """Neighbouring Ms that one kernel serves for one kind of reason.

    Attributes:
        ms: of those asked about, ascending.
        choices: of each; they differ at most in the words of their reasons.
        us: of each, None where nothing is known.
        measured: "no" where `us` are estimates, "yes" where a tuned row has them, "product" where
            it has the product's and quantizing the activations is estimated.
    """

    ms: tuple[int, ...]
    choices: tuple[Choice, ...]
    us: tuple[float | None, ...]
    measured: str
    resources: Resources | None = None

    @property
    def choice(self) -> Choice:
        """Of the last of them."""
        return self.choices[-1]


@dataclass(frozen=True)
class Kind:
    """Layers of one name, scheme and shape, and what serves them."""

    layer: Layer
    count: int
    runs: tuple[Run, ...]

    @property
    def name(self) -> str:
        return self.layer.kind


@dataclass(frozen=True)
class Explanation:
    """What one GPU does with a model.

    Attributes:
        tables: one sentence on the tuned tables that apply.
        refused: (backend, clause, names of the kinds) of every refusal.
        trouble: what cannot be served, such as the KV cache; an error with its four parts.
        estimated: whether times that were not measured are estimates, or left out.
    """

    model: Model
    device: Device
    ms: tuple[int, ...]
    kinds: tuple[Kind, ...]
    tables: str
    refused: tuple[tuple[str, str, tuple[str, ...]], ...]
    trouble: AnyFp8Error | None
    estimated: bool = True

    def forward_us(self, m: int) -> float | None:
        """µs that all linears take for m rows; None where one of them is unknown."""
        total = 0.0
        for kind in self.kinds:
            known = {have: us for run in kind.runs for have, us in zip(run.ms, run.us, strict=True)}
            us = known[m]
            if us is None:
                return None
            total += kind.count * us
        return total


def explain(
    model: Model,
    device: Device,
    ms: Sequence[int] = MS,
    request: Request | None = None,
    compiles: bool = False,
    estimates: bool = True,
) -> Explanation:
    """Plan every kind of layer of a model for a device.

    Args:
        compiles: also compile each chosen Triton kernel for the device.
        estimates: fill in times that were not measured.

    Raises:
        NoBackend, EnvError, TableError: as `select.plan`.
        MissingPackage: `compiles` without Triton.
    """
    counts = Counter(_key(layer) for layer in model.layers)
    layers: dict[tuple[Any, ...], Layer] = {}
    for layer in model.layers:
        layers.setdefault(_key(layer), layer)
    settings = env.snapshot()
    tuned = (request or Request()).with_environment(settings).tune
    tables = load_tables(device, settings) if tuned and device.vendor != "cpu" else None
    plans: dict[tuple[Scheme, int, int, bool], Plan] = {}
    kinds = []
    for key, layer in layers.items():
        shape = (layer.scheme, layer.n, layer.k, layer.bias)
        if shape not in plans:
            plans[shape] = plan_for(
                layer.scheme, layer.n, layer.k, device, model.dtype, layer.bias, request, ms
            )
        runs = tuple(_runs(plans[shape], device, ms, tables, compiles, estimates))
        kinds.append(Kind(layer, counts[key], runs))
    return Explanation(
        model,
        device,
        tuple(ms),
        tuple(kinds),
        _tables_sentence(device, tables, kinds),
        tuple(_refusals(kinds)),
        kv_cache_refusal(model.kv_cache, device),
        estimates,
    )


def _key(layer: Layer) -> tuple[Any, ...]:
    return (layer.kind, layer.scheme, layer.n, layer.k, layer.bias)


def _runs(
    plan: Plan,
    device: Device,
    ms: Sequence[int],
    tables: Tables | None,
    compiles: bool,
    estimates: bool,
) -> Iterable[Run]:
    group: list[int] = []
    for i, m in enumerate(ms):
        group.append(m)
        choice = plan.choice(m)
        if i + 1 < len(ms) and same(choice, plan.choice(ms[i + 1])):
            continue
        problem = plan.problem_at(m)
        us, how = _times([plan.problem_at(have) for have in group], choice, device, tables)
        if how != "yes" and not estimates:
            us = (None,) * len(group)
        resources = resources_of(choice, problem, device) if compiles else None
        yield Run(tuple(group), tuple(map(plan.choice, group)), us, how, resources)
        group = []


def same(a: Choice, b: Choice) -> bool:
    """Whether two Ms run the same kernel for the same kind of reason."""
    return (a.backend, a.config, a.source) == (b.backend, b.config, b.source)


def _times(
    problems: Sequence[Problem], choice: Choice, device: Device, tables: Tables | None
) -> tuple[tuple[float | None, ...], str]:
    """µs of each problem, and what of them was measured."""
    backend, config = gemm.backend(choice.backend), choice.config
    estimates = [estimate(p, device, backend, config) for p in problems]
    if tables is None or not choice.source.endswith("table"):
        return tuple(estimates), "no"
    for op, how in (("linear", "yes"), ("gemm", "product")):
        rows = [_row_us(tables, replace(p, op=op), choice) for p in problems]
        if None in rows:
            continue
        if op == "linear":
            return tuple(rows), how
        products = [estimate(replace(p, op=op), device, backend, config) for p in problems]
        # what the estimates have beside the product is the quantization
        parts = [
            row + whole - product
            for row, whole, product in zip(rows, estimates, products, strict=True)
            if row is not None and whole is not None and product is not None
        ]
        if len(parts) == len(rows):
            return tuple(parts), how
    return tuple(estimates), "no"


def _row_us(tables: Tables, problem: Problem, choice: Choice) -> float | None:
    """µs of the row behind a choice, where one was measured at this very M."""
    found = [r for _, t in tables.tables for r in t.rows if _is_row_of(r, problem, choice)]
    return found[0].us if found else None


def _is_row_of(row: Row, problem: Problem, choice: Choice) -> bool:
    # integers first: almost every row is told apart by them
    if (row.m, row.n, row.k) != (problem.m, problem.n, problem.k):
        return False
    if row.role == "peer" or row.backend != choice.backend:
        return False
    # a row without a configuration is the default path's
    if row.config is not None and dict(row.config) != choice.config.to_dict():
        return False
    if row.op == "linear" and row.x_dtype != problem.x_dtype:
        return False
    mine = (row.op, row.scheme, row.out_dtype, row.accumulate)
    return mine == (problem.op, problem.scheme.name, problem.out_dtype, problem.accumulate)


def _tables_sentence(device: Device, tables: Tables | None, kinds: Sequence[Kind]) -> str:
    if device.vendor == "cpu":
        return "no tables on the CPU"
    if tables is None:
        return "tuned tables and the ranker are off: the default path"
    wanted = (
        f"{file_name(device.name)} in ANYFP8_TABLE_DIR would be read; `anyfp8 tune` there writes it"
    )
    if not tables.tables:
        ranked = any(r.choice.source == "ranker" for kind in kinds for r in kind.runs)
        what = "the ranker decides" if ranked else "nothing to rank by: the default path"
        return f"no tuned table: {what}; {wanted}"
    with_rows = sum(any(r.choice.source.endswith("table") for r in kind.runs) for kind in kinds)
    lender = f", borrowed from its sibling {tables.borrowed}" if tables.borrowed else ""
    names = " and ".join(f"{source} ({t.header.provenance})" for source, t in tables.tables)
    text = f"{names}{lender}: rows for {with_rows} of {len(kinds)} kinds of layer"
    return text if with_rows == len(kinds) else f"{text}, the ranker decides the rest"


def _refusals(kinds: Sequence[Kind]) -> Iterable[tuple[str, str, tuple[str, ...]]]:
    found: dict[tuple[str, str], dict[str, None]] = {}
    for kind in kinds:
        for run in kind.runs:
            for backend, why in run.choice.refused:
                found.setdefault((backend, why), {})[kind.name] = None
    for (backend, why), names in found.items():
        yield backend, why, tuple(names)


def parse_ms(text: str | None) -> tuple[int, ...]:
    """ "1,16,4096" or "all" (the tables' grid), ascending. Raises InputError for other texts."""
    if text is None:
        return MS
    if text == "all":
        return M_GRID
    try:
        ms = sorted({int(part) for part in text.split(",")})
    except ValueError:
        ms = []
    if not ms or ms[0] < 1:
        raise InputError("--m cannot be read", got=text, want="numbers such as 1,16,4096, or all")
    return tuple(ms)


def command(
    text: str,
    *,
    devices: list[str],
    ms: str | None,
    scheme: str | None,
    exclude: list[str],
    fuse: bool,
    tp: int,
    accumulate: str,
    compiles: bool,
    estimates: bool,
    html: Path | None,
    as_json: bool,
) -> None:
    """The verb. Exit status 1 where something cannot be served or a kernel does not fit."""
    from anyfp8.tools import explain_text

    rows = parse_ms(ms)
    request = Request(accumulate=accumulate)
    gpus = [find_device(name) for name in devices] or [planning_device()]
    model = read_model(text, _scheme(scheme), exclude)
    model = sharded(fused(model) if fuse else model, tp)
    if not model.layers:
        raise InputError(f"{model.title} has no FP8 layers", want="a quantized model")
    for note in model.notes:
        console.talk(f"note: {note}")
    found = []
    for gpu in gpus:
        if compiles:
            with console.progress(f"compiling for {gpu.name}"):
                found.append(explain(model, gpu, rows, request, True, estimates))
        else:
            found.append(explain(model, gpu, rows, request, False, estimates))
    if html is not None:
        from anyfp8.tools.explain_html import page

        html.write_text(page(found), encoding="utf-8")
        console.talk(f"wrote {html}")
    if as_json:
        console.data_json([explain_text.to_dict(one) for one in found])
    elif html is None:
        console.data("\n\n".join("\n".join(explain_text.lines(one)) for one in found))
    for one in found:
        if one.trouble is not None:
            console.talk(f"warning: {one.trouble}")
    dtype = DTYPE_NAMES[model.dtype]
    for one in found:
        if any(r.choice.backend == "dequant" for k in one.kinds for r in k.runs) and (
            one.device.vendor != "cpu"
        ):
            console.talk(f"warning: {one.device.name} dequantizes to {dtype} in each call: slow")
    if any(one.trouble is not None for one in found) or any(not _fits(one) for one in found):
        raise typer.Exit(1)


def _scheme(name: str | None) -> Scheme | None:
    if name is None:
        return None
    # it loads everything that writes a checkpoint
    from anyfp8.tools.quantize import parse_scheme

    return parse_scheme(name)


def _fits(found: Explanation) -> bool:
    runs = [run for kind in found.kinds for run in kind.runs]
    return all(run.resources is None or run.resources.fits for run in runs)
