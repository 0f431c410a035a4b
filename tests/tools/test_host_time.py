"""Host time of calls on cores that are slow for seconds at a time."""

import os

import pytest

from anyfp8.tools import host_time
from anyfp8.tools.host_time import host_times

SLOW = 1.5


class Host:
    """A clock; its core is slow in two of three stretches of 0.2 s."""

    def __init__(self):
        self.now = 0.0

    def spend(self, us):
        slow = int(self.now / 0.2) % 3 > 0
        self.now += us * 1e-6 * (SLOW if slow else 1)


@pytest.fixture
def host(monkeypatch):
    host = Host()

    def work():
        before = host.now
        host.spend(100)
        return host.now - before

    monkeypatch.setattr(host_time, "perf_counter", lambda: host.now)
    monkeypatch.setattr(host_time, "_work", work)
    return host


def test_calls_are_judged_by_undisturbed_rounds_though_these_are_few(host):
    calls = {name: lambda us=us: host.spend(us) for name, us in (("a", 5), ("b", 12))}
    found = host_times(calls, lambda: host.spend(30), seconds=6)
    for name, us in (("a", 5), ("b", 12)):
        assert found[name].us == pytest.approx(us)
        assert found[name].all_us == pytest.approx(SLOW * us)
        assert 0.2 < found[name].quiet < 0.5


def test_the_queue_is_empty_when_a_turn_begins(host):
    queued = 0
    deepest = []

    def call():
        nonlocal queued
        queued += 1
        host.spend(5)

    def synchronize():
        nonlocal queued
        deepest.append(queued)
        queued = 0

    host_times({"call": call}, synchronize, seconds=0.01, each=20)
    # the first waits for the warm-up too; before a round's first turn nothing is there
    assert max(deepest) == 20
    assert deepest[1::2] == [20] * len(deepest[1::2])


def test_the_thread_may_use_all_its_cores_afterwards():
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("threads cannot be pinned here")
    before = os.sched_getaffinity(0)
    with pytest.raises(ZeroDivisionError):
        host_times({"wrong": lambda: 1 / 0}, lambda: None)
    count = iter(range(1000))
    with pytest.raises(StopIteration):
        host_times({"wrong later": lambda: next(count)}, lambda: None)
    assert os.sched_getaffinity(0) == before
