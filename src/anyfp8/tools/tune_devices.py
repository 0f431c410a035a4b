"""CUDA_VISIBLE_DEVICES and its kin → one environment for each GPU: a worker there sees ordinal 0.

A number, a UUID and a MIG UUID are passed on as they are, so that each keeps its meaning; only the
list is cut to one entry. On ROCm HIP_VISIBLE_DEVICES counts within ROCR_VISIBLE_DEVICES, and
CUDA_VISIBLE_DEVICES does the same as HIP_VISIBLE_DEVICES.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from anyfp8.device import ARCHES, Device, arch_of_capability, arch_of_gfx
from anyfp8.errors import DeviceError

CUDA, HIP, ROCR = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"
_VARIABLES = {"cuda": (CUDA,), "hip": (HIP, CUDA)}


def worker_environments(
    environ: Mapping[str, str], runtime: str, count: int
) -> list[dict[str, str]]:
    """What to change in the environment of each GPU's worker.

    Args:
        runtime: "cuda" or "hip", as `device.runtime` says.
        count: GPUs that torch sees in this environment: the list may name some that are not there.

    Returns:
        One {variable: value} for each visible GPU, in the order of their ordinals.
    """
    names = _VARIABLES.get(runtime, ())
    if not names:
        return []
    entries = next((_entries(environ[name]) for name in names if name in environ), None)
    if entries is None:
        entries = [str(i) for i in range(count)]
    # the others would be applied on top of the first
    return [{names[0]: entry} | dict.fromkeys(names[1:], entry) for entry in entries[:count]]


def chosen(environments: list[dict[str, str]], device: str | None) -> list[dict[str, str]]:
    """Those that `--device` names: "cuda" all, "cuda:1" and "1" one, "cuda:0,2" some.

    Raises:
        DeviceError: an ordinal that is not there.
    """
    text = (device or "cuda").removeprefix("cuda").removeprefix(":")
    if not text:
        return environments
    parts = text.split(",")
    if not all(p.isdecimal() and int(p) < len(environments) for p in parts):
        raise DeviceError(
            "no such GPU to tune",
            got=f"--device {device} with {len(environments)} visible GPUs",
            want="cuda for all of them, or cuda:0",
            hint="anyfp8 doctor lists them; --dry-run plans for a GPU that is not here",
        )
    return [environments[int(p)] for p in dict.fromkeys(parts)]


def named_ordinals(text: str) -> bool:
    """Whether `--device` means GPUs of this machine: "cuda", "cuda:0,1", "0"."""
    rest = text.removeprefix("cuda")
    return not rest or all(p.isdecimal() for p in rest.removeprefix(":").split(","))


def no_gpu(environ: Mapping[str, str]) -> DeviceError:
    """The error of a machine without a visible GPU; names the variable that hides them."""
    hiding = [f"{n}={environ[n]!r}" for n in (CUDA, HIP, ROCR) if n in environ]
    return DeviceError(
        "cannot tune without a GPU",
        got="no visible GPU" + (f" with {', '.join(hiding)}" if hiding else ""),
        want="at least one CUDA or ROCm GPU that torch can use",
        hint="--dry-run shows what would be timed; anyfp8 doctor says what torch sees",
    )


def to_json(device: Device) -> dict[str, Any]:
    """A GPU as its worker tells of it; `from_json` reads it back."""
    return asdict(device) | {"arch": device.arch.name, "capability": device.capability}


def from_json(told: Mapping[str, Any]) -> Device:
    """The GPU that a worker told of."""
    capability, name = told["capability"], told["arch"]
    if name in ARCHES:
        arch = ARCHES[name]
    elif capability is not None:
        arch = arch_of_capability((capability[0], capability[1]))
    else:
        arch = arch_of_gfx(name)
    facts: dict[str, Any] = {k: v for k, v in told.items() if k not in ("capability", "arch")}
    return Device(arch=arch, **facts)


def _entries(text: str) -> list[str]:
    """Entries up to the first that is none: the drivers ignore what follows a -1."""
    found: list[str] = []
    for entry in (part.strip() for part in text.split(",")):
        if not entry or entry.startswith("-") or entry.lower() in ("nodevfiles", "void", "none"):
            break
        if entry in found:
            break
        found.append(entry)
    return found
