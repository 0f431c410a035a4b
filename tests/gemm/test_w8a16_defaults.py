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


def reached(arch):
    """Problem -> µs of the best configuration timed over µs of the default."""
    timed = defaultdict(dict)
    for line in lzma.decompress(SWEEP.read_bytes()).decode().splitlines()[1:]:
        name, n, k, m, config, us = json.loads(line)
        if name == arch:
            problem = Problem("linear", Scheme("channel"), m, n, k)
            timed[problem][comparable(W8A16Config(*config))] = us
    return {
        problem: min(found.values())
        / found[comparable(BACKEND.default_config(problem, DEVICES[arch]))]
        for problem, found in timed.items()
    }


def comparable(config):
    # its tile does not matter there
    return "chunked" if config.how == "chunked" else config


@pytest.mark.parametrize("arch", DEVICES)
def test_the_default_reaches_the_best_configuration_timed(arch):
    ratios = reached(arch)
    assert len(ratios) == 32
    assert math.exp(sum(map(math.log, ratios.values())) / 32) >= 0.97
    assert min(ratios.values()) >= 0.90, min(ratios, key=ratios.get)


@pytest.mark.parametrize("arch", DEVICES)
def test_eight_tokens_are_served_as_sixteen(arch):
    for n, k in ((4096, 4096), (24576, 4096)):
        eight, sixteen = (
            BACKEND.default_config(Problem("linear", Scheme("channel"), m, n, k), DEVICES[arch])
            for m in (8, 16)
        )
        assert eight == sixteen
