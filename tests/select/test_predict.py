"""The ranker against what an H200 measured: it takes the best timed configuration, or one near."""

import json
import lzma
import math
from collections import defaultdict
from pathlib import Path

import pytest

from anyfp8 import gemm
from anyfp8.device import find_device
from anyfp8.gemm.base import Config
from anyfp8.gemm.tiles import TileConfig
from anyfp8.problem import Problem, Scheme
from anyfp8.select.predict import estimate, rank

H200 = find_device("NVIDIA H200")
SCHEMES = {
    "row": Scheme("channel", "token", True),
    "block": Scheme("block", "group", True, block=(128, 128), group=128),
}
SWEEP = Path(__file__).parents[1] / "data/gemm/h200_sweep.jsonl.xz"


def cells():
    """(kind, problem) -> {config or None for the library: µs}."""
    found = defaultdict(dict)
    for line in lzma.decompress(SWEEP.read_bytes()).decode().splitlines()[1:]:
        kind, n, k, m, config, us = json.loads(line)
        problem = Problem("gemm", SCHEMES[kind], m, n, k, accumulate="fast")
        found[kind, problem][config and TileConfig(*config)] = us
    return found


def geometric_mean(values):
    values = list(values)
    return math.exp(sum(map(math.log, values)) / len(values))


@pytest.mark.parametrize("kind", ["row", "block"])
def test_the_first_configuration_is_within_a_tenth_of_the_best_one_timed(kind):
    backend = gemm.backend(f"triton_{kind}")
    reached = {}
    for (found, problem), timed in cells().items():
        if found != kind:
            continue
        timed = {config: us for config, us in timed.items() if config}
        first = min(timed, key=lambda config: estimate(problem, H200, backend, config))
        reached[problem.key] = min(timed.values()) / timed[first]
    assert geometric_mean(reached.values()) >= 0.90
    assert min(reached.values()) >= 0.65, min(reached, key=reached.get)


def test_choosing_between_the_library_and_our_kernel_costs_little():
    reached = []
    for (kind, problem), timed in cells().items():
        ours, library = gemm.backend(f"triton_{kind}"), gemm.backend("torch_scaled_mm")
        guesses = {
            config: estimate(problem, H200, ours if config else library, config or Config())
            for config in timed
        }
        reached.append(min(timed.values()) / timed[min(guesses, key=guesses.get)])
    assert geometric_mean(reached) >= 0.90


@pytest.mark.parametrize("kind", ["row", "block"])
@pytest.mark.parametrize("m", [1, 16, 64, 256, 4096])
def test_what_was_several_times_slower_is_not_in_the_search_space(kind, m):
    backend = gemm.backend(f"triton_{kind}")
    problem = Problem("gemm", SCHEMES[kind], m, 6144, 4096, accumulate="fast")
    every = set(backend.configs(problem, H200))
    assert rank(problem, H200, (backend,))[0].config in every
    # two warps under a tall tile, and sums or operands that do not fit the registers
    assert not [c for c in every if c.block_m >= 64 and c.num_warps < 4]
    slow = {
        "row": [TileConfig(16, 256, 512, 8, 2, 2), TileConfig(128, 64, 512, 8, 2, 3)],
        "block": [TileConfig(128, 128, 128, 8, 4, 4), TileConfig(64, 128, 128, 8, 2, 6)],
    }
    assert every.isdisjoint(slow[kind])
