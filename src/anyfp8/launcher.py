"""Starts Triton kernels without asking Triton each time which compiled kernel that is.

Triton takes 10 to 50 µs to find again what it compiled; more than a decode step's product. Kernels
of quantization and of products come here; nothing in this file imports Triton before a launch.

The surprise: inside a CUDA graph's capture nothing is compiled. A form that has not run before is
an error there, raised before anything is launched: compiling would load code into the GPU, which
ends the capture.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from anyfp8.errors import DeviceError
from anyfp8.form import settle, with_cache


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


Runner = Callable[..., None]
# a kernel has one for each grid, and so for each number of rows
MAX_RUNNERS = 16384


class Launcher:
    """Starts launches on their tensors' GPU, and remembers what Triton compiled for each form.

    Triton compiles a form for dtypes, 16-byte alignment of pointers, integers that are 1, multiples
    of 16 or wider than 32 bits, and constants. What comes again in the same form goes straight to
    the compiled kernel.
    """

    def __init__(self) -> None:
        self._compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...], Any]] = {}
        self._runners: dict[tuple[Any, tuple[int, ...]], Runner] = {}

    def __call__(self, launch: Launch) -> None:
        device = launch.device
        if device.type != "cuda":
            launch.kernel[launch.grid](**launch.arguments, **launch.constants, **launch.options)
        elif device.index == torch.cuda.current_device():
            self._start(launch, device.index)
        else:
            with torch.cuda.device(device):
                self._start(launch, device.index)

    def _start(self, launch: Launch, device_index: int) -> None:
        arguments, options = launch.arguments, launch.options
        key = (
            # by identity: a kernel's own hash is Triton's key, wrong before `settle`
            id(launch.kernel),
            device_index,
            launch.pdl,
            *options.values(),
            *launch.constants.values(),
            *map(_form_of, arguments.values()),
        )
        known = self._compiled.get(key)
        if known is not None:
            compiled, constants, _ = known
            positional = (*arguments.values(), *constants)
            runner = self._runner(compiled, launch.grid)
            pointers = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in positional]
            runner(*pointers, stream=torch._C._cuda_getCurrentRawStream(device_index))
            _note(runner, positional)
            return
        if capturing():
            name = getattr(launch.kernel, "__name__", "a kernel")
            raise DeviceError(
                f"{name} has not run in this form before the capture of a CUDA graph",
                got="a first call inside the capture, which may compile nothing",
                want="the same call once before it, with tensors of these shapes",
                hint="anyfp8.warmup(model, ms=[...]), or call the function once outside",
            )
        dependent = {"launch_pdl": True} if launch.pdl else {}
        settle(launch.kernel)
        kernel = launch.kernel[launch.grid]
        compiled = with_cache(
            lambda: kernel(**arguments, **launch.constants, **options, **dependent)
        )
        names = launch.kernel.arg_names
        # a compiled kernel takes its arguments by position
        if names[: len(arguments)] == list(arguments):
            constants = tuple(launch.constants[name] for name in names[len(arguments) :])
            # with the kernel, so that its id stays its own
            self._compiled[key] = compiled, constants, launch.kernel
            _note(self._runner(compiled, launch.grid), (*arguments.values(), *constants))
        else:
            _note(None, ())

    def _runner(self, compiled: Any, grid: tuple[int, ...]) -> Runner:
        runner = self._runners.get((compiled, grid))
        if runner is None:
            if len(self._runners) >= MAX_RUNNERS:
                self._runners.clear()
            runner = self._runners[compiled, grid] = runner_of(compiled, (*grid, 1, 1)[:3])
        return runner


def capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def refuse_capture(what: str, got: str) -> None:
    """Raises DeviceError inside a CUDA graph's capture. `what` reads "a layer is prepared"."""
    if capturing():
        raise DeviceError(
            f"{what} before a CUDA graph is captured, not inside",
            got=got,
            want="a call before the capture",
            hint="anyfp8.warmup(model, ms=[...]) before torch.cuda.graph",
        )


def runner_of(compiled: Any, grid: tuple[int, ...]) -> Runner:
    """runner(*arguments, stream=…) of a compiled kernel: pointers as integers, constants included.

    Triton's own `compiled[grid]` builds what its launch hooks want to know before each launch. It
    is asked only while hooks (a profiler's) are set.
    """
    hooked = compiled[grid]
    if not hasattr(compiled, "packed_metadata"):
        return hooked
    knobs = sys.modules["triton"].knobs.runtime
    x, y, z = grid
    launch, rest = _launch_of(compiled)

    def runner(*arguments: Any, stream: int) -> None:
        if knobs.launch_enter_hook.calls:
            hooked(*arguments, stream=stream)
        else:
            launch(x, y, z, stream, *rest, *arguments)

    setattr(runner, _FLAT, Flat(launch, grid, rest, knobs))
    return runner


@dataclass(frozen=True)
class Flat:
    """What a runner does while Triton's `knobs` have no hooks.

    launch(*grid, stream, *rest, *arguments).
    """

    launch: Callable[..., None]
    grid: tuple[int, ...]
    rest: tuple[Any, ...]
    knobs: Any


_FLAT = "anyfp8_flat"


def flat_of(runner: Runner) -> Flat | None:
    """The parts of a runner; None where it is not of a kernel that Triton compiled."""
    return getattr(runner, _FLAT, None)


def _launch_of(compiled: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """(launch, rest): Triton 3.6's C function where it needs no scratch, else Triton's launcher."""
    run, function, packed = compiled.run, compiled.function, compiled.packed_metadata
    sizes = (getattr(run, f"{kind}_scratch_size", 1) for kind in ("global", "profile"))
    known = sys.modules["triton"].__version__.startswith("3.6.")
    if known and type(run).__name__ == "CudaLauncher" and not any(sizes):
        flags = (bool(run.launch_cooperative_grid), bool(run.launch_pdl))
        return run.launch, (function, *flags, None, None, packed, None, None, None)
    return run, (function, packed, None, None, None)


# a started kernel: runner(*arguments) starts it again; None where only Triton can
Started = tuple[Runner | None, tuple[Any, ...]]
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


def recorded() -> bool:
    """Whether a `recording` block wants to see every launch."""
    return _record.get() is not None


def _note(runner: Runner | None, arguments: tuple[Any, ...]) -> None:
    record = _record.get()
    if record is not None:
        record.append((runner, arguments))


def _form_of(argument: Any) -> Any:
    """What of a run-time argument Triton may compile for; finer than it needs to be."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, -(1 << 31) <= argument < 1 << 31
    return type(argument)
