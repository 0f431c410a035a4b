"""Candidates compiled in parallel processes, ahead of the GPU that times them.

A child makes the very launch that `run` makes, on tensors without memory, and compiles its
specialization: same types, alignments and constants, so that Triton's cache has the code when the
measuring process asks. The surprise: most candidates of a cell were compiled for another cell, as
kernels do not depend on N, K and M but on what divides them.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

import torch

from anyfp8 import gemm
from anyfp8.device import CATALOGUE, Device, find_device
from anyfp8.gemm.base import CanonicalWeight
from anyfp8.gemm.launch import Launch, use_target
from anyfp8.problem import DTYPES, QTensor
from anyfp8.tools.tune_cells import Cell
from anyfp8.tools.tune_child import Child, ChildFailed

LIMIT_S = 60.0
COMMAND = (sys.executable, "-m", "anyfp8.tools.tune_worker")


class Compiler(Protocol):
    """Makes candidates ready; a future's result is "" or the reason for which one cannot be."""

    def submit(self, cell: Cell, backend: str, config: dict[str, Any]) -> Future[str]: ...


class Pool:
    """As many compiling children as there are cores to spare, each in the care of a thread."""

    def __init__(
        self,
        device: Device,
        count: int | None = None,
        command: tuple[str, ...] = (*COMMAND, "compile"),
        limit_s: float = LIMIT_S,
    ) -> None:
        count = max(1, min(16, (os.cpu_count() or 2) - 2)) if count is None else count
        self._target = device.name if device.name in CATALOGUE else device.arch.name
        self._limit_s = limit_s
        self._work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._known: dict[tuple[Any, ...], Future[str]] = {}
        self._children = [Child(command, {"CUDA_VISIBLE_DEVICES": ""}) for _ in range(count)]
        self._threads = [
            threading.Thread(target=self._serve, args=(child,), daemon=True)
            for child in self._children
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, cell: Cell, backend: str, config: dict[str, Any]) -> Future[str]:
        key = (cell.key, backend, *config.items())
        if key not in self._known:
            request = {"cell": cell.to_dict(), "backend": backend, "config": config}
            future = self._known[key] = Future()
            self._work.put((future, request | {"device": self._target}))
        return self._known[key]

    def close(self) -> None:
        """End the children; what was not begun is dropped."""
        for _ in self._threads:
            self._work.put(None)
        for future in self._known.values():
            future.cancel()
        for thread, child in zip(self._threads, self._children, strict=True):
            thread.join(0.5)
            child.close()

    def _serve(self, child: Child) -> None:
        for future, request in iter(self._work.get, None):
            if not future.set_running_or_notify_cancel():
                continue
            try:
                why = child.call(request, self._limit_s)["refused"]
            except ChildFailed as failure:
                why = f"does not compile: {failure}"
            future.set_result(why)


class Ready:
    """No compiling ahead: for GPUs and tests that need none."""

    def submit(self, cell: Cell, backend: str, config: dict[str, Any]) -> Future[str]:
        future: Future[str] = Future()
        future.set_result("")
        return future


def compile_candidate(request: dict[str, Any]) -> str:
    """Compile what one candidate launches; "" or why it cannot run on its GPU."""
    device = find_device(request["device"])
    cell, backend = Cell.from_dict(request["cell"]), gemm.backend(request["backend"])
    config = backend.config_class.from_dict(request["config"])
    problem = cell.problem(cell.ops[0])
    x: torch.Tensor | QTensor = torch.empty(
        (cell.m, cell.k), dtype=DTYPES[cell.dtype], device="meta"
    )
    if backend.kind == "w8a8":
        x = _quantized(x, cell, device)
    codes = torch.empty((cell.n, cell.k), dtype=torch.uint8, device="meta")
    scale = torch.empty(cell.scheme.weight_scale_shape(cell.n, cell.k), device="meta")
    launches: list[Launch] = []
    with use_target(device, launches.append):
        backend.run(x, CanonicalWeight(codes, scale, cell.scheme), problem, config)
    for launch in launches:
        need = _compiled(launch, device).metadata.shared
        if need > device.shared_memory:
            return f"needs {need:,} B of shared memory, {device.name} has {device.shared_memory:,}"
    return ""


def _quantized(x: torch.Tensor, cell: Cell, device: Device) -> QTensor:
    from anyfp8.linear.dispatch import quantize_activation
    from anyfp8.quantize.launch import Target
    from anyfp8.quantize.launch import use_target as quantize_for

    static = torch.empty((), device="meta") if cell.scheme.activation == "tensor" else None
    nothing: Callable[[Any], None] = lambda _: None  # noqa: E731
    with quantize_for(Target(device.capability, run=nothing)):
        return quantize_activation(x, cell.scheme, static)


def _compiled(launch: Launch, device: Device) -> Any:
    from anyfp8.testing import compile_launch

    return compile_launch(launch, device.name if device.name in CATALOGUE else device.arch.name)  # type: ignore[arg-type]
