"""Default tiles: near the best that an H200 timed, legal everywhere, as large as SMs allow."""

import json
import lzma
import math
from collections import defaultdict
from pathlib import Path

import pytest

from anyfp8 import gemm
from anyfp8.device import ARCHES, find_device, generic_device
from anyfp8.gemm.tiles import TileConfig
from anyfp8.problem import Problem, Scheme

H200 = find_device("NVIDIA H200")
SCHEMES = {
    "row": Scheme("channel", "token", True),
    "block": Scheme("block", "group", True, block=(128, 128), group=128),
}
DATA = Path(__file__).parents[1] / "data/gemm"


def timed_cells():
    """(kind, n, k, m) → {tile: µs}."""
    cells = defaultdict(dict)
    for name in ("h200_sweep.jsonl.xz", "h200_chosen.jsonl.xz", "h200_thirds.jsonl.xz"):
        for line in lzma.decompress((DATA / name).read_bytes()).decode().splitlines()[1:]:
            kind, n, k, m, config, us = json.loads(line)[:6]
            if config:
                cells[kind, n, k, m][TileConfig(*config)] = us
    return cells


def default(kind, m, n, k, device=H200, **more):
    problem = Problem("gemm", SCHEMES[kind], m, n, k, **{"accumulate": "fast"} | more)
    return gemm.backend(f"triton_{kind}").default_config(problem, device)


def test_default_tiles_are_near_the_best_timed():
    reached = []
    for (kind, n, k, m), timed in timed_cells().items():
        tile = default(kind, m, n, k)
        us = timed.get(tile)
        # timed when the spare lanes of a last tile all read one row
        if us is not None and not (m > tile.block_m and m % tile.block_m):
            reached.append(math.log(min(timed.values()) / us))
    assert len(reached) >= 60
    assert math.exp(sum(reached) / len(reached)) >= 0.97
    assert math.exp(min(reached)) >= 0.88


@pytest.mark.parametrize(
    ("m", "n", "k", "want"),
    [
        (1, 6144, 4096, TileConfig(16, 64, 256, 8, 4, 8, swap=True)),
        (32, 4096, 12288, TileConfig(32, 64, 256, 8, 4, 8, swap=True)),
        # three tiles an SM at once
        (16, 24576, 4096, TileConfig(16, 64, 256, 8, 4, 3, swap=True)),
        (1, 1280, 8192, TileConfig(16, 64, 256, 8, 4, 8, swap=True)),
        (33, 6144, 4096, TileConfig(64, 64, 256, 8, 4, 6)),
        # 132 tiles of 16 columns for 132 SMs
        (64, 2112, 7168, TileConfig(64, 16, 256, 8, 4, 8)),
        (128, 2112, 7168, TileConfig(64, 32, 256, 8, 4, 6)),
        (64, 24576, 4096, TileConfig(64, 128, 128, 8, 4, 4)),
        (256, 4096, 4096, TileConfig(64, 128, 256, 8, 4, 4)),
        # 2.9 waves of smaller tiles in place of 1.5
        (1024, 6144, 4096, TileConfig(128, 128, 128, 8, 4, 6)),
        (256, 24576, 4096, TileConfig(128, 128, 128, 8, 4, 6)),
        # 384 tiles on 396 places
        (512, 6144, 4096, TileConfig(64, 128, 128, 8, 4, 3)),
        (128, 24576, 4096, TileConfig(64, 128, 128, 8, 4, 3)),
        (4096, 4096, 4096, TileConfig(128, 256, 128, 8, 8, 4)),
    ],
)
def test_hopper_takes_the_largest_tile_of_which_there_are_enough(m, n, k, want):
    assert default("row", m, n, k) == want


@pytest.mark.parametrize(
    ("m", "n", "k", "want"),
    [
        # two tiles an SM at once
        (1, 4096, 12288, TileConfig(8, 16, 128, 8, 4, 3, parts=8)),
        (8, 6144, 4096, TileConfig(8, 32, 128, 8, 4, 3, swap=True, parts=4)),
        (8, 24576, 4096, TileConfig(8, 64, 128, 8, 4, 3, swap=True, parts=2)),
        (9, 4096, 4096, TileConfig(16, 16, 128, 8, 4, 4, parts=4)),
        (16, 6144, 4096, TileConfig(16, 16, 128, 8, 4, 3, parts=4)),
        (16, 24576, 4096, TileConfig(16, 64, 128, 8, 4, 3, swap=True, parts=2)),
        (32, 4096, 4096, TileConfig(32, 32, 128, 8, 4, 6, parts=2)),
        (64, 4096, 12288, TileConfig(64, 32, 128, 8, 4, 4, parts=2)),
        (64, 6144, 4096, TileConfig(64, 64, 128, 8, 4, 6)),
        (65, 4096, 4096, TileConfig(64, 64, 128, 8, 4, 6)),
    ],
)
def test_block_scales_of_few_rows_put_k_tiles_side_by_side(m, n, k, want):
    assert default("block", m, n, k) == want
    # on Blackwell nobody has timed it
    assert default("block", m, n, k, find_device("NVIDIA B200")).parts == 1


@pytest.mark.parametrize("m", [1, 16, 17, 32, 33, 64, 65, 128, 4097])
def test_where_sums_are_kept_twice_tiles_are_smaller_and_steps_as_short_as_they_must_be(m):
    for kind, accumulate in (("row", "fp32_128"), ("block", "fast")):
        tile = default(kind, m, 6144, 4096, accumulate=accumulate)
        assert tile.block_k == 128
        assert tile.from_shared(H200)
        assert 2 * tile.sums <= 128


@pytest.mark.parametrize("arch", [name for name, arch in ARCHES.items() if arch.fp8])
@pytest.mark.parametrize("kind", SCHEMES)
def test_every_default_is_legal_and_puts_the_weight_first_only_for_warp_groups(arch, kind):
    device = generic_device(ARCHES[arch])
    backend = gemm.backend(f"triton_{kind}")
    for n, k in ((1, 1), (33, 80), (576, 7168), (2112, 7168), (57344, 8192)):
        for m in (0, 1, 16, 17, 33, 65, 129, 512, 8192):
            for out in ("bf16", "fp32"):
                problem = Problem("gemm", SCHEMES[kind], m, n, k, "bf16", out)
                tile = backend.default_config(problem, device)
                assert backend.illegal(tile, problem, device) is None
                assert tile.block_m >= min(m, 8)
                assert tile.block_m * tile.parts >= 16
                if tile.swap or tile.parts > 1:
                    assert tile.from_shared(device)
                if tile.swap:
                    assert m <= tile.block_m <= 32
