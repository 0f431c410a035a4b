"""time(A) / time(B), measured so that it means something: CUDA graphs, cold buffers, paired rounds.

Every benchmark uses this one protocol. A contender is a list of calls over rotating buffers,
captured into one CUDA graph, so that no launch is timed from Python. Contenders of a cell run in
rounds: each replays for about a millisecond, in a new order, and a ratio is the median over rounds
of two times taken next to each other, with a bootstrap interval. The surprise: medians of
separate runs differ by 1 to 4 %, so an unpaired comparison below that is noise.
"""

from __future__ import annotations

import math
import platform
import random
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

import torch

Call = Callable[[], object]
# calls, at least so many in the graph -> the graph and how many it holds
Captured = Callable[[Sequence[Call], int], "tuple[torch.cuda.CUDAGraph, int]"]

# together the rotating buffers are this many times the L2, so that each call finds it cold
COLD_FACTOR = 4
MAX_BUFFERS = 64


@dataclass(frozen=True)
class Timing:
    """µs of one call of a contender.

    Attributes:
        us: median over rounds. low_us, high_us: 20th and 80th percentile.
        rounds: µs of each round, in order, for pairing with another contender of the same cell.
        calls: calls in the graph.
    """

    us: float
    low_us: float
    high_us: float
    rounds: tuple[float, ...]
    calls: int


@dataclass(frozen=True)
class Ratio:
    """time of another / time of ours: above 1 ours is faster; [low, high] is its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """ "won", "lost", or "tie" where the interval holds 1."""
        if self.low > 1:
            return "won"
        return "lost" if self.high < 1 else "tie"


def buffers_for(bytes_each: int, l2_bytes: int) -> int:
    """How many buffer sets make the L2 cold, at most `MAX_BUFFERS`: tiny ones stay warm."""
    return max(2, min(MAX_BUFFERS, math.ceil(COLD_FACTOR * l2_bytes / max(1, bytes_each))))


def capture(calls: Sequence[Call], at_least: int = 64) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of all calls in turn, repeated to at least `at_least`; warmed up first."""
    repeats = max(1, -(-at_least // len(calls)))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    return graph, repeats * len(calls)


def race(
    contenders: Mapping[str, Sequence[Call]],
    rounds: int = 21,
    block_us: float = 800.0,
    at_least: int = 64,
    captured: Captured = capture,
) -> dict[str, Timing]:
    """Time contenders side by side.

    Args:
        contenders: name -> calls over rotating buffers, all doing the same work.
        rounds: blocks of replays of each contender.
        block_us: length of one block.
        at_least: calls in a graph; fewer where each is long. captured: makes one.

    Returns:
        name -> Timing; `rounds` of two timings pair up.
    """
    graphs: dict[str, tuple[torch.cuda.CUDAGraph, int, int]] = {}
    for name, calls in contenders.items():
        graph, n_calls = captured(calls, at_least)
        graph.replay()
        start, end = _event(), _event()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        replay_us = max(1.0, 1e3 * start.elapsed_time(end))
        graphs[name] = (graph, n_calls, max(1, round(block_us / replay_us)))
    names = list(graphs)
    events: dict[str, list[tuple[Any, Any]]] = {name: [] for name in names}
    for number in range(rounds):
        # a sleeping GPU lets the CPU enqueue the whole round before any of it is timed
        torch.cuda._sleep(200_000)
        # a rotated order would keep each contender behind the same other one, which leaves it an L2
        for name in random.Random(number).sample(names, len(names)):
            graph, _, replays = graphs[name]
            start, end = _event(), _event()
            graph.replay()
            start.record()
            for _ in range(replays):
                graph.replay()
            end.record()
            events[name].append((start, end))
        torch.cuda.synchronize()
    result = {}
    for name in names:
        _, n_calls, replays = graphs[name]
        times = tuple(1e3 * s.elapsed_time(e) / (n_calls * replays) for s, e in events[name])
        ordered = sorted(times)
        low, high = ordered[len(times) // 5], ordered[len(times) * 4 // 5]
        result[name] = Timing(statistics.median(times), low, high, times, n_calls)
    return result


def ratio(other: Timing, ours: Timing, samples: int = 1000) -> Ratio:
    """time(other) / time(ours) over paired rounds, with a bootstrap 95 % interval of the median."""
    pairs = [a / b for a, b in zip(other.rounds, ours.rounds, strict=True)]
    return Ratio(statistics.median(pairs), *interval_of(pairs, samples))


def interval_of(values: Sequence[float], samples: int = 1000) -> tuple[float, float]:
    """The bootstrap 95 % interval of the median."""
    picker = random.Random(0)
    medians = sorted(
        statistics.median(picker.choices(values, k=len(values))) for _ in range(samples)
    )
    return medians[int(0.025 * samples)], medians[int(0.975 * samples)]


def interval_us(timings: Sequence[Timing], samples: int = 200) -> tuple[float, float]:
    """95 % interval of µs over several runs: from the least to the greatest that any run allows."""
    ends = [interval_of(timing.rounds, samples) for timing in timings]
    return min(low for low, _ in ends), max(high for _, high in ends)


def geometric_mean(values: Sequence[float]) -> float:
    """The mean that ratios have; NaN of nothing."""
    return math.exp(statistics.fmean(map(math.log, values))) if values else math.nan


def header() -> dict[str, Any]:
    """What a result needs to be compared: date, GPU, driver, clocks, and versions of software."""
    import anyfp8

    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = ""
    facts: dict[str, Any] = {
        "date": date.today().isoformat(),
        "anyfp8": anyfp8.__version__,
        "torch": torch.__version__,
        "triton": triton_version,
        "python": platform.python_version(),
        "gpu": "",
        "driver": "",
        "clocks_mhz": {},
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        facts["gpu"] = properties.name
        facts["sms"] = properties.multi_processor_count
        facts["l2_bytes"] = properties.L2_cache_size
        facts.update(_nvidia_smi())
    return facts


def _nvidia_smi() -> dict[str, Any]:
    query = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", "-i", "0"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    driver, sm, memory, most, watts = (part.strip() for part in output.stdout.split(",")[:5])
    return {
        "driver": driver,
        "clocks_mhz": {"sm": sm, "memory": memory, "max_sm": most},
        "power_limit_w": watts,
    }


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)
