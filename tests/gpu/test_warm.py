"""What was compiled without a GPU, or by an earlier process, is not compiled on one."""

import json
import os
import subprocess
import sys

import pytest

from anyfp8.device import current_device

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

CHILD = """
import json
import torch
import anyfp8
from anyfp8.linear import Fp8Linear
from anyfp8.problem import QTensor, Scheme
from triton import knobs
missed = []
knobs.compilation.listener = lambda *, src, cache_hit, **rest: cache_hit or missed.append(src.name)
layers = torch.nn.ModuleList()
for name in SCHEMES:
    scheme = Scheme.parse(name)
    layer = Fp8Linear(512, 640, scheme, device="cuda")
    codes = torch.randint(0, 120, (640, 512), dtype=torch.uint8, device="cuda")
    scale = torch.rand(scheme.weight_scale_shape(640, 512), device="cuda") + 0.5
    static = scheme.activation == "tensor" and not scheme.dynamic
    x_scale = torch.ones((), device="cuda") if static else None
    layer.load(QTensor(codes, scale, scheme.block), input_scale=x_scale)
    layers.append(layer)
warmed = anyfp8.warmup(layers, ms=(1, 16, 17))
print(json.dumps({"compiled": warmed.compiled, "loaded": warmed.loaded, "missed": missed}))
"""
SCHEMES = (
    *("w8a8-channel-token", "w8a8-tensor-static", "w8a8-tensor-dynamic"),
    *("w8a8-block128x128-group128", "w8a16-channel", "w8a16-block128x128"),
)
CHILD = f"SCHEMES = {SCHEMES!r}\n{CHILD}"


def run(command, cache, **environment):
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_CACHE_DIR": str(cache)} | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_second_process_compiles_nothing(tmp_path):
    first, second = (json.loads(run([sys.executable, "-c", CHILD], tmp_path)) for _ in range(2))
    assert first["compiled"] > 0
    assert second["missed"] == []
    assert second["loaded"] == first["compiled"] + first["loaded"]


def test_what_warm_built_without_a_gpu_is_all_there_is_to_compile(tmp_path):
    for scheme in SCHEMES:
        command = [sys.executable, "-m", "anyfp8", "warm", "640,512", "--scheme", scheme]
        command += ["--device", current_device().name, "--m", "1,16,17", "--json"]
        report = json.loads(run(command, tmp_path, CUDA_VISIBLE_DEVICES=""))
        assert report["failed"] == {}
    found = json.loads(run([sys.executable, "-c", CHILD], tmp_path))
    assert found["missed"] == []
    assert found["compiled"] == 0
    assert found["loaded"] > 0
