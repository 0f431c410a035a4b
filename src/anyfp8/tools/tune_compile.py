"""Candidates compiled in parallel processes, ahead of the GPU that times them.

The very launch that `run` makes is recorded on tensors without memory, and its form compiled by
Triton's own path, into the cache on disk where the measuring process finds it. The surprise: most
candidates of a cell were compiled for another cell, as a form does not depend on N, K and M but on
what divides them.
"""

from __future__ import annotations

import base64
import itertools
import os
import pickle
import queue
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch

from anyfp8 import gemm
from anyfp8.device import Device
from anyfp8.form import Form, form_of
from anyfp8.gemm.base import CanonicalWeight
from anyfp8.gemm.compile import gpu_target
from anyfp8.gemm.launch import Launch, use_target
from anyfp8.linear.dispatch import quantize_activation
from anyfp8.problem import DTYPES, QTensor
from anyfp8.quantize.launch import Target
from anyfp8.quantize.launch import use_target as quantize_for
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
        count = max(1, min(32, cores() - 2)) if count is None else count
        self._device, self._limit_s = device, limit_s
        self._work: queue.PriorityQueue[Any] = queue.PriorityQueue()
        self._known: dict[tuple[Form, ...], Future[str]] = {}
        self._begun: set[int] = set()
        self._count = itertools.count()
        self._taking = threading.Lock()
        self._closed = False
        # nothing is timed there
        self._children = [Child(command, {"CUDA_VISIBLE_DEVICES": ""}) for _ in range(count)]
        self._threads = [
            threading.Thread(target=self._serve, args=(child,), daemon=True)
            for child in self._children
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self, cell: Cell, backend: str, config: dict[str, Any], ahead: bool = False
    ) -> Future[str]:
        """Compile what a candidate launches, unless it was compiled before.

        Args:
            ahead: nobody waits for it yet: after everything that somebody waits for.
        """
        try:
            forms = tuple(form_of(each) for each in launches(cell, backend, config, self._device))
        except Exception as error:
            refused: Future[str] = Future()
            refused.set_result(f"cannot be launched: {error}")
            return refused
        with self._taking:
            known = self._known.get(forms)
            future = self._known[forms] = Future() if known is None else known
            if known is None or (not ahead and id(future) not in self._begun):
                request = request_of(forms, self._device)
                self._work.put((1 + ahead, next(self._count), future, request))
            return future

    def prepare(self, asks: Iterable[tuple[Cell, str, dict[str, Any]]]) -> None:
        """Submit what will be asked for, in another thread, until the pool is closed."""

        def work() -> None:
            for cell, backend, config in asks:
                if self._closed:
                    return
                self.submit(cell, backend, config, ahead=True)

        threading.Thread(target=work, daemon=True).start()

    def close(self) -> None:
        """End the children; what was not begun is dropped."""
        self._closed = True
        with self._taking:
            for future in self._known.values():
                future.cancel()
        for _ in self._threads:
            self._work.put((0, next(self._count), None, None))
        for child in self._children:
            child.stop()
        for thread, child in zip(self._threads, self._children, strict=True):
            thread.join(5.0)
            child.close()

    def _serve(self, child: Child) -> None:
        while True:
            _, _, future, request = self._work.get()
            if future is None:
                return
            with self._taking:
                # it may have been put a second time, by somebody in more of a hurry
                if id(future) in self._begun or not future.set_running_or_notify_cancel():
                    continue
                self._begun.add(id(future))
            try:
                why = child.call(request, self._limit_s)["refused"]
            except ChildFailed as failure:
                why = f"does not compile: {failure}"
            future.set_result(why)


def cores() -> int:
    """Cores that this process may use: a container often shows all of its host's."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:
        count = os.cpu_count() or 2
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        count = min(count, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):
        pass
    return count


class Ready:
    """No compiling ahead: for GPUs and tests that need none."""

    def submit(self, cell: Cell, backend: str, config: dict[str, Any]) -> Future[str]:
        future: Future[str] = Future()
        future.set_result("")
        return future


def launches(cell: Cell, name: str, config: dict[str, Any], device: Device) -> list[Launch]:
    """What a candidate launches, without what quantizes its activations; nothing runs."""
    backend = gemm.backend(name)
    meta = torch.device("meta")
    problem = cell.problem(cell.ops[0])
    x: torch.Tensor | QTensor
    x = torch.empty(cell.m, cell.k, dtype=DTYPES[cell.dtype], device=meta)
    if backend.kind == "w8a8":
        static = torch.empty((), device=meta) if cell.scheme.activation == "tensor" else None
        target = Target(device.capability if device.vendor == "nvidia" else None, run=_nothing)
        with quantize_for(target):
            x = quantize_activation(x, cell.scheme, static)
    codes = torch.empty(cell.n, cell.k, dtype=torch.uint8, device=meta)
    scale = torch.empty(cell.scheme.weight_scale_shape(cell.n, cell.k), device=meta)
    found: list[Launch] = []
    with use_target(device, found.append):
        weight = CanonicalWeight(codes, scale, cell.scheme)
        backend.run(x, weight, problem, backend.config_class.from_dict(config))
    return found


def request_of(forms: tuple[Form, ...], device: Device) -> dict[str, Any]:
    """What a compiling child is asked; see `tune_worker.compiling`."""
    told = base64.b64encode(pickle.dumps((gpu_target(device.arch), forms))).decode()
    return {"do": "compile", "forms": told, "limit": device.shared_memory, "gpu": device.name}


def _nothing(launch: Any) -> None:
    pass
