"""select(problem, device, request, tables) → Choice: which backend, which configuration, and why.

A pure function of its arguments and of the packages installed: a laptop answers for any GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from anyfp8 import env, gemm
from anyfp8.device import current_device
from anyfp8.errors import NoBackend
from anyfp8.gemm.base import Backend, Config
from anyfp8.gemm.dequant import DequantConfig
from anyfp8.problem import Problem, Scheme
from anyfp8.select.choice import Choice, Plan, Request
from anyfp8.select.missed import record
from anyfp8.select.predict import rank
from anyfp8.select.table import Found, Tables, load_tables

if TYPE_CHECKING:
    from anyfp8.device import Device

log = logging.getLogger(__name__)

M_GRID = (
    1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192,
)  # fmt: skip

# the one M whose configuration serves all, when a row's bits must not depend on the batch
INVARIANT_M = 64

# up to here "auto" leaves sums in the FP8 units' short accumulator, as the engines' kernels do
FAST_UP_TO_K = 16384

Probe = Callable[[Backend, Problem], "str | None"]


def resolve_accumulate(accumulate: str, k: int, device: Device) -> str:
    """ "auto" as the engines' default kernels do: fast up to K = 16,384, promoted above."""
    if accumulate != "auto":
        return accumulate
    return "fast" if device.has_fp8 and k <= FAST_UP_TO_K else "fp32_128"


def resolve_numerics(request: Request, device: Device) -> str:
    """The caller's, else "scheme" where the device has FP8 units or emulates them."""
    if request.emulate:
        return "scheme"
    if request.numerics is not None:
        return request.numerics
    return "scheme" if device.has_fp8 else "at_least"


def select(
    problem: Problem,
    device: Device,
    request: Request | None = None,
    tables: Tables | None = None,
    *,
    layout: str | None = None,
    probe: Probe | None = None,
) -> Choice:
    """Place one call.

    Precedence, the first that answers wins:

    1. the caller's argument (`request.backend`);
    2. the environment (`ANYFP8_BACKEND`, merged by `Request.with_environment`);
    3. a row of the user's table folder;
    4. a row of a shipped table;
    5. the analytic ranker;
    6. the default path: the first willing backend in the order of `gemm.backends()`, with its
       default configuration. 3 to 5 are skipped with `request.tune=False` (the kill switch).

    Rows of op "linear" (time with quantization) come before rows of op "gemm" of the same scheme,
    which serve a linear too: what they compare pays for the same quantizer. Where weight-only
    backends compete (`numerics="at_least"`), which do not, gemm rows decide nothing, and linear
    rows only if they have times of both kinds.

    Args:
        tables: what `load_tables` returns, or None for no tables.
        layout: only backends that read this layout of the weight.
        probe: asks the GPU at hand whether a backend works there; None believes the facts.

    Raises:
        NoBackend: a forced backend is not installed, or refuses and the request is strict; or a
            batch-invariant result cannot be had. `reasons` has each backend's own.
        InputError: no backend has the forced name.
    """
    request = request or Request()
    problem = replace(
        problem,
        accumulate=resolve_accumulate(request.accumulate, problem.k, device),
        numerics=resolve_numerics(request, device),
    )
    emulated = problem.numerics == "scheme" and not device.has_fp8
    asked = replace(problem, m=INVARIANT_M) if request.batch_invariant else problem
    _check_invariance(problem, request)

    refused: dict[str, str] = {}
    willing: list[Backend] = []
    for backend in _ordered(problem):
        why = _refusal(backend, asked, device, request, layout)
        if not why and not backend.default and not _named(backend.name, request, tables):
            why = "is taken only where the caller or a table names it"
        why = why or (probe(backend, asked) if probe else None)
        if why:
            refused[backend.name] = why
        else:
            willing.append(backend)

    def chosen(backend: Backend, config: Config, source: str, reason: str, row: str = "") -> Choice:
        if isinstance(config, DequantConfig):
            memory = "per_call" if emulated else request.memory or config.memory
            config = replace(config, memory=memory, row_by_row=request.batch_invariant)
        quantizes = backend.kind == "w8a8" or (emulated and problem.scheme.activation != "none")
        return Choice(
            backend.name,
            config,
            source,
            reason,
            tuple(refused.items()),
            problem.accumulate,
            problem.numerics,
            quantizes,
            row,
        )

    if request.backend is not None:
        forced = gemm.backend(request.backend)
        if forced in willing:
            where = "the caller" if request.backend_source == "argument" else "ANYFP8_BACKEND"
            config = forced.default_config(asked, device)
            return chosen(forced, config, request.backend_source, f"{where} asked for it")
        _complain(forced, refused, problem, device, request)
    if not willing:
        raise NoBackend(
            f"no backend serves {problem.key} on {device.name}",
            want="one of the backends to be willing",
            hint="anyfp8 explain shows every refusal",
            reasons=refused,
        )
    if request.tune is not False and not request.batch_invariant:
        found = _tuned(asked, device, willing, tables)
        if found is not None:
            return chosen(found.backend, found.config, found.source, found.reason, found.provenance)
    backend = willing[0]
    return chosen(backend, backend.default_config(asked, device), "default", _why(refused))


def plan(
    scheme: Scheme,
    n: int,
    k: int,
    device: Device,
    x_dtype: str = "bf16",
    out_dtype: str = "bf16",
    bias: bool = False,
    request: Request | None = None,
    ms: Iterable[int] = M_GRID,
    *,
    tables: Tables | None = None,
    probe: Probe | None = None,
) -> Plan:
    """Decide a layer's backends for every M, and the one layout in which its weight is stored.

    The environment and, unless `tables` is given, the device's tables are read here. See `select`
    for the order of precedence. On the GPU at hand ANYFP8_RECORD_MISSED is served.

    Args:
        n, k: rows and columns of the weight.
        device: any GPU or the CPU, such as `anyfp8.device.find_device("h200")`.
        x_dtype, out_dtype: "bf16", "fp16" or "fp32".
        bias: whether one is added.
        ms: numbers of rows to decide for at once; others are decided when asked.
        tables: what `load_tables` returns.
        probe: asks the GPU at hand whether a backend works there; by default where `device` is it.

    Raises:
        NoBackend, InputError: as `select`.
        EnvError: a variable that cannot be read.
        TableError: a table that cannot be read.
    """
    settings = env.snapshot()
    request = (request or Request()).with_environment(settings)
    probe = probe or _probe_of(device)
    if tables is None and request.tune and device.vendor != "cpu":
        tables = load_tables(device, settings)
    base = Problem("linear", scheme, 1, n, k, x_dtype, out_dtype, bias)
    first = select(base, device, request, tables, probe=probe)
    owner = gemm.backend(first.backend)
    layout = owner.layout_of(first.config)
    decide = partial(_decide, base, device, request, tables, layout, probe)
    choices = tuple((m, decide(m)) for m in sorted(ms))
    if probe is not None and request.tune:
        record(str(settings["ANYFP8_RECORD_MISSED"]), device, base, (c for _, c in choices))
    resolved = replace(base, accumulate=first.accumulate, numerics=first.numerics)
    return Plan(resolved, choices, layout, owner.name, decide)


def _probe_of(device: Device) -> Probe | None:
    """Backends are tried on the GPU at hand; for another one the facts are all there is."""
    if not torch.cuda.is_available() or current_device() != device:
        return None
    return partial(_probed, device)


def _probed(device: Device, backend: Backend, problem: Problem) -> str | None:
    return backend.probe(problem, device)


def _decide(
    base: Problem,
    device: Device,
    request: Request,
    tables: Tables | None,
    layout: str,
    probe: Probe | None,
    m: int,
) -> Choice:
    return select(replace(base, m=m), device, request, tables, layout=layout, probe=probe)


def _ordered(problem: Problem) -> list[Backend]:
    """The default path's order, then those that only a table or a user names."""
    found = gemm.backends()
    return [b for b in found if b.default] + [b for b in found if not b.default]


def _refusal(
    backend: Backend, problem: Problem, device: Device, request: Request, layout: str | None
) -> str | None:
    """The first reason, as a clause that completes "because it …"."""
    if backend.kind == "w8a8":
        if problem.scheme.activation == "none":
            return "multiplies quantized activations and this scheme has none"
        if request.force_weight_only:
            return "quantizes activations and weight-only was asked for"
        if not device.has_fp8:
            return f"multiplies on FP8 units and {device.name} has none"
    elif problem.numerics == "scheme" and not device.has_fp8 and backend.name != "dequant":
        return "does not emulate FP8 units"
    if backend.kind == "w8a8" and problem.accumulate not in backend.accumulates:
        return f"does not accumulate in the mode {problem.accumulate}"
    if request.batch_invariant and not backend.batch_invariant:
        return "gives a row other bits in another batch"
    why = backend.missing() or backend.why_not(problem, device)
    if not why and layout is not None and not backend.can_read(layout):
        return f"does not read the stored layout {layout!r}"
    return why


def _named(name: str, request: Request, tables: Tables | None) -> bool:
    return request.backend == name or (tables is not None and name in tables.backends)


def _check_invariance(problem: Problem, request: Request) -> None:
    scheme = problem.scheme
    quantizes = problem.numerics == "scheme" and not request.force_weight_only
    if request.batch_invariant and quantizes and scheme.activation == "tensor" and scheme.dynamic:
        raise NoBackend(
            "dynamic per-tensor activation scales depend on the whole batch",
            got=f"batch_invariant=True with {scheme.name}",
            want="static, per-token or per-group activations",
            hint="force_weight_only=True, or quantize again with per-token activations",
        )


def _complain(
    forced: Backend, refused: dict[str, str], problem: Problem, device: Device, request: Request
) -> None:
    why = refused[forced.name]
    if request.strict or forced.missing():
        raise NoBackend(
            f"{forced.name} cannot serve {problem.scheme.name} layers of "
            f"{problem.n}x{problem.k} at M={problem.m} on {device.name}",
            got=f"it {why}",
            want="a backend that is willing",
            hint="leave the backend open, or anyfp8 explain to see which are willing",
            reasons=refused,
        )
    log.warning("%s is not used for %s: it %s", forced.name, problem.key, why)


def _tuned(
    problem: Problem, device: Device, willing: list[Backend], tables: Tables | None
) -> Found | None:
    """A table's row, else the ranker's first; None leaves it to the default path."""
    # weight-only is a last resort where the checkpoint's own arithmetic can be had
    kinds = {backend.kind for backend in willing}
    if problem.numerics == "scheme" and "w8a8" in kinds:
        willing = [backend for backend in willing if backend.kind == "w8a8"]
    found = tables.find(problem, device, willing) if tables is not None else None
    if found is not None:
        return found
    # a few Ms, not each of them, so that few kernels are compiled
    bucket = next((m for m in M_GRID if m >= problem.m), M_GRID[-1])
    ranked = rank(replace(problem, m=bucket), device, tuple(willing))
    if not ranked:
        return None
    best = ranked[0]
    reason = f"first of the ranker, {best.us:.1f} µs estimated for M={bucket}"
    return Found(best.backend, best.config, "ranker", reason, "")


def _why(refused: dict[str, str]) -> str:
    return f"first{' willing' if refused else ''} in the order of the default path"
