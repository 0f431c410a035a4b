"""One Triton launch of a GEMM kernel: on its tensors' own GPU, or as a test wants it.

`use_target` makes the launches inside a block those of another architecture: the backends ask
`facts_of` how codes are decoded there, and `run` receives each launch instead of the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from anyfp8.device import Device, device_of
from anyfp8.launcher import Launcher


@dataclass(frozen=True, eq=False)
class Launch:
    """One kernel call.

    Attributes:
        kernel: the @triton.jit function.
        grid: programs along each axis.
        values: run-time arguments in the kernel's order: tensors and integers.
        constants: compile-time arguments by name.
        pdl: programmatic dependent launch: start while the previous kernel of the stream drains.
        registers: the most that a thread may take, on NVIDIA; None leaves it to ptxas.
    """

    kernel: Any
    grid: tuple[int, ...]
    values: tuple[Any, ...]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    pdl: bool = False
    registers: int | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(zip(self.kernel.arg_names, self.values, strict=False))

    @property
    def device(self) -> torch.device:
        return self.values[0].device

    @property
    def options(self) -> dict[str, Any]:
        # said because Triton's default is to change after 3.9: a product and a sum round once
        fusion = {"enable_fp_fusion": True}
        most = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages} | fusion | most


_forced: ContextVar[tuple[Device, Callable[[Launch], None]] | None]
_forced = ContextVar("anyfp8_gemm_target", default=None)


@contextmanager
def use_target(device: Device, run: Callable[[Launch], None]) -> Iterator[None]:
    """Compile every launch inside the block for `device` and hand it to `run`."""
    token = _forced.set((device, run))
    try:
        yield
    finally:
        _forced.reset(token)


def redirected() -> bool:
    """Whether a `use_target` block takes the launches."""
    return _forced.get() is not None


def facts_of(tensor: torch.Tensor) -> Device:
    """The device whose code a launch on this tensor runs."""
    forced = _forced.get()
    return device_of(tensor.device) if forced is None else forced[0]


def start(launch: Launch) -> None:
    """Launch on the tensors' own GPU, whichever is current."""
    forced = _forced.get()
    if forced is not None:
        forced[1](launch)
        return
    _launcher()(launch)


@cache
def _launcher() -> Launcher:
    return Launcher()


def on_device_of(tensor: torch.Tensor) -> Any:
    """Make the tensor's GPU current: kernels start on the current one, not on the tensor's."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)
