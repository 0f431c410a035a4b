"""MODEL, GPU → every kernel that it will need there, compiled into a folder; no GPU needed.

For container images: a process that finds the folder compiles nothing. The kernels are those of
the layers' own calls (`linear.warm.launches_of`), and compiled by Triton's path for a launch, so
the keys are the ones that the GPU asks for.

The surprise: Triton writes absolute paths into its cache. A folder that was moved is mended by
running this again with it, which then compiles nothing.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer

from anyfp8.device import Device, find_device, planning_device
from anyfp8.errors import InputError
from anyfp8.form import Form, form_of
from anyfp8.gemm.base import Backend
from anyfp8.gemm.compile import gpu_target, triton_version
from anyfp8.linear.plans import plan_for
from anyfp8.linear.warm import launches_of
from anyfp8.problem import Problem
from anyfp8.select import M_GRID, Request
from anyfp8.tools import console
from anyfp8.tools.explain import parse_ms
from anyfp8.tools.shapes import Model, fused, read_model, sharded

# every M of a decode step, and the tables' grid above
MS = (*range(1, 513), *(m for m in M_GRID if m > 512))


@dataclass(frozen=True)
class Report:
    """What `warm` did.

    Attributes:
        shapes: distinct layers. ms: how many numbers of rows each was asked about.
        kernels: {name: forms of it that the model needs}.
        compiled: now. loaded: found in the folder. failed: {kernel: error}.
        mended: folders of a moved cache whose paths were set right.
        others: {backend: calls} that run kernels which are not ours to compile.
        stubs: modules of C that were built, which start kernels. no_stub: why others were not.
    """

    model: str
    device: str
    target: str
    triton: str
    cache: str
    shapes: int
    ms: int
    kernels: dict[str, int]
    compiled: int
    loaded: int
    failed: dict[str, str]
    mended: int
    others: dict[str, int]
    stubs: int
    no_stub: str
    seconds: float


def warm(
    model: Model,
    device: Device,
    cache: Path,
    ms: Sequence[int] = MS,
    request: Request | None = None,
    workers: int | None = None,
) -> Report:
    """Compile the kernels of a model's layers for a device into Triton's cache at `cache`.

    Args:
        workers: processes; as many as there are cores by default.

    Raises:
        NoBackend, EnvError, TableError: as `select.plan`. MissingPackage: Triton is not installed.
        InputError: the CPU, which has no kernels.
    """
    start = time.monotonic()
    if device.vendor == "cpu":
        raise InputError(
            "nothing to compile for the CPU", got=device.name, want="a GPU", hint="--device h200"
        )
    version = triton_version()
    forms: dict[Form, None] = {}
    others: Counter[str] = Counter()
    shapes = dict.fromkeys((each.scheme, each.n, each.k, each.bias) for each in model.layers)
    for scheme, n, k, bias in shapes:
        for probe in (None, _fails):
            plan = plan_for(scheme, n, k, device, model.dtype, bias, request, ms, probe)
            forms |= dict.fromkeys(form_of(launch) for launch in launches_of(plan, device, ms))
            if probe is None:
                served = (plan.choice(m).backend for m in ms)
                others.update(name for name in served if not name.startswith("triton_"))
    cache = cache.absolute()
    cache.mkdir(parents=True, exist_ok=True)
    mended = mend(cache)
    target = gpu_target(device.arch)
    done = _compile(target, list(forms), cache, workers or os.cpu_count() or 1)
    return Report(
        model.title,
        device.name,
        f"cuda sm_{target.arch}" if target.backend == "cuda" else f"hip {target.arch}",
        version,
        str(cache),
        len(shapes),
        len(ms),
        dict(Counter(form.kernel.split(":")[1] for form in forms)),
        sum(answer["compiled"] for answer in done.values()),
        sum(answer["loaded"] for answer in done.values()),
        {form.kernel: answer["error"] for form, answer in done.items() if answer["error"]},
        mended,
        dict(others),
        sum(answer["stubs"] for answer in done.values()),
        next((answer["no_stub"] for answer in done.values() if answer["no_stub"]), ""),
        round(time.monotonic() - start, 1),
    )


def _fails(backend: Backend, problem: Problem) -> str | None:
    """Another library's kernel is tried on the GPU: what serves if it fails is compiled too."""
    tried = type(backend).probe is not Backend.probe
    return "may fail its trial on the GPU" if tried else None


def _compile(target: Any, forms: list[Form], cache: Path, workers: int) -> dict[Form, Any]:
    """{form: {"error", "stubs", "no_stub", "compiled", "loaded"}} by processes that share them."""
    done: dict[Form, Any] = {}
    count = max(1, min(workers, len(forms)))
    processes = "1 process" if count == 1 else f"{count} processes"
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache)}
    lock = threading.Lock()

    def work(share: list[Form], folder: str, number: int) -> None:
        path = Path(folder) / str(number)
        path.write_bytes(pickle.dumps((target, share)))
        command = [sys.executable, "-m", "anyfp8.form", str(path)]
        with (
            path.with_suffix(".log").open("w+") as log,
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
            ) as process,
        ):
            assert process.stdout is not None
            answers = iter(process.stdout)
            for form in share:
                line = next(answers, None)
                if line is None:
                    break
                with lock:
                    done[form] = json.loads(line)
                    shown.step()
            process.wait()
            log.seek(0)
            last = (log.read().strip().splitlines() or [f"ended with {process.returncode}"])[-1]
        broken = f"the compiling process broke down: {last}"
        lost = {"error": broken, "stubs": 0, "no_stub": "", "compiled": 0, "loaded": 0}
        for form in share:
            done.setdefault(form, lost)

    with (
        tempfile.TemporaryDirectory() as folder,
        console.progress(f"compiling in {processes}", len(forms)) as shown,
    ):
        # neighbours cost alike: deal them out
        threads = [
            threading.Thread(target=work, args=(forms[number::count], folder, number))
            for number in range(count)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return done


def mend(cache: Path) -> int:
    """Set right the absolute paths of a cache that was moved; returns how many folders it was."""
    mended = 0
    for path in cache.glob("*/__grp__*.json"):
        try:
            there = json.loads(path.read_text())["child_paths"]
        except (ValueError, KeyError):
            continue
        here = {name: str(path.parent / name) for name in there}
        if here == there or not all(Path(file).exists() for file in here.values()):
            continue
        new = path.with_name(f"{path.name}.{os.getpid()}")
        new.write_text(json.dumps({"child_paths": here}))
        new.replace(path)
        mended += 1
    return mended


def default_cache() -> Path:
    """Where Triton looks for compiled kernels."""
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    return Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")


def command(
    text: str,
    *,
    device: str | None,
    ms: str | None,
    cache: Path | None,
    scheme: str | None,
    exclude: Iterable[str],
    fuse: bool,
    tp: int,
    workers: int | None,
    as_json: bool,
) -> None:
    """The verb: read, compile, report."""
    rows = MS if ms is None else parse_ms(ms)
    gpu = find_device(device) if device else planning_device()
    # it loads everything that writes a checkpoint
    from anyfp8.tools.quantize import parse_scheme

    model = read_model(text, parse_scheme(scheme) if scheme else None, exclude)
    model = sharded(fused(model) if fuse else model, tp)
    report = warm(model, gpu, cache or default_cache(), rows, None, workers)
    if as_json:
        console.data_json(asdict(report))
    else:
        console.data("\n".join(lines(report)))
    if report.no_stub:
        console.talk(
            f"warning: what starts kernels is left to their first launch: {report.no_stub}"
        )
    for kernel, error in report.failed.items():
        console.talk(f"error: {kernel} does not compile: {error}")
    if not report.failed and cache is not None:
        console.talk(f"next: TRITON_CACHE_DIR={report.cache} for the process that runs the model")
    if report.failed:
        raise typer.Exit(1)


def lines(report: Report) -> list[str]:
    """The report as a person reads it."""
    found = [
        f"{report.model} on {report.device} ({report.target}): "
        f"{console.counted(sum(report.kernels.values()), 'kernel')} for "
        f"{console.counted(report.shapes, 'shape')}, {console.counted(report.ms, 'M')}"
    ]
    found += [f"  {count} {name}" for name, count in sorted(report.kernels.items())]
    found += [
        f"  {name}'s own for {console.counted(count, 'M')}"
        for name, count in sorted(report.others.items())
    ]
    found.append(f"{report.compiled} compiled, {report.loaded} there, in {report.seconds} s")
    if report.stubs:
        found.append(f"{console.counted(report.stubs, 'C module')} to start kernels with")
    if report.mended:
        entries = "1 entry" if report.mended == 1 else f"{report.mended} entries"
        found.append(f"{entries} mended: the folder was moved")
    found.append(f"in {report.cache}")
    return found
