"""Tensor parallelism over NCCL: two GPUs compute what one does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

PROGRAM = Path(__file__).with_name("parallel_rank.py")


def on_two_ranks(folder, *options):
    """What `parallel_rank.py` found, the last line of each scheme."""
    out = folder / "found.jsonl"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    subprocess.run(
        [*launcher, "--nproc-per-node", "2", PROGRAM, folder, out, *options],
        check=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    lines = map(json.loads, out.read_text().splitlines())
    return {found["scheme"]: found for found in lines}


def test_two_gpus_compute_what_one_computes_and_hold_half_of_it_each(tmp_path):
    # Qwen3-8B's layers, two of them
    found = on_two_ranks(tmp_path, "--layers", "2", "--replays", "10", "--prefill", "256")
    assert set(found) == {"w8a8-block128x128-group128", "w8a8-channel-token"}
    for result in found.values():
        assert result["ranks_equal"]
        assert result["error_tp2"] <= 1.1 * result["error_tp1"]
        assert result["bytes_tp2"] <= 0.51 * result["bytes_tp1"]
        assert result["row_parallel_layers"] == 4
        assert result["over_bound"] <= 1
    # groups of 128 columns lie on one rank, so both quantize activations alike
    assert found["w8a8-block128x128-group128"]["over_bound_tp1"] <= 1
