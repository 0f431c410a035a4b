"""The unmeasured choice of `triton_w8a16` against what an H200 timed, also as an A100's code."""

import json
import lzma
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from anyfp8.device import ARCHES, find_device
from anyfp8.gemm.triton_w8a16 import BACKEND, W8A16Config
from anyfp8.problem import Problem, Scheme

H200 = find_device("NVIDIA H200")
SWEEP = Path(__file__).parents[1] / "data/gemm/h200_w8a16_sweep.jsonl.xz"
DEVICES = {
    "sm_90": H200,
    "sm_80": replace(H200, arch=ARCHES["sm_80"], shared_memory=ARCHES["sm_80"].shared_memory),
}


SHAPES = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288))


def timed():
    """(arch or contender, problem) -> {configuration: µs}."""
    found = defaultdict(dict)
    for line in lzma.decompress(SWEEP.read_bytes()).decode().splitlines()[1:]:
        name, n, k, m, config, us = json.loads(line)
        problem = Problem("linear", Scheme("channel"), m, n, k)
        key = comparable(W8A16Config(*config)) if config else None
        found[name, problem][key] = us
    return found


def comparable(config):
    # its tile does not matter there
    return "chunked" if config.how == "chunked" else config


def default(arch, problem):
    return comparable(BACKEND.default_config(problem, DEVICES[arch]))


def mean(ratios):
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


@pytest.mark.parametrize("arch", DEVICES)
def test_the_default_reaches_the_best_configuration_timed(arch):
    ratios = {
        problem: min(us.values()) / us[default(arch, problem)]
        for (name, problem), us in timed().items()
        if name == arch
    }
    assert len(ratios) == 36
    assert mean(ratios.values()) >= 0.98
    assert min(ratios.values()) >= 0.94, min(ratios, key=ratios.get)


@pytest.mark.parametrize("arch", DEVICES)
@pytest.mark.parametrize(
    ("other", "tokens", "want"),
    [("marlin", (1, 2, 4, 8, 16, 32, 64), 1.25), ("bf16", (1, 2, 4, 8, 16), 1.7)],
)
def test_the_default_beats_marlin_and_bf16_in_the_same_timings(arch, other, tokens, want):
    us = timed()
    ratios = []
    for n, k in SHAPES:
        for m in tokens:
            problem = Problem("linear", Scheme("channel"), m, n, k)
            ours = us[arch, problem][default(arch, problem)]
            ratios.append(us[other, problem][None] / ours)
    assert mean(ratios) >= want
    assert min(ratios) >= 0.9


@pytest.mark.parametrize("arch", DEVICES)
def test_two_to_eight_tokens_have_one_tile(arch):
    for n, k in SHAPES:
        tiles = {default(arch, Problem("linear", Scheme("channel"), m, n, k)) for m in (2, 3, 5, 8)}
        assert len(tiles) == 1
        assert tiles.pop().block_m == 8
