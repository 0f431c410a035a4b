"""≤ 25 timed configurations → the few best: the ranker's first, some unlike them, neighbours.

log µs(c) ≈ log guess(c) + mean over what was timed of exp(-steps to it) · log(µs / guess): what the
ranker misjudged near one configuration it misjudges near its neighbours, so they are chosen by it.

Nothing here measures. A search is a generator: it yields batches of `Ask`, is sent what each took,
and returns the finalists, best first. So a GPU, a replay of a recorded sweep and a noisy fake drive
the same code, and whoever drives may time what is compiled while the rest compiles. The surprise:
the first timing is short, and a lucky one would win; the better third is therefore timed again and
longer, and only those second times count among the finalists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from anyfp8.gemm.base import Config

# how much longer than the first a second timing is
LONGER = 3
# configurations of one tile among the first
_A_TILE = 2
# after the first: batches, and how many of the ranker's order they come from
_BATCHES, _LOOKED_AT = 3, 600
# µs from which a second timing is close enough that half as many finalists do
_LONG_US = 100.0
# what the mean of all ratios weighs beside a configuration at no distance
_MEAN = 0.1


@dataclass(frozen=True)
class Effort:
    """How much one search may time.

    Attributes:
        first: of the ranker's order. diverse: unlike those. most: configurations in all.
        again: of the best that are timed a second time. finalists: how many are returned.
    """

    first: int = 12
    diverse: int = 4
    most: int = 25
    again: int = 10
    finalists: int = 6


FULL = Effort()
QUICK = Effort(first=6, diverse=2, most=12, again=6, finalists=4)


@dataclass(frozen=True)
class Ask:
    """Time a configuration, `share` times as long as a first timing."""

    config: Config
    share: int = 1


Times = Mapping[Config, "float | None"]
Search = Generator[tuple[Ask, ...], Times, tuple[Config, ...]]


def search(
    guesses: Mapping[Config, float], effort: Effort = FULL, default: Config | None = None
) -> Search:
    """Look for the fastest configuration of a space.

    Args:
        guesses: the space with estimated µs, the fastest first.
        default: is timed too, as one of the first.

    Yields:
        What to time next. Send {config: µs}, with None for one that failed or gave no usable time.

    Returns:
        The finalists, best first; empty where nothing could be timed.
    """
    space = Space(guesses)
    known: dict[Config, float] = {}
    asked: dict[Config, None] = {}

    def batch(configs: Sequence[Config]) -> tuple[Ask, ...]:
        fresh = [c for c in dict.fromkeys(configs) if c not in asked]
        fresh = fresh[: effort.most - len(asked)]
        asked.update(dict.fromkeys(fresh))
        return tuple(Ask(c) for c in fresh)

    def best(count: int) -> list[Config]:
        return sorted(known, key=lambda c: known[c])[:count]

    opening = space.first(effort.first)
    opening += [default] if default is not None else []
    opening += space.unlike(opening, effort.diverse)
    asks = batch(opening)
    for rest in range(_BATCHES, -1, -1):
        known |= usable(known, (yield asks))
        left = effort.most - len(asked)
        if not left or not known or not rest:
            break
        likely = [c for c in space.likeliest(known) if c not in asked]
        asks = batch(likely[: max(-(-left // rest), 2)])
        if not asks:
            break
    again = best(effort.again)
    if len(again) < 2:
        return tuple(again)
    second = usable(known, (yield tuple(Ask(c, LONGER) for c in again)))
    order = sorted(second, key=lambda c: second[c])
    long = bool(order) and second[order[0]] > _LONG_US
    count = max(2, effort.finalists // 2) if long else effort.finalists
    return tuple(order[:count]) or tuple(again[:1])


def usable(known: Mapping[Config, float], times: Times) -> dict[Config, float]:
    """Times that can be true: of zero, negative and endless ones nothing is learnt."""
    return {c: us for c, us in times.items() if us is not None and 0 < us < math.inf}


def drive(
    steps: Search, time: Callable[[Config, int], float | None]
) -> tuple[tuple[Config, ...], dict[Config, float | None]]:
    """Run a search to its end; returns the finalists and the last time of each configuration."""
    seen: dict[Config, float | None] = {}
    try:
        asks = next(steps)
        while True:
            times = {ask.config: time(ask.config, ask.share) for ask in asks}
            seen |= times
            asks = steps.send(times)
    except StopIteration as stop:
        return stop.value, seen


class Space:
    """Configurations of one kind, their guesses, and how many steps apart they are."""

    def __init__(self, guesses: Mapping[Config, float]) -> None:
        self.guesses = guesses
        self.order = list(guesses)
        names = [f.name for f in fields(self.order[0])] if guesses else []
        self._values = [sorted({getattr(c, n) for c in guesses}, key=_rank_of) for n in names]
        self._names = names
        self._places = np.array([self._position(c) for c in self.order])

    def first(self, count: int) -> list[Config]:
        """The first in order, at most two of one tile: the model hardly tells warps and stages."""
        seen: dict[tuple[object, ...], int] = {}
        found = []
        for config in self.order:
            tile = tuple(getattr(config, n) for n in self._names if not n.startswith("num_"))
            seen[tile] = seen.get(tile, 0) + 1
            if seen[tile] <= _A_TILE:
                found.append(config)
            if len(found) == count:
                break
        return found

    def unlike(self, configs: Sequence[Config], count: int) -> list[Config]:
        """Of the better quarter those farthest from `configs` and from each other."""
        pool = self._places[: max(64, len(self.order) // 4)]
        if not configs or not len(pool):
            return []
        nearest = np.min([self._steps(pool, c) for c in configs], axis=0)
        found = []
        for _ in range(min(count, len(pool))):
            found.append(self.order[int(nearest.argmax())])
            nearest = np.minimum(nearest, self._steps(pool, found[-1]))
        return found

    def likeliest(self, known: Mapping[Config, float]) -> list[Config]:
        """The better ones by the ranker, in the order of what is known of their neighbours."""
        # of one that the ranker does not know the ratio would mean nothing
        missed = {c: math.log(us / self.guesses[c]) for c, us in known.items() if c in self.guesses}
        if not missed:
            return self.order
        places = self._places[:_LOOKED_AT]
        weights = np.exp(-np.array([self._steps(places, c) for c in missed]))
        ratios = np.array(list(missed.values()))
        near = (ratios @ weights + _MEAN * ratios.mean()) / (weights.sum(0) + _MEAN)
        guesses = np.fromiter(self.guesses.values(), float)[:_LOOKED_AT]
        return [self.order[i] for i in np.argsort(np.log(guesses) + near, kind="stable")]

    def _steps(self, places: np.ndarray, config: Config) -> np.ndarray:
        """How many values of parameters lie between a configuration and each of `places`."""
        return np.abs(places - self._position(config)).sum(1)

    def _position(self, config: Config) -> list[int]:
        """Of each parameter, which of the space's values it has; past the end where none."""
        return [
            values.index(v) if (v := getattr(config, name)) in values else len(values)
            for name, values in zip(self._names, self._values, strict=True)
        ]


def _rank_of(value: object) -> tuple[int, object]:
    return (0, value) if isinstance(value, (int, float)) else (1, str(value))
