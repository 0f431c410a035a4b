"""From tensors to one Triton launch: where it runs, how bytes are encoded there, and who starts it.

A kernel is launched on its tensors' GPU. CPU tensors go to the reference (`target_of` answers
None), except in Triton's interpreter, where the kernels themselves run on them. A test can put
another `Target` in force: `testing.on_architecture` runs the same launches as sm_80 code on a newer
GPU. `launcher` remembers what Triton compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from anyfp8 import fp8
from anyfp8.errors import MissingPackage
from anyfp8.launcher import Launcher


@dataclass(frozen=True, eq=False)
class Launch:
    """One kernel call.

    Attributes:
        kernel: the @triton.jit function.
        grid: programs along each axis.
        arguments: run-time arguments by name: tensors, numbers or None.
        constants: compile-time arguments by name.
        num_warps: warps of a program.
        pdl: programmatic dependent launch: start while the previous kernel of the stream drains.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    constants: Mapping[str, Any]
    num_warps: int = 4
    pdl: bool = False

    @property
    def device(self) -> torch.device:
        return next(a.device for a in self.arguments.values() if isinstance(a, torch.Tensor))

    @property
    def options(self) -> dict[str, Any]:
        """Compile options. Contraction to FMA would change bits, so it is off."""
        return {"num_warps": self.num_warps, "num_stages": 1, "enable_fp_fusion": False}


@dataclass(frozen=True)
class Target:
    """What a launch is compiled for.

    Attributes:
        capability: CUDA capability; None is HIP, the interpreter or anything else.
        interpreted: kernels run in Triton's interpreter.
        run: starts a launch.
    """

    capability: tuple[int, int] | None
    interpreted: bool = False
    run: Callable[[Launch], None] = field(default_factory=Launcher)

    @property
    def has_pdl(self) -> bool:
        return self.capability is not None and self.capability >= (9, 0)

    def numerics(self, fmt: fp8.Format) -> Mapping[str, Any]:
        """The three compile-time arguments that say how bytes are encoded."""
        return _numerics(fmt, self.capability, self.interpreted)

    def maxima(self, x: torch.Tensor, columns: int) -> dict[str, bool]:
        """The two compile-time arguments that say how maxima and scales are computed.

        Args:
            columns: of the kernel's tile.
        """
        # max.s16x2 came with SM90, as dependent launch did
        packed = self.has_pdl and x.element_size() == 2 and columns >= 8
        return {"PTX": self.capability is not None, "PACKED_MAX": packed}


@functools.cache
def _numerics(
    fmt: fp8.Format, capability: tuple[int, int] | None, interpreted: bool
) -> Mapping[str, Any]:
    import triton.language as tl

    encoding = fp8.encoding_for(fmt, cuda_capability=capability, interpreted=interpreted)
    return MappingProxyType(
        {
            "FP8_DTYPE": getattr(tl, encoding.triton_type),
            "FP8_MAX": fmt.max,
            "ENCODE": encoding.how,
        }
    )


_forced: ContextVar[Target | None] = ContextVar("anyfp8_quantize_target", default=None)


@contextmanager
def use_target(target: Target) -> Iterator[None]:
    """Compile and run every launch for `target` inside the block."""
    token = _forced.set(target)
    try:
        yield
    finally:
        _forced.reset(token)


def redirected() -> bool:
    """Whether a `use_target` block takes the launches."""
    return _forced.get() is not None


def target_of(device: torch.device) -> Target | None:
    """Where tensors of this device are quantized; None means by `reference` in PyTorch.

    Raises:
        MissingPackage: a GPU without Triton.
    """
    forced = _forced.get()
    if forced is not None:
        return forced
    if device.type == "cpu":
        return Target(None, interpreted=True) if interpreting() else None
    if not _has_triton():
        raise MissingPackage(
            "cannot quantize on this GPU without Triton",
            got="no module named triton",
            want="Triton 3.6 to 3.9",
            hint="install a CUDA or ROCm build of torch, which brings it; or move x to the CPU",
        )
    return _native(device.type, device.index)


@functools.cache
def _has_triton() -> bool:
    try:
        import triton  # noqa: F401 - only whether it can be
    except ImportError:
        return False
    return True


@functools.cache
def interpreting() -> bool:
    """Whether the kernels were built for Triton's interpreter (TRITON_INTERPRET at import)."""
    if not _has_triton():
        return False
    from triton.runtime.interpreter import InterpretedFunction

    from anyfp8.kernels.encode import encode

    return isinstance(encode, InterpretedFunction)


@functools.cache
def _native(device_type: str, index: int | None) -> Target:
    if device_type != "cuda" or torch.version.hip is not None:
        return Target(None)
    return Target(torch.cuda.get_device_capability(index))
