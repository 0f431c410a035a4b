"""Starts Triton kernels without asking Triton each time which compiled kernel that is.

Triton takes 10 to 50 µs to find again what it compiled; more than a decode step's product. Kernels
of quantization and of products come here; nothing in this file imports Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch


class Launch(Protocol):
    """One kernel call, as `Launcher` needs it."""

    @property
    def kernel(self) -> Any: ...
    @property
    def grid(self) -> tuple[int, ...]: ...
    @property
    def arguments(self) -> Mapping[str, Any]: ...
    @property
    def constants(self) -> Mapping[str, Any]: ...
    @property
    def options(self) -> Mapping[str, Any]: ...
    @property
    def pdl(self) -> bool: ...
    @property
    def device(self) -> torch.device: ...


class Launcher:
    """Starts launches on their tensors' GPU, and remembers what Triton compiled for each form.

    Triton compiles a form for dtypes, 16-byte alignment of pointers, integers that are 1, multiples
    of 16 or wider than 32 bits, and constants. What comes again in the same form goes straight to
    the compiled kernel.
    """

    def __init__(self) -> None:
        self._compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

    def __call__(self, launch: Launch) -> None:
        device = launch.device
        if device.type != "cuda":
            launch.kernel[launch.grid](**launch.arguments, **launch.constants, **launch.options)
        elif device.index == torch.cuda.current_device():
            self._start(launch, device.index)
        else:
            with torch.cuda.device(device):
                self._start(launch, device.index)

    def _start(self, launch: Launch, device_index: int | None) -> None:
        arguments, options = launch.arguments, launch.options
        key = (
            launch.kernel,
            device_index,
            launch.pdl,
            *options.values(),
            *launch.constants.values(),
            *map(_form_of, arguments.values()),
        )
        known = self._compiled.get(key)
        if known is not None:
            compiled, constants = known
            runner, positional = compiled[_three(launch.grid)], (*arguments.values(), *constants)
            runner(*positional)
            _note(runner, positional)
            return
        dependent = {"launch_pdl": True} if launch.pdl else {}
        compiled = launch.kernel[launch.grid](
            **arguments, **launch.constants, **options, **dependent
        )
        names = launch.kernel.arg_names
        # a compiled kernel takes its arguments by position
        if names[: len(arguments)] == list(arguments):
            constants = tuple(launch.constants[name] for name in names[len(arguments) :])
            self._compiled[key] = compiled, constants
            _note(compiled[_three(launch.grid)], (*arguments.values(), *constants))
        else:
            _note(None, ())


# a started kernel: runner(*arguments) starts it again; None where only Triton can
Started = tuple[Callable[..., None] | None, tuple[Any, ...]]
_record: ContextVar[list[Started] | None] = ContextVar("anyfp8_launcher_record", default=None)


@contextmanager
def recording() -> Iterator[list[Started]]:
    """Collect what launchers start inside the block."""
    started: list[Started] = []
    token = _record.set(started)
    try:
        yield started
    finally:
        _record.reset(token)


def _note(runner: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
    record = _record.get()
    if record is not None:
        record.append((runner, arguments))


def _three(grid: tuple[int, ...]) -> tuple[int, ...]:
    return (*grid, 1, 1)[:3]


def _form_of(argument: Any) -> Any:
    """What of a run-time argument Triton may compile for; finer than it needs to be."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, -(1 << 31) <= argument < 1 << 31
    return type(argument)
