"""works(backend, recipe, GPU)? Tried once on small numbers before a library's kernel is trusted.

A kernel that raises, or whose result is not the product, takes its backend out of the running on
that GPU; the reason is kept and shown. torch's own kernels are tried in this process. Those of
other packages may hang or leave the GPU's context broken, so they are tried in a child with a time
limit, and the answer is kept in a file for the next process.
"""

from __future__ import annotations

import hashlib
import json
import logging
import subprocess
import sys
from dataclasses import replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from anyfp8 import env, reference
from anyfp8.device import current_device
from anyfp8.gemm.base import Backend
from anyfp8.launcher import refuse_capture
from anyfp8.problem import DTYPES, Problem, QTensor, Scheme

log = logging.getLogger(__name__)

# seconds: importing a large package and compiling its kernels once
LIMIT_S = 180

# a wrong scale layout errs by tens of percent, a short accumulator by less than one
_TOLERANCE = 0.02


def forget() -> None:
    """Try again what was tried in this process; answers kept in files stay."""
    _judged.cache_clear()
    _tried.cache_clear()


def judged(backend: Backend, problem: Problem) -> str | None:
    """Why a backend fails on the GPU at hand, as a clause; None where it works.

    Remembered by all of the problem but its shape, unless the GPU's memory was full.

    Raises:
        DeviceError: inside a CUDA graph's capture, where a trial would fail whatever the backend.
        RuntimeError: memory was full, which says nothing about the backend.
    """
    refuse_capture(f"{backend.name} is tried", f"a first call for {problem.key}")
    index = torch.cuda.current_device() if torch.cuda.is_available() else None
    return _judged(backend, index, replace(problem, m=64, n=256, k=640))


@cache
def _judged(backend: Backend, index: int | None, problem: Problem) -> str | None:
    place = torch.device("cpu") if index is None else torch.device("cuda", index)
    try:
        x, weight, bias, want = trial(backend.kind, problem, place)
        config = backend.default_config(problem, current_device())
        prepared = backend.prepare(weight, problem.scheme, problem.x_dtype)
        y = backend.run(x, prepared, problem, config, bias).double().cpu()
    except Exception as error:
        if _was_full(str(error)):
            raise
        # a library may raise anything; whatever it is, the backend is not for this GPU
        first = (str(error).splitlines() or [type(error).__name__])[0]
        log.info("%s does not work on %s: %s", backend.name, place, first)
        return f"failed its trial on this GPU: {first}"
    error = ((y - want).norm(dim=1) / want.norm(dim=1)).max().item()
    if not error < _TOLERANCE:
        log.warning("%s computes wrong products on %s: error %.3g", backend.name, place, error)
        return f"gave a wrong product in its trial on this GPU (relative error {error:.3g})"
    return None


def _was_full(text: str) -> bool:
    """Whether torch's allocator, the driver or cuBLAS says that no memory was left."""
    return "out of memory" in text or "CUBLAS_STATUS_ALLOC_FAILED" in text


def tried(backend: Backend, problem: Problem, package: str) -> str | None:
    """`judged`, but in a child process; remembered in the cache folder by versions and GPU.

    Args:
        package: distribution whose version the answer depends on.
    """
    return _tried(backend.name, replace(problem, m=64, n=256, k=640), package, LIMIT_S)


@cache
def _tried(name: str, problem: Problem, package: str, limit_s: float) -> str | None:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    about = {
        "backend": name,
        "problem": problem.key,
        "gpu": gpu,
        "torch": torch.__version__,
        package: _version(package),
    }
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:24]
    path = probe_folder() / f"{digest}.json"
    try:
        return json.loads(path.read_text())["why"]
    except (OSError, ValueError, KeyError):
        pass
    command = (sys.executable, "-m", "anyfp8.gemm.probe", name, problem.key)
    why = answer_of(command, limit_s)
    # the next process may find memory
    forgotten = why is not None and _was_full(why)
    if why:
        how = "until this process ends" if forgotten else f"remembered in {path}"
        log.warning("%s is not used on %s: it %s (%s)", name, gpu, why, how)
    if forgotten:
        return why
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(about | {"why": why}, indent=1) + "\n")
    except OSError as error:
        log.info("the answer of a trial is not kept: %s", error)
    return why


def answer_of(command: tuple[str, ...], limit_s: float) -> str | None:
    """Run a trial in a child: what its last line says, or how it failed to say anything."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return f"gave no answer within {limit_s:.0f} s in its trial on this GPU"
    try:
        return json.loads(done.stdout.splitlines()[-1])["why"]
    except (ValueError, KeyError, IndexError):
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return f"broke down in its trial on this GPU: {last[:200]}"


def probe_folder() -> Path:
    """Where answers are kept; delete a file to have its backend tried again."""
    import platformdirs

    folder = env.text("ANYFP8_CACHE_DIR") or platformdirs.user_cache_dir("anyfp8")
    return Path(folder) / "probes"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def trial(kind: str, problem: Problem, place: torch.device) -> tuple[Any, ...]:
    """(x [M, K], weight [N, K], bias, x · wᵀ in fp64) with scales that all differ."""
    m, n, k, scheme = problem.m, problem.n, problem.k, problem.scheme
    generator = torch.Generator().manual_seed(0)
    spread = torch.logspace(-2, 2, n)[torch.randperm(n, generator=generator)]
    w = torch.randn(n, k, generator=generator) * spread[:, None]
    x = torch.randn(m, k, generator=generator) * torch.logspace(-1, 1, m)[:, None]
    weight = reference.quantize_weight(w, scheme)
    stored = QTensor(weight.data.to(place), weight.scale.to(place), weight.block)
    w = reference.dequantize(weight).double()
    if kind == "weight_only":
        given = x.to(DTYPES[problem.x_dtype])
        want, moved = given.double() @ w.T, given.to(place)
    else:
        dynamic = scheme if scheme.dynamic else Scheme(scheme.weight, "tensor", True)
        q = reference.quantize_activation(x, dynamic)
        assert q is not None, "a backend that quantizes is tried on a scheme that does"
        want = reference.dequantize(q).double() @ w.T
        moved = QTensor(q.data.to(place), q.scale.to(place), q.block)
    bias = torch.zeros(n, dtype=DTYPES[problem.out_dtype], device=place) if problem.bias else None
    return moved, stored, bias, want


def _main() -> None:
    from anyfp8 import gemm

    name, key = sys.argv[1:]
    why = judged(gemm.backend(name), Problem.from_key(key))
    sys.stdout.write("\n" + json.dumps({"why": why}) + "\n")


if __name__ == "__main__":
    _main()
