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
from anyfp8.tools import measured

H200 = find_device("NVIDIA H200")
SCHEMES = {
    "row": Scheme("channel", "token", True),
    "block": Scheme("block", "group", True, block=(128, 128), group=128),
}
DATA = Path(__file__).parents[1] / "data/gemm"
RACE = "h200_race.jsonl.xz"


def timings(name):
    """Header, then (kind, problem, config or None for the library, µs)."""
    lines = lzma.decompress((DATA / name).read_bytes()).decode().splitlines()
    found = []
    for line in lines[1:]:
        kind, n, k, m, config, us = json.loads(line)[:6]
        # before, lanes past the last row all read the first one, which took up to twice as long
        if name != RACE and config and m > config[0] and m % config[0]:
            continue
        problem = Problem("gemm", SCHEMES[kind], m, n, k, accumulate="fast")
        found.append((kind, problem, config and TileConfig(*config), us))
    return json.loads(lines[0]), found


def cells():
    """(kind, problem) -> {config or None for the library: µs}."""
    found = defaultdict(dict)
    for name in ("h200_sweep.jsonl.xz", "h200_chosen.jsonl.xz", RACE):
        for kind, problem, config, us in timings(name)[1]:
            found[kind, problem][config] = us
    return found


def chosen(held_out):
    """Timings of configurations that a plan may hold, at Ms used for the fit or at the others."""
    header, found = timings("h200_chosen.jsonl.xz")
    return [line for line in found if (line[1].m in header["held_out_ms"]) == held_out]


def geometric_mean(values):
    values = list(values)
    return math.exp(sum(map(math.log, values)) / len(values))


@pytest.mark.parametrize("held_out", [True, False])
@pytest.mark.parametrize("kind", ["row", "block"])
def test_nine_in_ten_estimates_are_within_a_quarter_also_where_nothing_was_fitted(kind, held_out):
    backend = gemm.backend(f"triton_{kind}")
    errors = sorted(
        abs(estimate(problem, H200, backend, config) / us - 1)
        for found, problem, config, us in chosen(held_out)
        if found == kind
    )
    assert len(errors) >= 80
    assert errors[len(errors) // 2] <= 0.10
    assert errors[len(errors) * 9 // 10] <= 0.25


def test_the_errors_that_explain_prints_come_from_those_held_out():
    timed = {(kind, p.m, p.n, p.k, c): us for kind, p, c, us in chosen(True)}
    lines = [
        line
        for line in measured.ROWS.splitlines()
        if line.startswith(("triton_row", "triton_block"))
    ]
    assert len(lines) > 50
    for line in lines:
        name, config, _, n, k, figures = (cell.strip() for cell in line.split("|"))
        tile = TileConfig(*map(int, config.split()))
        for m, us in (pair.split(":") for pair in figures.split()):
            key = (name.removeprefix("triton_"), int(m), int(n), int(k), tile)
            assert float(us) == pytest.approx(timed[key], rel=0.2)


@pytest.mark.parametrize("kind", ["row", "block"])
def test_the_first_configuration_is_within_a_tenth_of_the_best_one_timed(kind):
    backend = gemm.backend(f"triton_{kind}")
    reached, by_shape = {}, defaultdict(list)
    for (found, problem), timed in cells().items():
        timed = {config: us for config, us in timed.items() if config}
        if found != kind or len(timed) < 3:
            continue
        first = min(timed, key=lambda config: estimate(problem, H200, backend, config))
        reached[problem.key] = min(timed.values()) / timed[first]
        by_shape[problem.n, problem.k].append(reached[problem.key])
    assert geometric_mean(reached.values()) >= (0.98 if kind == "row" else 0.955)
    # two kinds of tile were timed at the worst cell, 22.1 and 27.1 µs; others there take 19.8
    assert min(reached.values()) >= 0.82, min(reached, key=reached.get)
    for shape, some in by_shape.items():
        assert geometric_mean(some) >= 0.94, shape


def tuned():
    """(kind, m, n, k) -> {configuration: µs} of a tuner's run: 25 a cell, the ranker's first among
    them; eight shapes of two models, 21 Ms."""
    found = defaultdict(dict)
    lines = lzma.decompress((DATA / "h200_tune.jsonl.xz").read_bytes()).decode().splitlines()
    for kind, n, k, m, config, us in map(json.loads, lines[1:]):
        found[kind, m, n, k][TileConfig(*config)] = us
    return found


@pytest.mark.parametrize("held_out", [True, False])
@pytest.mark.parametrize("kind", ["row", "block"])
def test_the_first_configuration_is_near_the_best_that_a_tuner_found(kind, held_out):
    backend = gemm.backend(f"triton_{kind}")
    ms = timings("h200_chosen.jsonl.xz")[0]["held_out_ms"]
    reached, by_shape = [], defaultdict(list)
    for (found, m, n, k), timed in tuned().items():
        if found != kind or (m in ms) != held_out:
            continue
        problem = Problem("gemm", SCHEMES[kind], m, n, k, accumulate="fast")
        first = min(timed, key=lambda config: estimate(problem, H200, backend, config))
        reached.append(min(timed.values()) / timed[first])
        by_shape[n, k].append(reached[-1])
    assert len(reached) == (56 if held_out else 112)
    assert geometric_mean(reached) >= 0.955
    assert min(reached) >= 0.78
    for shape, some in by_shape.items():
        assert geometric_mean(some) >= 0.91, shape


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


def test_few_rows_take_a_tile_that_multiplies_fp8():
    backend = gemm.backend("triton_row")
    problem = Problem("gemm", SCHEMES["row"], 1, 6144, 4096, accumulate="fast")
    # 64-row tiles took 9.4 µs here and the best 16-row one 10.7
    assert rank(problem, H200, (backend,))[0].config.from_shared(H200)
    tall = {c.block_m for c in backend.configs(problem, find_device("NVIDIA L40S"))}
    assert tall == {16}


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
