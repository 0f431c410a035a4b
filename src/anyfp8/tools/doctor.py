"""anyfp8 doctor: what this machine can run, what it cannot and why, and a test of it all.

The test quantizes activations, and runs a small layer of each scheme on every backend that is
willing, against fp64 on the dequantized operands. On a machine without a GPU that is `dequant`,
weight-only and as FP8 units would compute.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import torch
import typer

from anyfp8 import __version__, fp8, gemm, quantize, reference
from anyfp8.device import CPU, Device, current_device, device_of, runtime
from anyfp8.gemm.probe import probe_folder
from anyfp8.linear import Fp8Linear
from anyfp8.problem import Problem, QTensor, Scheme
from anyfp8.select import Request
from anyfp8.select.table import load_tables
from anyfp8.tools import console, env_command

_PACKAGES = ("torch", "triton", "transformers", "safetensors", "gguf")
# without one of these its tensors are read as bytes
_DTYPES = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
_SCHEMES = ("w8a8-channel-token", "w8a8-tensor-static", "w8a8-block128x128-group128")
_M, _N, _K = 5, 256, 384
# what a wrong scale or layout exceeds by far, and a short accumulator does not reach
_TOLERANCE = 0.02


@dataclass(frozen=True)
class Check:
    """One self-test.

    Attributes:
        error: largest relative error of a row, or the count of wrong bytes; None where it broke.
        why: what is wrong, "" when it passed.
    """

    name: str
    error: float | None
    why: str = ""

    @property
    def passed(self) -> bool:
        return not self.why


def machine() -> dict[str, Any]:
    """Versions, driver and devices."""
    return {
        "anyfp8": __version__,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "dtypes_missing": [name for name in _DTYPES if not hasattr(torch, name)],
        "runtime": runtime(),
        "cuda": torch.version.cuda or "",
        "hip": getattr(torch.version, "hip", None) or "",
        "driver": _driver(),
        "devices": [_device_dict(d) for d in _devices()],
    }


def _version(name: str) -> str:
    if name == "torch":
        # with its build, such as +cu130
        return torch.__version__
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _driver() -> str:
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:
        # an optional package that may be absent, or have no driver to talk to
        return ""


def _devices() -> list[Device]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [device_of(i) for i in range(count)] or [CPU]


def _device_dict(device: Device) -> dict[str, Any]:
    return {
        "name": device.name,
        "arch": device.arch.name,
        "fp8": device.arch.fp8,
        "sms": device.sms,
        "memory_bytes": device.memory_bytes,
        "figures": device.source,
    }


def dtype_choice(device: Device) -> str:
    """Which FP8 arithmetic this device gets, and why."""
    if device.vendor == "cpu":
        return "weight-only: the CPU has no FP8 units; codes are made by torch, the same bytes"
    how = fp8.encoding_for(fp8.E4M3FN, cuda_capability=device.capability)
    codes = f"codes by {how.how} instructions: {how.reason}"
    if not device.has_fp8:
        return f"weight-only: {device.arch.name} has no FP8 units; {codes}"
    return f"W8A8: {device.arch.name} multiplies {device.arch.fp8}; {codes}"


def table_found(device: Device) -> str:
    """Which tuned table serves this device."""
    if device.vendor == "cpu":
        return "no tables on the CPU"
    tables = load_tables(device)
    if tables.tables:
        lender = f" of its sibling {tables.borrowed}" if tables.borrowed else ""
        names = (
            f"{source}{lender}, {len(table.rows)} rows, {table.header.provenance} ({table.path})"
            for source, table in tables.tables
        )
        return "; ".join(names)
    return f"none for {device.name} or a sibling of it: the ranker decides"


def backends(device: Device) -> list[dict[str, str]]:
    """Each backend: "willing", "refused" or "missing" here, and the reason."""
    out = []
    for backend in gemm.backends():
        missing = backend.missing()
        reasons = [_reason(backend.name, Scheme.parse(name), device) for name in _SCHEMES]
        if missing:
            state, why = "missing", missing
        elif None in reasons:
            no = [(n, r) for n, r in zip(_SCHEMES, reasons, strict=True) if r is not None]
            state, why = "willing", "; ".join(f"not {n}: it {r}" for n, r in no)
        else:
            state, why = "refused", next(r for r in reasons if r)
        out.append({"name": backend.name, "state": state, "why": why})
    return out


def _reason(name: str, scheme: Scheme, device: Device) -> str | None:
    backend = gemm.backend(name)
    if backend.kind == "w8a8" and not device.has_fp8:
        return f"multiplies on FP8 units and {device.name} has none"
    accumulate = "fast" if device.has_fp8 else "fp32_128"
    problem = Problem("linear", scheme, _M, _N, _K, accumulate=accumulate)
    if backend.missing() or backend.why_not(problem, device):
        return backend.missing() or backend.why_not(problem, device)
    return backend.probe(problem, device) if device.vendor != "cpu" else None


def remembered_failures() -> list[dict[str, str]]:
    """Trials of other packages' kernels that failed earlier, and the files that remember them."""
    out = []
    for path in sorted(probe_folder().glob("*.json")):
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if isinstance(found, dict) and found.get("why"):
            backend, gpu = str(found.get("backend")), str(found.get("gpu"))
            out.append({"backend": backend, "gpu": gpu, "why": found["why"], "file": str(path)})
    return out


def self_test(device: Device) -> Iterator[Check]:
    """Quantizers byte for byte, then a layer of each scheme on each willing backend."""
    place = torch.device("cpu" if device.vendor == "cpu" else "cuda")
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(_M, _K, generator=generator).bfloat16()
    w = torch.randn(_N, _K, generator=generator) * 0.05
    yield from _quantizers(x, place)
    for name in _SCHEMES:
        scheme = Scheme.parse(name)
        for backend in gemm.backends():
            for emulate in (False, True):
                if emulate and (backend.name != "dequant" or device.has_fp8):
                    continue
                if not emulate and _reason(backend.name, scheme, device) is not None:
                    continue
                yield _layer(backend.name, scheme, x, w, place, emulate)


def _quantizers(x: torch.Tensor, place: torch.device) -> Iterator[Check]:
    static = torch.tensor(0.01)
    there, scale = x.to(place), static.to(place)
    pairs = (
        ("per_token", lambda: quantize.per_token(there), reference.quantize_per_token(x)),
        ("per_group", lambda: quantize.per_group(there), reference.quantize_per_group(x, 128)),
        (
            "per_tensor",
            lambda: quantize.per_tensor(there, scale),
            reference.quantize_per_tensor(x, static),
        ),
    )
    for name, make, want in pairs:
        try:
            made = make()
        except Exception as error:
            yield Check(f"quantize {name}", None, _first_line(error))
            continue
        wrong = int((made.codes.cpu() != want.codes).sum())
        wrong += int((made.scale.cpu() != want.scale).sum())
        yield Check(f"quantize {name}", wrong, f"{wrong} bytes or scales differ" * bool(wrong))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _layer(
    backend: str,
    scheme: Scheme,
    x: torch.Tensor,
    w: torch.Tensor,
    place: torch.device,
    emulate: bool,
) -> Check:
    name = f"{backend}, {scheme.name}{', FP8 units emulated' if emulate else ''}"
    weight = reference.quantize_weight(w, scheme)
    static = torch.tensor(float(x.float().abs().max()) / 448)
    needs = scheme.activation == "tensor" and not scheme.dynamic
    request = Request(
        backend=None if emulate else backend,
        strict=not emulate,
        emulate=emulate,
        numerics=None if emulate else "at_least",
    )
    try:
        layer = Fp8Linear(_K, _N, scheme, device=place, request=request)
        moved = QTensor(weight.data.to(place), weight.scale.to(place), weight.block, weight.fmt)
        layer.load(moved, input_scale=static.to(place) if needs else None)
        y = layer(x.to(place)).double().cpu()
    except Exception as error:
        # a kernel of another package may raise anything: the finding, not a crash
        return Check(name, None, _first_line(error))
    given = x.double()
    if layer.quantizes_activations:
        q = reference.quantize_activation(x, scheme, static if needs else None)
        assert q is not None
        given = reference.dequantize(q).double()
    want = given @ reference.dequantize(weight).double().T
    error = float(((y - want).norm(dim=1) / want.norm(dim=1)).max())
    why = "" if error < _TOLERANCE else f"relative error {error:.3g}, bound {_TOLERANCE}"
    return Check(name, error, why)


def examine() -> dict[str, Any]:
    """Everything, as plain data; docs/schemas/doctor.json is its schema."""
    device = current_device()
    checks = list(self_test(device))
    return {
        "machine": machine(),
        "device": device.name,
        "dtype_choice": dtype_choice(device),
        "table": table_found(device),
        "backends": backends(device),
        "failed_trials": remembered_failures(),
        "environment": env_command.rows(),
        "self_test": [asdict(c) | {"passed": c.passed} for c in checks],
        "passed": all(c.passed for c in checks),
        "hints": _hints(device, checks),
    }


def _hints(device: Device, checks: list[Check]) -> list[str]:
    if not all(c.passed for c in checks):
        return ["ANYFP8_BACKEND=dequant is slow and always right, until the failure is found"]
    hints = ["anyfp8 run MODEL -p TEXT"]
    if device.vendor == "cpu":
        hints.append("anyfp8 explain MODEL --device h200   # any GPU, none needed")
        return hints
    hints.append("anyfp8 explain MODEL   # which kernel serves each layer here")
    if not load_tables(device).tables:
        hints.append("anyfp8 tune MODEL   # no tuned table for this GPU: measure one")
    return hints


def lines(found: dict[str, Any]) -> list[str]:
    """The examination for a person."""
    about = found["machine"]
    packages = ", ".join(f"{n} {v or 'absent'}" for n, v in about["packages"].items())
    drives = {
        "none": "no GPU that torch can use",
        "cuda": f"CUDA {about['cuda']}",
        "hip": f"HIP {about['hip']}",
    }.get(about["runtime"], about["runtime"])
    driver = f", driver {about['driver']}" if about["driver"] else ""
    out = [f"anyfp8 {about['anyfp8']}, Python {about['python']}", packages, f"{drives}{driver}"]
    if about["dtypes_missing"]:
        out.append(f"this torch lacks {', '.join(about['dtypes_missing'])}: read as bytes")
    for one in about["devices"]:
        memory = f", {one['memory_bytes'] / 1e9:.0f} GB" if one["memory_bytes"] else ""
        out.append(f"device: {one['name']} ({one['arch']}){memory}")
    out += ["", f"FP8 here: {found['dtype_choice']}", f"tuned table: {found['table']}", ""]
    out.append("backends:")
    for one in found["backends"]:
        why = f"  {one['why']}" if one["why"] else ""
        out.append(f"  {one['name']:<16} {one['state']:<8}{why}".rstrip())
    for one in found["failed_trials"]:
        out.append(f"  {one['backend']} failed on {one['gpu']}: it {one['why']}")
        out.append(f"    delete {one['file']} to try it again")
    changed = [row for row in found["environment"] if row["source"] != "default"]
    out += ["", "environment: " + ("" if changed else "nothing set; anyfp8 env lists what can be")]
    out += [f"  {row['name']}={row['value']} (from {row['source']})" for row in changed]
    out += ["", f"self-test (bytes; relative error of each row, at most {_TOLERANCE}):"]
    for one in found["self_test"]:
        mark = "ok  " if one["passed"] else "FAIL"
        exact = "every byte equal" if one["error"] == 0 else f"error {one['error'] or 0:.2g}"
        out.append(f"  {mark} {one['name']}: {one['why'] or exact}")
    return out


def command(*, as_json: bool) -> None:
    """The verb. Exit status 1 when a self-test failed."""
    with console.progress("self-test"):
        found = examine()
    if as_json:
        console.data_json(found)
    else:
        for line in lines(found):
            console.data(line)
    for hint in found["hints"]:
        console.talk(f"next: {hint}")
    if not found["passed"]:
        raise typer.Exit(1)
