"""Launch → form: what Triton compiles for it, and only that; compiled for any GPU without one.

Two launches of one form share a compiled kernel. `anyfp8 warm` collects a model's forms and
compiles them where no GPU is; a test counts them. A form is plain data: it goes to a worker
process, and compiling one needs Triton but not torch.

The surprise: the kernel is compiled by Triton's own path for a launch, under a driver that only
says which GPU there is. So the key of its cache on disk is the one that the GPU will ask for.
"""

from __future__ import annotations

import importlib
import json
import logging
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from threading import RLock
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from anyfp8.launcher import Launch


log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Form:
    """One specialization of a kernel.

    Attributes:
        kernel: "module:function" of the `@triton.jit` function.
        arguments: (name, an argument that Triton compiles the same for) of those at run time.
        constants: (name, value) of the others. options: (name, value) of the compiler's.
    """

    kernel: str
    arguments: tuple[tuple[str, Any], ...]
    constants: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, Any], ...]

    def function(self) -> Any:
        module, name = self.kernel.split(":")
        return getattr(importlib.import_module(module), name)

    def compile(self) -> Any:
        """Compile inside `target_is`: Triton's kernel, also kept in its cache on disk."""
        values = dict((*self.arguments, *self.constants, *self.options))
        kernel = self.function()
        settle(kernel)
        return kernel.run(grid=(1,), warmup=True, **values)


@dataclass(frozen=True)
class Pointer:
    """Stands for a tensor, of which Triton asks the dtype and whether it is aligned to 16 bytes."""

    dtype: str
    aligned: bool

    def data_ptr(self) -> int:
        return 0 if self.aligned else 1


def form_of(launch: Launch) -> Form:
    """The form of a launch on tensors of any device, meta included."""
    kernel = launch.kernel
    loose = {p.name for p in kernel.params if p.do_not_specialize}
    arguments = tuple(
        (name, _representative(value, name not in loose))
        for name, value in launch.arguments.items()
    )
    options = dict(launch.options)
    if launch.pdl:
        options["launch_pdl"] = True
    return Form(
        f"{kernel.fn.__module__}:{kernel.fn.__name__}",
        arguments,
        tuple(launch.constants.items()),
        tuple(options.items()),
    )


def _representative(value: Any, specialized: bool) -> Any:
    if hasattr(value, "data_ptr"):
        return Pointer(str(value.dtype), value.data_ptr() % 16 == 0 or not specialized)
    if isinstance(value, bool) or not isinstance(value, int):
        return float(1) if isinstance(value, float) else value
    if specialized and value == 1:
        return 1
    narrow = -(1 << 31) <= value < 1 << 31
    even = specialized and value % 16 == 0
    return (16 if even else 7) + (0 if narrow else 1 << 40)


# by identity: looking a function up by itself hashes it
_settled: dict[int, Any] = {}
_settling = RLock()


def settle(kernel: Any) -> None:
    """Hash the functions that a kernel calls before it is hashed itself.

    Triton's key of a kernel holds the constants of the functions it calls only where these were
    hashed earlier (3.6 and 3.7: `DependenciesFinder._update_hash` reads a function's constants
    before it has them). Without this the key depends on which kernel a process compiles first, and
    another process compiles again. What was hashed before it came here, as a key of a dict is, is
    hashed again.
    """
    # not of the function itself: it is a property, which hashes
    if not hasattr(type(kernel), "cache_key"):
        return
    with _settling:
        if id(kernel) in _settled:
            return
        _settled[id(kernel)] = kernel
        for name in kernel.fn.__code__.co_names:
            settle(kernel.fn.__globals__.get(name))
        kernel.hash = None
        _ = kernel.cache_key


@contextmanager
def target_is(target: Any) -> Iterator[None]:
    """Let Triton compile for a `GPUTarget` inside the block, whatever GPU is here or is not."""
    from triton.runtime.driver import driver

    # asking for the active one would make it, and fail without a GPU
    before = driver._active
    driver.set_active(_Driver(target))
    try:
        yield
    finally:
        driver.set_active(before)


class _Driver:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> Any:
        # kernels are remembered by device in the process: this one is apart from all GPUs
        return str(self._target)

    def get_current_stream(self, device: Any) -> int:
        return 0


def with_cache(compile: Callable[[], T]) -> T:
    """Let Triton compile; where its folder cannot be written, in one that goes with the process."""
    try:
        return compile()
    except OSError as error:
        from triton import knobs

        if not _folder.cache_info().currsize:
            log.warning(
                "Triton's cache cannot be written (%s): kernels are compiled again in each "
                "process; TRITON_CACHE_DIR names another folder",
                error,
            )
        folder = _folder().name
        if knobs.cache.dir == folder:
            raise
        with knobs.cache.scope():
            knobs.cache.dir = folder
            return compile()


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="anyfp8-triton-")


@contextmanager
def counting() -> Iterator[dict[str, int]]:
    """Count what Triton does inside the block: {"compiled": …, "loaded": …} of kernels on disk."""
    from triton import knobs

    counts = {"compiled": 0, "loaded": 0}
    before = knobs.compilation.listener

    def listen(*arguments: Any, cache_hit: bool, **named: Any) -> None:
        counts["loaded" if cache_hit else "compiled"] += 1
        if before is not None:
            before(*arguments, cache_hit=cache_hit, **named)

    knobs.compilation.listener = listen
    try:
        yield counts
    finally:
        knobs.compilation.listener = before


def _main() -> None:
    """Compile pickled (target, forms) of a file: a line of JSON for each, as it is done."""
    from pathlib import Path

    from anyfp8.stub import Stubs

    target, forms = pickle.loads(Path(sys.argv[1]).read_bytes())
    stubs = Stubs(target)
    with target_is(target):
        for form in forms:
            error, built = "", 0
            with counting() as counts:
                try:
                    built = stubs.build(form.compile())
                except Exception as raised:
                    # whatever the compiler raises is the finding
                    error = (str(raised).strip().splitlines() or [repr(raised)])[-1][:300]
            answer = {"error": error, "stubs": built, "no_stub": stubs.error, **counts}
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    _main()
