"""Kernel, GPU → registers, spilled bytes, shared memory: what `explain --compile` shows.

Triton compiles for any GPU without owning it. Registers are read from the machine code (NVIDIA:
cuobjdump, which Triton brings along; AMD: the metadata in the assembly), shared memory is Triton's.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyfp8 import gemm
from anyfp8.errors import AnyFp8Error
from anyfp8.gemm.compile import Source, compile_for
from anyfp8.problem import Problem
from anyfp8.select import Choice

if TYPE_CHECKING:
    from anyfp8.device import Arch, Device


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes.

    Attributes:
        kernel: its name. registers: of a thread. spilled: bytes a thread keeps in memory instead.
        shared, limit: bytes of shared memory of a block, taken and there to take.
        error: why it does not compile, "" when it does.
    """

    kernel: str
    registers: int | None = None
    spilled: int | None = None
    shared: int = 0
    limit: int = 0
    error: str = ""

    @property
    def fits(self) -> bool:
        return not self.error and self.shared <= self.limit

    def __str__(self) -> str:
        if self.error:
            return f"{self.kernel} does not compile: {self.error}"
        registers = "registers unknown" if self.registers is None else f"{self.registers} registers"
        spilled = "" if self.spilled is None else f", {self.spilled} B spilled"
        over = "" if self.fits else ": DOES NOT FIT"
        return (
            f"{self.kernel}: {registers}{spilled}, "
            f"{self.shared:,} of {self.limit:,} B of shared memory{over}"
        )


def resources_of(choice: Choice, problem: Problem, device: Device) -> Resources | None:
    """Compile what a choice would launch; None where that is no Triton kernel of ours.

    Raises:
        MissingPackage: Triton is not installed.
    """
    source_of: Any = getattr(gemm.backend(choice.backend), "source", None)
    if source_of is None or getattr(choice.config, "how", "") == "chunked":
        return None
    source = source_of(problem, choice.config, device)
    return _compiled(source, device.arch, device.shared_memory)


@cache
def _compiled(source: Source, arch: Arch, limit: int) -> Resources:
    kernel = source.kernel.partition(":")[2]
    try:
        compiled = compile_for(source, arch)
    except AnyFp8Error:
        raise
    except Exception as error:
        # Triton raises whatever its passes raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return Resources(kernel, error=lines[-1], limit=limit)
    asm = compiled.asm
    registers, spilled = None, None
    if "cubin" in asm:
        registers, spilled = _of_cubin(asm["cubin"])
    elif "amdgcn" in asm:
        registers, spilled = _of_amdgcn(asm["amdgcn"])
    return Resources(kernel, registers, spilled, compiled.metadata.shared, limit)


def _of_cubin(cubin: bytes) -> tuple[int | None, int | None]:
    import triton

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        try:
            tool = triton.knobs.nvidia.cuobjdump.path
            command = [tool, "--dump-resource-usage", str(path)]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        except (OSError, RuntimeError, AttributeError, subprocess.CalledProcessError):
            return None, None
    # our kernels declare no arrays, so that a stack holds spilled registers only
    return _number(r"\bREG:(\d+)", text), _number(r"\bSTACK:(\d+)", text)


def _of_amdgcn(text: str) -> tuple[int | None, int | None]:
    spilled = _number(r"\.vgpr_spill_count:\s*(\d+)", text)
    return _number(r"\.vgpr_count:\s*(\d+)", text), None if spilled is None else 4 * spilled


def _number(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text)
    return int(found[1]) if found else None
