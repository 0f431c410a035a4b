"""Calls → µs that each takes the host: timed in turns, on the core that is disturbed least.

The cores of a virtual machine are shared. For seconds at a time one is 1.5 times slower, and what
is timed then looks worse than what was timed before: that, and neither the GPU (idle or behind, a
queue that is empty or full) nor outputs kept or dropped nor garbage, moved figures by half on the
H200. So a round times every call, after a fixed piece of work has found the quickest core, and
rounds in which that work took longer count apart.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

# of the same work on the same core: what a round may take longer and still count
_QUIET = 1.1
_ROUNDS_A_CORE = 50


@dataclass(frozen=True)
class HostTime:
    """Of one call.

    Attributes:
        us: median over undisturbed rounds. all_us: over all of them.
        quiet: the share of rounds that were undisturbed.
    """

    us: float
    all_us: float
    quiet: float


def host_times(
    calls: Mapping[str, Callable[[], object]],
    synchronize: Callable[[], object],
    seconds: float = 4.0,
    each: int = 20,
) -> dict[str, HostTime]:
    """Time calls that queue work on a GPU.

    Args:
        synchronize: waits for the GPU: its queue is empty when a call's turn begins.
        seconds: for all of them. each: how often a call is made in its turn.
    """
    for call in calls.values():
        for _ in range(each):
            call()
    works: list[float] = []
    times: dict[str, list[float]] = {name: [] for name in calls}
    with _on_one_core() as find_core:
        end = perf_counter() + seconds
        while not works or perf_counter() < end:
            if len(works) % _ROUNDS_A_CORE == 0:
                find_core()
            before = _work()
            for name, call in calls.items():
                synchronize()
                began = perf_counter()
                for _ in range(each):
                    call()
                times[name].append((perf_counter() - began) / each * 1e6)
            synchronize()
            works.append(max(before, _work()))
    least = sorted(works)[len(works) // 50]
    quiet = [number for number, work in enumerate(works) if work <= _QUIET * least]
    return {
        name: HostTime(
            statistics.median(found[number] for number in quiet),
            statistics.median(found),
            len(quiet) / len(works),
        )
        for name, found in times.items()
    }


def _work() -> float:
    """Seconds of about 0.1 ms of work."""
    began = perf_counter()
    sum(range(5000))
    return perf_counter() - began


@contextmanager
def _on_one_core() -> Iterator[Callable[[], None]]:
    """Gives what moves this thread to the quickest core; it may use all of them afterwards."""
    if not hasattr(os, "sched_setaffinity"):
        yield lambda: None
        return
    cores = os.sched_getaffinity(0)

    def find() -> None:
        took = {}
        for core in cores:
            os.sched_setaffinity(0, {core})
            took[core] = min(_work() for _ in range(3))
        os.sched_setaffinity(0, {min(took, key=lambda core: took[core])})

    try:
        yield find
    finally:
        os.sched_setaffinity(0, cores)
