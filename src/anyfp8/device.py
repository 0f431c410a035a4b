"""device -> facts: what a GPU is (architecture, SMs, memories, peaks), owned or only named.

Everybody asks here: backends for features and shared memory, the ranker for bandwidth and peaks,
tables for the canonical name. Nothing is asked at import; `device_of` asks torch once per GPU.

The surprise: a name is no architecture. "L20Y" is a Hopper, "B300" is not a B200's SM100. What a
GPU can do is decided by capability alone; names only pick tuned tables and published figures.
"""

from __future__ import annotations

import difflib
import functools
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from anyfp8 import env
from anyfp8.catalogue import ROWS
from anyfp8.errors import DeviceError

log = logging.getLogger(__name__)

Capability = tuple[int, int]

# first NVIDIA capability whose tensor cores multiply FP8
FP8_SINCE: Capability = (8, 9)


@dataclass(frozen=True)
class Arch:
    """What every GPU of one architecture shares.

    Attributes:
        name: "sm_90", "gfx942" or "cpu".
        vendor: "nvidia", "amd" or "cpu".
        capability: CUDA compute capability; None off NVIDIA.
        shared_memory: largest number of bytes one block can have (LDS on AMD); 0 on the CPU.
        fp8: FP8 format that its matrix units multiply, "e4m3fn" or "e4m3fnuz"; None without units.
        features: instructions that kernels may need: "cp_async", "bf16_mma", "tma", "wgmma",
            "tcgen05", "pdl" on NVIDIA; "mfma", "wmma", "lds_copy" on AMD (from memory to LDS past
            the registers, which Triton 3.8 and 3.9 use). Empty for an architecture newer than this
            file: only generic Triton runs there.
    """

    name: str
    vendor: str
    capability: Capability | None
    shared_memory: int
    fp8: str | None
    features: frozenset[str] = frozenset()


_AMPERE = frozenset({"cp_async", "bf16_mma"})
_HOPPER = _AMPERE | {"tma", "pdl"}


def _nvidia(major: int, minor: int, shared_memory: int, features: Iterable[str] = ()) -> Arch:
    fp8 = "e4m3fn" if (major, minor) >= FP8_SINCE else None
    name = f"sm_{major}{minor}"
    return Arch(name, "nvidia", (major, minor), shared_memory, fp8, frozenset(features))


def _amd(name: str, shared_memory: int, fp8: str | None, *features: str) -> Arch:
    return Arch(name, "amd", None, shared_memory, fp8, frozenset(features))


# shared memory: CUDA programming guide, technical specifications per compute capability (maximum
# per block); LDS and FP8 formats: ROCm GPU specifications, ROCm data types and precision support
ARCHES: dict[str, Arch] = {
    arch.name: arch
    for arch in (
        _nvidia(7, 5, 65_536),
        _nvidia(8, 0, 166_912, _AMPERE),
        _nvidia(8, 6, 101_376, _AMPERE),
        _nvidia(8, 7, 166_912, _AMPERE),
        _nvidia(8, 9, 101_376, _AMPERE),
        _nvidia(9, 0, 232_448, _HOPPER | {"wgmma"}),
        _nvidia(10, 0, 232_448, _HOPPER | {"tcgen05"}),
        _nvidia(10, 3, 232_448, _HOPPER | {"tcgen05"}),
        _nvidia(11, 0, 232_448, _HOPPER | {"tcgen05"}),
        _nvidia(12, 0, 101_376, _HOPPER),
        _nvidia(12, 1, 101_376, _HOPPER),
        _amd("gfx90a", 65_536, None, "mfma", "bf16_mma"),
        _amd("gfx942", 65_536, "e4m3fnuz", "mfma", "bf16_mma"),
        _amd("gfx950", 163_840, "e4m3fn", "mfma", "bf16_mma", "lds_copy"),
        _amd("gfx1100", 65_536, None, "wmma", "bf16_mma"),
        _amd("gfx1151", 65_536, None, "wmma", "bf16_mma"),
        _amd("gfx1200", 65_536, "e4m3fn", "wmma", "bf16_mma"),
        _amd("gfx1201", 65_536, "e4m3fn", "wmma", "bf16_mma"),
        Arch("cpu", "cpu", None, 0, None),
    )
}


@dataclass(frozen=True)
class Device:
    """One GPU model (or the CPU). A figure nobody published is None, never a guess.

    Attributes:
        name: canonical: torch's own name of the GPU, or the architecture's for a generic one.
        vendor: "nvidia", "amd" or "cpu".
        arch: its architecture.
        sms: streaming multiprocessors (compute units on AMD).
        shared_memory: bytes one block can have.
        l2_bytes: the whole L2 (all XCDs on AMD; the Infinity Cache is not counted).
        bandwidth_gbs: published DRAM bandwidth, GB/s.
        fp8_tflops: published dense FP8 peak with fp32 accumulation, TFLOP/s (never the sparse one).
        bf16_tflops: the same for BF16 (FP16 on Turing, which has no BF16).
        memory_bytes: nominal DRAM, or what torch reports for a GPU at hand.
        source: where the figures come from.
    """

    name: str
    vendor: str
    arch: Arch
    sms: int | None
    shared_memory: int
    l2_bytes: int | None
    bandwidth_gbs: float | None
    fp8_tflops: float | None
    bf16_tflops: float | None
    memory_bytes: int | None
    source: str

    @property
    def capability(self) -> Capability | None:
        """CUDA compute capability, None off NVIDIA."""
        return self.arch.capability

    @property
    def has_fp8(self) -> bool:
        """Whether its matrix units multiply FP8."""
        return self.arch.fp8 is not None


def generic_device(arch: Arch) -> Device:
    """A device of which only the architecture is known: no SM count, no peaks."""
    return Device(
        arch.name,
        arch.vendor,
        arch,
        sms=None,
        shared_memory=arch.shared_memory,
        l2_bytes=None,
        bandwidth_gbs=None,
        fp8_tflops=None,
        bf16_tflops=None,
        memory_bytes=None,
        source="architecture only",
    )


CPU: Device = generic_device(ARCHES["cpu"])


def _read_catalogue() -> tuple[dict[str, Device], dict[str, str]]:
    devices: dict[str, Device] = {}
    short: dict[str, str] = {}
    for line in ROWS.strip().splitlines():
        name, arch, *figures, source, shorts = (cell.strip() for cell in line.split("|"))
        sms, l2, bandwidth, fp8, bf16, memory = (None if f == "-" else float(f) for f in figures)
        devices[name] = Device(
            name,
            ARCHES[arch].vendor,
            ARCHES[arch],
            sms=None if sms is None else int(sms),
            shared_memory=ARCHES[arch].shared_memory,
            l2_bytes=None if l2 is None else int(l2 * 2**20),
            bandwidth_gbs=bandwidth,
            fp8_tflops=fp8,
            bf16_tflops=bf16,
            memory_bytes=None if memory is None else int(memory * 2**30),
            source=source,
        )
        for spelling in (name, *shorts.split()):
            short[_key(spelling)] = name
    return devices, short


def _key(name: str) -> str:
    """The letters and digits that tell GPUs apart: no case, separators, vendor or brand."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    text = "".join(w for w in words if w not in ("nvidia", "amd", "tesla", "instinct"))
    return re.sub(r"^(geforce|radeon)?(rtx|rx)?(?=.)", "", text)


CATALOGUE, _BY_KEY = _read_catalogue()


def canonical_name(raw: str) -> str:
    """The catalogue's name of a GPU spelled in any known way.

    Takes torch's names, the engines' file names ("NVIDIA_L40S") and short ones ("l40s", "4090").

    Raises:
        DeviceError: no GPU of the catalogue, or several, go by this name; lists close ones.
    """
    name = _BY_KEY.get(_key(raw))
    if name is not None:
        return name
    raise DeviceError(
        f"no GPU named {raw!r} in the catalogue",
        got=raw,
        want="a GPU's full name, or an architecture such as sm_90 or gfx942",
        hint="did you mean " + ", ".join(_close_names(raw)) + "?",
    )


def _close_names(raw: str) -> list[str]:
    key = _key(raw)
    keys = [k for k in _BY_KEY if key and (k.startswith(key) or key.startswith(k))]
    keys += difflib.get_close_matches(key, _BY_KEY, n=3, cutoff=0.5)
    names = list(dict.fromkeys(_BY_KEY[k] for k in keys))
    return names[:4] or ["NVIDIA H100 80GB HBM3", "NVIDIA L40S", "AMD Instinct MI300X"]


def arch_of_capability(capability: Capability) -> Arch:
    """The architecture of a CUDA capability.

    One that this file does not know gets the shared memory that every member of the nearest older
    family has and no features, so that only generic Triton is tried; the FP8 boundary still holds.
    """
    major, minor = capability
    known = ARCHES.get(f"sm_{major}{minor}")
    if known is not None:
        return known
    older = [a.capability for a in ARCHES.values() if a.capability and a.capability < capability]
    # 48 KiB is what every CUDA GPU gives without asking
    shared = 49_152
    if older:
        family = max(older)[0]
        shared = min(
            a.shared_memory for a in ARCHES.values() if a.capability and a.capability[0] == family
        )
    return _nvidia(major, minor, shared)


def arch_of_gfx(name: str) -> Arch:
    """The architecture of an LLVM target such as "gfx942:sramecc+:xnack-".

    An unknown one is taken to have no FP8 units: weight-only, with a warning in the log.
    """
    target = name.split(":")[0].strip().lower()
    if target in ARCHES:
        return ARCHES[target]
    log.warning("unknown AMD architecture %s: FP8 layers run weight-only there", target)
    return _amd(target, 65_536, None)


def find_device(name: str | Capability) -> Device:
    """A GPU by any of its names, by architecture ("sm_90", "gfx942", "9.0", (9, 0)), or "cpu".

    An architecture gives a generic device without SM count and peaks.

    Raises:
        DeviceError: nothing goes by this name; lists close ones.
    """
    if isinstance(name, tuple):
        return generic_device(arch_of_capability(name))
    text = name.strip().lower()
    if text == "cpu":
        return CPU
    if re.fullmatch(r"gfx[0-9a-f]+(:.*)?", text):
        return generic_device(arch_of_gfx(text))
    dotted = re.fullmatch(r"\(?(\d+)\s*[.,]\s*(\d)\)?", text)
    joined = re.fullmatch(r"sm_?(\d+)(\d)[af]?", text)
    found = dotted or joined
    if found:
        return generic_device(arch_of_capability((int(found[1]), int(found[2]))))
    return CATALOGUE[canonical_name(name)]


def runtime() -> str:
    """What drives the GPUs of this torch: "cuda", "hip", "musa", or "none"."""
    if getattr(torch.version, "hip", None):
        return "hip"
    if getattr(torch.version, "musa", None) or getattr(torch, "musa", None) is not None:
        return "musa"
    return "cuda" if torch.cuda.is_available() else "none"


def device_of(torch_device: torch.device | str | int) -> Device:
    """The GPU behind a torch device (or the CPU), asked once.

    SMs, memory and shared memory are torch's. Bandwidth and peaks come from the catalogue, and only
    where the SM count agrees: a slice of a GPU has no published figures.

    Raises:
        DeviceError: neither a CPU nor a GPU that torch calls "cuda", or no such GPU.
    """
    place = torch.device("cuda", torch_device) if isinstance(torch_device, int) else torch_device
    place = torch.device(place)
    if place.type == "cpu":
        return CPU
    if place.type == "cuda" and place.index is not None:
        return _ask(place.index)
    if place.type == "cuda" and torch.cuda.is_available():
        return _ask(torch.cuda.current_device())
    raise _no_device(place)


@functools.cache
def _ask(index: int) -> Device:
    # kernels ask at each launch: what is cached here must cost no call into CUDA
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        raise _no_device(torch.device("cuda", index))
    return describe(torch.cuda.get_device_properties(index))


def _no_device(place: torch.device) -> DeviceError:
    return DeviceError(
        f"cannot describe the device {place}",
        got=f"runtime {runtime()!r} with {torch.cuda.device_count()} GPUs",
        want="a CUDA or ROCm GPU, or the CPU",
        hint="anyfp8 doctor says which GPUs torch sees here",
    )


def describe(properties: Any) -> Device:
    """The device of a torch properties object."""
    gfx = getattr(properties, "gcnArchName", "")
    if torch.version.hip and gfx:
        arch = arch_of_gfx(gfx)
    else:
        arch = arch_of_capability((properties.major, properties.minor))
    shared = getattr(properties, "shared_memory_per_block_optin", 0) or arch.shared_memory
    asked = replace(
        generic_device(arch),
        name=properties.name,
        sms=properties.multi_processor_count,
        shared_memory=shared,
        l2_bytes=getattr(properties, "L2_cache_size", None) or None,
        memory_bytes=properties.total_memory,
        source="torch",
    )
    known = CATALOGUE.get(_BY_KEY.get(_key(properties.name), ""))
    if known is None or known.arch.name != arch.name:
        return asked
    # HIP counts work-group processors, two compute units each, on RDNA
    counts = (known.sms, known.sms // 2) if known.sms and arch.vendor == "amd" else (known.sms,)
    if known.sms is not None and asked.sms not in counts:
        log.warning("%s shows %s SMs here: no published figures", known.name, asked.sms)
        return replace(asked, name=known.name)
    return replace(
        known,
        sms=known.sms or asked.sms,
        shared_memory=shared,
        # HIP reports the L2 of one XCD
        l2_bytes=known.l2_bytes if arch.vendor == "amd" else asked.l2_bytes or known.l2_bytes,
        memory_bytes=asked.memory_bytes,
    )


def current_device() -> Device:
    """The current GPU if torch can use one, else the CPU."""
    return device_of("cuda") if torch.cuda.is_available() else CPU


def planning_device() -> Device:
    """The device that plans and look-ups are for: ANYFP8_DEVICE_NAME, else the current one.

    Raises:
        DeviceError: the variable names no known device.
    """
    name = env.text("ANYFP8_DEVICE_NAME")
    return find_device(name) if name else current_device()


def sibling(device: Device, names: Iterable[str]) -> str | None:
    """The first of `names` whose tuned tables fit this device, itself excepted.

    A sibling has the same architecture, SMs, shared memory, L2, bandwidth and peaks, as the A800
    and the A100 have; a figure that is unknown makes no sibling.
    """
    mine = _figures(device)
    if None in mine[:5]:
        return None
    others = (CATALOGUE[name] for name in names if name in CATALOGUE)
    return next((o.name for o in others if o.name != device.name and _figures(o) == mine), None)


def _figures(device: Device) -> tuple[object, ...]:
    size = (device.arch.name, device.sms, device.shared_memory, device.l2_bytes)
    return (*size, device.bandwidth_gbs, device.fp8_tflops, device.bf16_tflops)
