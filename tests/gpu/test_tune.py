"""The tuner on a real GPU: candidates judged and timed, kernels found where they were compiled."""

import json
import os
import subprocess
import sys

import pytest

from anyfp8.device import device_of
from anyfp8.form import counting
from anyfp8.gemm.triton_row import TritonRow
from anyfp8.problem import Scheme
from anyfp8.select.table import file_name, read_table
from anyfp8.tools.tune_cells import cells_of, read_shapes
from anyfp8.tools.tune_compile import Pool

pytestmark = pytest.mark.gpu

TILE = {"block_m": 64, "block_n": 64, "block_k": 128, "num_warps": 4, "num_stages": 4}


@pytest.fixture(scope="module")
def device():
    found = device_of("cuda")
    if not found.has_fp8:
        pytest.skip("row-scaled products need FP8 units")
    return found


@pytest.fixture(scope="module")
def bench():
    from anyfp8.tools.tune_measure import Bench

    return Bench()


def the_cell(device, m=16, shape="768,1024", scheme="w8a8-channel-token"):
    return cells_of(read_shapes([shape], Scheme.parse(scheme))[0], device, [m])[0]


def opened(bench, cell):
    request = {"cell": cell.to_dict(), "m_most": 64, "seed": 0, "peers": None}
    return bench.serve({"do": "open", **request})


def timed(bench, cell, config=TILE, share=1):
    about = {"cell": cell.to_dict(), "backend": "triton_row", "config": config, "share": share}
    return bench.serve({"do": "time", **about})


def floor_us(device, n, k):
    # weights that the L2 does not hold have to come from memory
    return n * k / ((device.bandwidth_gbs or 1e4) * 1e3)


def test_a_candidate_takes_at_least_the_way_of_its_weight_from_memory(bench, device):
    cell = the_cell(device, shape="4096,4096")
    assert "triton_row" not in opened(bench, cell)["refused"]
    # other tests may keep this GPU busy
    assert floor_us(device, 4096, 4096) < timed(bench, cell)["us"] < 1e4


@pytest.mark.perf
def test_two_timings_of_a_candidate_agree(bench, device):
    cell = the_cell(device, shape="4096,4096")
    opened(bench, cell)
    first, second = timed(bench, cell)["us"], timed(bench, cell, share=3)["us"]
    assert first < 3 * floor_us(device, 4096, 4096)
    assert abs(second / first - 1) < 0.1


def test_what_a_compiler_made_is_found_and_not_compiled_again(bench, device, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    cell = the_cell(device, m=48)
    opened(bench, cell)
    # the quantizer's kernels, which are not what is asked about
    assert timed(bench, cell)["us"] > 0
    tile = TILE | {"num_stages": 7}
    pool = Pool(device, 1)
    try:
        assert pool.submit(cell, "triton_row", tile).result(120) == ""
    finally:
        pool.close()
    with counting() as counts:
        assert timed(bench, cell, tile)["us"] > 0
    assert counts == {"compiled": 0, "loaded": 1}


@pytest.mark.parametrize("lie", ["zeros", "nan", "half", "scale", "raise"])
def test_a_kernel_that_is_wrong_has_no_time(bench, device, monkeypatch, lie):
    cell = the_cell(device)
    opened(bench, cell)
    right = TritonRow.run

    def run(self, x, prepared, problem, config, bias=None, out=None):
        if lie == "raise":
            raise RuntimeError("OutOfResources: shared memory")
        y = right(self, x, prepared, problem, config, bias, out)
        if lie == "zeros":
            return y.zero_()
        if lie == "nan":
            y[0, 0] = float("nan")
        if lie == "half":
            # the last columns are never written
            y[:, -64:] = float("nan")
        if lie == "scale":
            # neighbouring channels' scales mixed up
            return y.roll(1, 1)
        return y

    monkeypatch.setattr(TritonRow, "run", run)
    found = timed(bench, cell)
    assert "us" not in found
    assert found["kind"] == ("failed" if lie == "raise" else "wrong")
    assert found["refused"]


def test_a_race_has_the_default_path_ours_and_torch_in_16_bits(bench, device):
    cell = the_cell(device)
    opened(bench, cell)
    entries = {
        "default": {"backend": "torch_scaled_mm", "config": {}},
        "triton_row#1": {"backend": "triton_row", "config": TILE},
    }
    for op in cell.ops:
        request = {"op": op, "entries": entries, "default": "default", "peers": True}
        found = bench.serve({"do": "race", "cell": cell.to_dict(), **request})
        assert set(found["us"]) == {"default", "triton_row#1", "torch bf16"}, found["refused"]
        middle, low, high = found["ratios"]["triton_row#1"]
        assert low <= middle <= high
        assert found["peers"] == ["torch bf16"]


def test_the_command_tunes_and_its_rows_are_found(device, tmp_path):
    command = (sys.executable, "-m", "anyfp8", "tune", "768,1024", "--m", "16")
    options = ("--effort", "quick", "--output", str(tmp_path), "--json")
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=240, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["missed"] == []
    (cell,) = found["cells"]
    assert cell["timed"] >= 8
    assert all(row["us"] > 1 for row in cell["winners"].values())
    table = read_table(tmp_path / file_name(device.name))
    assert {row.role for row in table.rows} == {"ours", "default", "peer"}
