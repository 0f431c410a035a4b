"""The Triton kernels in Triton's interpreter: every scale layout, odd shapes, and an oracle."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

PROGRAM = """
import sys
import torch
from anyfp8 import gemm, testing_gemm
from anyfp8.device import CPU
from anyfp8.gemm.tiles import TileConfig
from anyfp8.gemm.triton_w8a16 import W8A16Config
from anyfp8.problem import Scheme

# FP8 and bf16 dots are wrong in the interpreter: codes are decoded to fp32, weight-only takes fp16
cases = {
    "triton_row": (
        [
            Scheme("channel", "token", True),
            Scheme("tensor", "tensor"),
            Scheme("tensor", "token", True),
        ],
        [TileConfig(32, 32, 32, 2), TileConfig(16, 32, 32, 2, swap=True)],
    ),
    "triton_block": (
        [
            Scheme("block", "group", True, block=(128, 128), group=128),
            Scheme("block", "group", True, block=(64, 64), group=32),
            Scheme("channel", "group", True, group=64),
            Scheme("block", "token", True, block=(48, 96)),
        ],
        [
            TileConfig(32, 32, 32, 8),
            TileConfig(16, 128, 32, 1),
            TileConfig(16, 32, 32, 2, swap=True),
            TileConfig(8, 16, 32, 4, parts=4),
            TileConfig(8, 32, 32, 2, swap=True, parts=4),
        ],
    ),
    "triton_w8a16": (
        [
            Scheme("channel"),
            Scheme("tensor"),
            Scheme("block", block=(128, 128)),
            Scheme("block", block=(48, 32)),
        ],
        [W8A16Config("fused", 16, 32, 32, split) for split in (1, 3)] + [W8A16Config("chunked")],
    ),
}
schemes, configs = cases[sys.argv[1]]
backend = gemm.backend(sys.argv[1])
complaints = []
for scheme in schemes:
    for m, n, k in ((17, 33, 33), (3, 80, 320), (5, 1, 1)):
        layer = testing_gemm.random_layer(scheme, m, n, k, torch.float16)
        quantized = backend.kind == "w8a8"
        for out in (torch.float16, torch.float32):
            wanted = testing_gemm.oracle(layer, quantized, True, out)
            problem = testing_gemm.problem_of(layer, out, True, "fp32_128")
            for config in configs:
                # a step of four parts is no multiple of 96 columns
                if getattr(config, "parts", 1) > 1 and scheme.block == (48, 96):
                    continue
                for rows in (0, 1, m):
                    found = testing_gemm.check(backend, layer, wanted, problem, CPU, config, rows)
                    if found:
                        complaints.append(f"{scheme.name} {m}x{n}x{k} {out} {found}")
print("\\n".join(complaints))
sys.exit(bool(complaints))
"""


@pytest.mark.parametrize("backend", ["triton_row", "triton_block", "triton_w8a16"])
def test_kernel_matches_the_oracle_in_the_interpreter(backend):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, backend],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
