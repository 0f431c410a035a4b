"""A candidate → µs, or why it has none: what the process does that owns a GPU.

Judged first, on poisoned memory, then timed over weight copies that the L2 does not hold: 5 to 20
ms each, which orders candidates; the finalists race in pairs as in `timing`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from anyfp8 import gemm
from anyfp8.device import Device, device_of
from anyfp8.gemm.base import Backend, Config
from anyfp8.problem import Problem
from anyfp8.tools import timing
from anyfp8.tools.timing import Call
from anyfp8.tools.tune_cells import Cell, willing
from anyfp8.tools.tune_data import Data
from anyfp8.tools.tune_devices import to_json
from anyfp8.tools.tune_peers import Peers

# µs of a first timing, and calls in its graph where they are short
FIRST_US = 5000.0
_CALLS = 24
ROUNDS, LONG_ROUNDS, RUNS, BLOCK_US = 15, 9, 2, 800.0
# of a ratio's interval: more of them would take longer than the race
_SAMPLES = 200
# shapes whose operands are kept: several are open at once
_KEPT = 3


class Bench:
    """Answers the tuner's requests on the current GPU, for a few shapes at a time."""

    def __init__(self) -> None:
        self.device: Device = device_of("cuda")
        self._data: Data | None = None
        self._peers: Peers | None = None
        # the one in use last
        self._kept: dict[tuple[Any, ...], tuple[Data, Peers]] = {}
        self._pool: Any = None
        self._stream: Any = None
        self._keeper: torch.cuda.CUDAGraph | None = None

    def serve(self, request: dict[str, Any]) -> dict[str, Any]:
        """One request → its answer; what a candidate raises is the answer."""
        with torch.inference_mode():
            if request["do"] == "hello":
                return {"header": timing.header(), "device": to_json(self.device)}
            cell = Cell.from_dict(request["cell"])
            if request["do"] == "open":
                return self._open(cell, request)
            if request["do"] == "time":
                backend, config = _candidate(request)
                return self._time(cell, backend, config, request["share"])
            return self._race(cell, request)

    def _open(self, cell: Cell, request: dict[str, Any]) -> dict[str, Any]:
        shape = (*cell.shape, request["m_most"], request["seed"])
        kept = self._kept.pop(shape, None)
        if kept is None:
            self._data, self._peers = None, None
            while len(self._kept) >= _KEPT:
                del self._kept[next(iter(self._kept))]
            torch.cuda.empty_cache()
            l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
            copies = timing.buffers_for(cell.n * cell.k, l2)
            m, seed = request["m_most"], request["seed"]
            data = Data(cell.scheme, cell.n, cell.k, m, cell.dtype, "cuda", copies, seed)
            kept = data, Peers(cell, m, seed, copies, request["peers"])
        self._data, self._peers = self._kept[shape] = kept
        refused = {}
        for op in cell.ops:
            problem = cell.problem(op)
            for backend in willing(cell, op, self.device, {}):
                why = backend.probe(problem, self.device)
                if why:
                    refused[backend.name] = why
        return {"refused": refused}

    def _time(self, cell: Cell, backend: Backend, config: Config, share: int) -> dict[str, Any]:
        problem = cell.problem(cell.ops[0])
        try:
            calls = self._calls(problem, backend, config)
            complaint = "" if share > 1 else self._judged(problem, backend, calls)
            if complaint:
                return {"kind": "wrong", "refused": complaint}
            return {"us": self._measured(calls, FIRST_US * share)}
        except Exception as error:
            return _failure(error)

    def _race(self, cell: Cell, request: dict[str, Any]) -> dict[str, Any]:
        """Finalists, the default path and peers side by side; ratios are default / entry."""
        problem = cell.problem(request["op"])
        contenders: dict[str, list[Call]] = {}
        refused: dict[str, tuple[str, str]] = {}
        for name, entry in request["entries"].items():
            backend, config = _candidate(entry)
            try:
                calls = self._calls(problem, backend, config)
                complaint = self._judged(problem, backend, calls)
                if complaint:
                    refused[name] = ("wrong", complaint)
                    continue
                self._captured(calls, 1)
                contenders[name] = calls
            except Exception as error:
                failure = _failure(error)
                refused[name] = (failure["kind"], failure["refused"])
        peers, missing = {}, {}
        if request["peers"] and self._peers is not None:
            peers, missing = self._peers.contenders(request["op"], cell.m)
        refused |= {name: ("failed", why) for name, why in missing.items()}
        for name, calls in list(peers.items()):
            try:
                self._captured(calls, 1)
            except Exception as error:
                refused[name] = ("failed", _failure(error)["refused"])
                del peers[name]
        everyone = contenders | peers
        if not contenders:
            return {"us": {}, "ratios": {}, "refused": refused, "peers": []}
        once = _once_us(next(iter(contenders.values()))[0])
        # long calls need no long graphs, and their ratios fewer rounds
        at_least = max(1, min(_CALLS, round(2 * BLOCK_US / once)))
        rounds = ROUNDS if once < BLOCK_US / 2 else LONG_ROUNDS
        races = [
            timing.race(everyone, rounds, BLOCK_US, at_least, self._graph) for _ in range(RUNS)
        ]
        us = {name: statistics.median(race[name].us for race in races) for name in everyone}
        ratios: dict[str, tuple[float, float, float]] = {}
        default = request["default"]
        for name in everyone if default in contenders else ():
            found = [timing.ratio(race[default], race[name], _SAMPLES) for race in races]
            middle = statistics.fmean(r.value for r in found)
            ratios[name] = (middle, min(r.low for r in found), max(r.high for r in found))
        return {"us": us, "ratios": ratios, "refused": refused, "peers": sorted(peers)}

    def _calls(self, problem: Problem, backend: Backend, config: Config) -> list[Call]:
        data = self._data
        assert data is not None
        why = backend.illegal(config, problem, self.device)
        if why:
            raise ValueError(f"it {why}")
        weights = data.prepared(backend, backend.layout_of(config))
        m, run = problem.m, backend.run
        if backend.kind != "w8a8":
            x = data.x[:m]
            return [lambda w=w: run(x, w, problem, config) for w in weights]
        if problem.op == "linear":
            quantize = data.quantize
            return [lambda w=w: run(quantize(m), w, problem, config) for w in weights]
        q = data.quantized(m)
        return [lambda w=w: run(q, w, problem, config) for w in weights]

    def _judged(self, problem: Problem, backend: Backend, calls: Sequence[Call]) -> str:
        """The last copy's product, on memory that held NaN, so that what is not written shows."""
        data = self._data
        assert data is not None
        dtype = data.x.dtype
        poison = torch.full((problem.m, data.n), float("nan"), dtype=dtype, device=data.place)
        del poison
        y = calls[-1]()
        assert isinstance(y, torch.Tensor)
        return data.judge(y, problem.m, backend.kind == "w8a8", problem.accumulate)

    def _graph(self, calls: Sequence[Call], at_least: int) -> tuple[torch.cuda.CUDAGraph, int]:
        repeats = max(1, -(-at_least // len(calls)))
        return self._captured(calls, repeats), repeats * len(calls)

    def _captured(self, calls: Sequence[Call], repeats: int) -> torch.cuda.CUDAGraph:
        # not by `torch.cuda.graph`, which empties the allocator's cache each time
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream()
            # a pool without a graph cannot be captured into again
            self._keeper = self._capture([lambda: torch.zeros(1, device="cuda")], 1)
        return self._capture(calls, repeats)

    def _capture(self, calls: Sequence[Call], repeats: int) -> torch.cuda.CUDAGraph:
        self._stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            calls[0]()
            torch.cuda.synchronize()
            graph.capture_begin(pool=self._pool)
            try:
                for _ in range(repeats):
                    for call in calls:
                        call()
            except BaseException:
                # this process captures no more
                with suppress(RuntimeError):
                    graph.capture_end()
                raise _Lost from None
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph

    def _measured(self, calls: Sequence[Call], target_us: float) -> float:
        # of long calls a graph holds each weight copy once, so that 8,192 rows take no second
        most = max(1, round(FIRST_US / (_once_us(calls[0]) * len(calls))))
        repeats = min(-(-_CALLS // len(calls)), most)
        graph = self._captured(calls, repeats)
        (once,) = _replays(graph, 1)
        times = sorted(_replays(graph, max(3, min(64, round(target_us / max(once, 1.0))))))
        return times[len(times) // 2] / (repeats * len(calls))


def _once_us(call: Call) -> float:
    """About: launched from Python, short ones take longer than they are."""
    call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return max(1.0, 1e3 * start.elapsed_time(end))


class _Lost(Exception):
    """A call cannot be captured."""

    def __str__(self) -> str:
        return f"cannot be captured into a graph: {self.__context__}"


def _replays(graph: torch.cuda.CUDAGraph, count: int) -> list[float]:
    """µs of each of `count` replays after one that is not timed."""
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    # a sleeping GPU lets the CPU enqueue everything before any of it is timed
    torch.cuda._sleep(100_000)
    graph.replay()
    for start, end in pairs:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [1e3 * start.elapsed_time(end) for start, end in pairs]


def _candidate(entry: dict[str, Any]) -> tuple[Backend, Config]:
    backend = gemm.backend(entry["backend"])
    return backend, backend.config_class.from_dict(entry["config"])


def _failure(error: Exception) -> dict[str, Any]:
    first = (str(error) or repr(error)).splitlines()[0][:200]
    found = {"kind": "failed", "refused": f"{type(error).__name__}: {first}"}
    if isinstance(error, _Lost):
        return found | {"last": True}
    try:
        torch.cuda.synchronize()
    except Exception:
        # the context is lost, and with it this process: the next request gets a new one
        found |= {"kind": "crashed", "last": True}
    return found
