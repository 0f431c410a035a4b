"""Tuned rows apply under torch.compile, by the real M; tracing reads no file and no environment."""

import json
import os
import subprocess
import sys
import warnings

import pytest
import torch
import torch._dynamo.testing

from anyfp8 import env, reference
from anyfp8.device import find_device
from anyfp8.gemm import dequant
from anyfp8.gemm.tiles import TileConfig
from anyfp8.gemm.triton_row import TritonRow
from anyfp8.linear import Fp8Linear, replan
from anyfp8.problem import Scheme
from anyfp8.select import selection
from anyfp8.select.table import Header, Row, Table, write_table

H200 = find_device("h200")
ROW = Scheme("channel", "token", True)
N = K = 256
TILES = {1: 16, 16: 32, 512: 128}


@pytest.fixture
def on_an_h200(monkeypatch, tmp_path):
    """Layers are placed as on an H200 with a table of its own; products are the CPU's.

    Yields (M, configuration) of each product.
    """
    rows = tuple(
        Row(ROW.name, N, K, m, "triton_row", config=tuple(tile(m).to_dict().items()), us=1.0)
        for m in TILES
    )
    write_table(tmp_path / "nvidia_h200.jsonl", Table(Header(H200.name), rows))
    monkeypatch.setenv("ANYFP8_TABLE_DIR", str(tmp_path))
    monkeypatch.setattr("anyfp8.linear.plans.device_of", lambda device: H200)
    products = []

    def run(self, x, prepared, problem, config, bias=None, out=None):
        products.append((problem.m, config))
        how = dequant.DequantConfig("per_call")
        return dequant.BACKEND.run(x, prepared, problem, how, bias, out)

    monkeypatch.setattr(TritonRow, "run", run)
    replan()
    torch._dynamo.reset()
    with torch.no_grad():
        yield products
    torch._dynamo.reset()
    monkeypatch.undo()
    replan()


def tile(m):
    return TileConfig(TILES[m], 64, 128, 8, 4, 3)


def two_layers():
    model = torch.nn.Sequential(
        Fp8Linear(K, N, ROW, bias=True), torch.nn.ReLU(), Fp8Linear(K, N, ROW)
    )
    for seed, layer in enumerate((model[0], model[2])):
        torch.manual_seed(seed)
        bias = torch.randn(N) if seed == 0 else None
        layer.load(reference.quantize_weight(torch.randn(N, K) / 16, ROW), bias=bias)
        layer.prepare()
    return model


def test_the_real_m_meets_the_table_whatever_m_was_traced(on_an_h200):
    model = two_layers()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    nearest = {1: 1, 2: 1, 17: 16, 33: 16, 512: 512}
    for m, row in nearest.items():
        x = torch.randn(m, K).bfloat16()
        want = model(x)
        on_an_h200.clear()
        assert torch.equal(compiled(x), want)
        assert on_an_h200 == [(m, tile(row)), (m, tile(row))]
        choice = model[0].plan().choice(m)
        assert (choice.source, choice.config) == ("user table", tile(row))
    assert counter.frame_count <= 2


def test_tracing_reads_no_table_no_environment_and_warns_of_nothing(on_an_h200, monkeypatch):
    model = two_layers()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)

    def refuse(*args, **kwargs):
        raise AssertionError("read while tracing")

    for owner, name in ((env, "snapshot"), (selection, "load_tables"), (selection, "plan")):
        monkeypatch.setattr(owner, name, refuse)
    monkeypatch.setattr("anyfp8.linear.plans.plan", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for m in (3, 1, 40):
            assert compiled(torch.randn(m, K).bfloat16()).shape == (m, N)
    assert counter.frame_count <= 2


CHILD = """
import hashlib, json, sys
import torch
from torch._dynamo.utils import counters
from anyfp8.linear import convert
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 64))
model = model.bfloat16()
convert(model)
compiled = torch.compile(model, fullgraph=True, dynamic=True)
same = []
with torch.no_grad():
    for m in (2, 17):
        x = torch.randn(m, 64).bfloat16()
        same.append(torch.equal(compiled(x), model(x)))
found = {k: counters["inductor"][k] for k in ("fxgraph_cache_hit", "fxgraph_cache_miss")}
aot = {k: counters["aot_autograd"][k] for k in ("autograd_cache_hit", "autograd_cache_miss")}
print(json.dumps({"same": same, **found, **aot}))
"""


@pytest.mark.slow
def test_a_second_process_takes_its_graphs_from_inductors_cache(tmp_path):
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    found = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", CHILD], capture_output=True, text=True, env=environment
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    first, second = found
    assert first["same"] == second["same"] == [True, True]
    assert first["fxgraph_cache_miss"] > 0
    assert second["fxgraph_cache_miss"] == 0
    assert second["fxgraph_cache_hit"] + second["autograd_cache_hit"] > 0
