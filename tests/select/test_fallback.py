"""FP8 checkpoints on GPUs without FP8 units: which kernel serves each M, and what is said of it."""

import json
import sys
from pathlib import Path

import pytest

from anyfp8 import gemm
from anyfp8.checkpoint import open_checkpoint
from anyfp8.checkpoint.reader import merge_layers
from anyfp8.device import find_device
from anyfp8.gemm import packages, probe
from anyfp8.problem import Problem, Scheme
from anyfp8.select import M_GRID, Request, plan, select

DATA = Path(__file__).parent.parent / "data" / "checkpoints"
STATIC = Scheme("tensor", "tensor")
# SmolLM2-135M: q, kv, gate/up, down, and the merged q/k/v and gate/up
SHAPES = ((576, 576), (192, 576), (1536, 576), (576, 1536), (960, 576), (3072, 576))
WITHOUT = ("NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 3090", "gfx1100")
WITH = ("NVIDIA L40S", "NVIDIA H100 80GB HBM3", "gfx942")
MARLIN = "vllm.model_executor.layers.quantization.utils.marlin_utils_fp8"
WORKING = """
import torch

def prepare_fp8_layer_for_marlin(layer, size_k_first=True):
    layer.weight_scale = torch.nn.Parameter(layer.weight_scale.data.float(), requires_grad=False)
    layer.workspace = torch.zeros(1)

def apply_fp8_marlin_linear(x, weight, scale, workspace, n, k, bias):
    return (x.float() @ (weight.data.float() * scale).t()).to(x.dtype)
"""


def device(name):
    from anyfp8.device import ARCHES, generic_device

    return generic_device(ARCHES[name]) if name in ARCHES else find_device(name)


@pytest.fixture
def marlin(tmp_path, monkeypatch):
    """Install a package vllm whose Marlin module is the given text, for this process's children."""

    def install(text):
        folder = tmp_path.joinpath("site", *MARLIN.split(".")[:-1])
        folder.mkdir(parents=True)
        (folder / "marlin_utils_fp8.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
        monkeypatch.setenv("ANYFP8_CACHE_DIR", str(tmp_path / "cache"))
        packages.installed.cache_clear()
        probe._tried.cache_clear()
        return tmp_path / "cache"

    yield install
    packages.installed.cache_clear()
    probe._tried.cache_clear()
    for name in [m for m in sys.modules if m.split(".")[0] == "vllm"]:
        del sys.modules[name]


@pytest.mark.parametrize("name", WITHOUT)
@pytest.mark.parametrize("shape", SHAPES, ids="{0[0]}x{0[1]}".format)
def test_without_fp8_units_every_m_is_weight_only_by_itself(name, shape):
    found = plan(STATIC, *shape, device(name))
    assert found.layout == "canonical"
    assert [m for m, _ in found.choices] == list(M_GRID)
    for m, choice in found.choices:
        assert choice.backend == "triton_w8a16"
        assert not choice.quantizes
        assert choice.numerics == "at_least"
        reasons = dict(choice.refused)
        assert "is installed" in reasons["marlin"]
        assert f"{device(name).name} has none" in reasons["torch_scaled_mm"]
        at = found.problem_at(m)
        assert gemm.backend("triton_w8a16").illegal(choice.config, at, device(name)) is None


@pytest.mark.parametrize("name", WITHOUT[:2])
def test_kernels_change_with_the_number_of_tokens(name):
    found = plan(STATIC, 3072, 576, device(name))
    kinds = {}
    for m, choice in found.choices:
        kinds.setdefault(choice.config.how, []).append(m)
    assert kinds == {
        "gemv": [1],
        "fused": [m for m in M_GRID if 1 < m <= 128],
        "chunked": [m for m in M_GRID if m > 128],
    }


@pytest.mark.parametrize("name", WITH)
def test_with_fp8_units_the_arithmetic_of_the_checkpoint_is_kept(name):
    for shape in SHAPES:
        for _, choice in plan(STATIC, *shape, device(name)).choices:
            assert choice.quantizes
            assert gemm.backend(choice.backend).kind == "w8a8"


@pytest.mark.parametrize("variable", ["ANYFP8_FORCE_FP8_MARLIN", "SGLANG_FORCE_FP8_MARLIN"])
@pytest.mark.parametrize("name", WITH)
def test_the_environment_forces_weight_only_above(variable, name, monkeypatch):
    monkeypatch.setenv(variable, "1")
    for _, choice in plan(STATIC, 576, 1536, device(name)).choices:
        assert choice.backend == "triton_w8a16"
        assert not choice.quantizes
        assert "weight-only was asked for" in dict(choice.refused)["torch_scaled_mm"]


def test_every_layer_of_a_checkpoint_has_a_plan_and_merged_shards_stay_exact():
    checkpoint = open_checkpoint(DATA / "modelopt-fp8")
    a100 = device(WITHOUT[0])
    assert checkpoint.plan.layers
    for layer in checkpoint.layers():
        n, k = layer.weight.data.shape
        found = plan(layer.scheme, n, k, a100)
        assert {choice.backend for _, choice in found.choices} == {"triton_w8a16"}
        prepared = found.prepare(layer.weight)
        assert prepared.canonical().codes.equal(layer.weight.codes)
    names = [n for n in checkpoint.plan.layers if n.endswith(("q_proj", "k_proj", "v_proj"))][:3]
    parts = [checkpoint.layer(name) for name in names]
    merged = merge_layers("qkv", parts).layer
    start = 0
    for part in parts:
        rows = slice(start, start := start + len(part.weight.data))
        assert merged.weight.codes[rows].equal(part.weight.codes)
        assert (
            (merged.weight.scale.expand(len(merged.weight.codes), 1)[rows])
            .eq(part.weight.scale)
            .all()
        )
    found = plan(merged.scheme, *merged.weight.data.shape, a100)
    assert {choice.backend for _, choice in found.choices} == {"triton_w8a16"}


def asked(name="NVIDIA A100-SXM4-80GB", n=256, k=640):
    problem = Problem("linear", Scheme("channel"), 16, n, k)
    return select(problem, device(name), Request(tune=False), probe=lambda b, p: b.probe(p, None))


def test_marlin_serves_where_it_is_installed_and_passes_its_trial(marlin):
    cache = marlin(WORKING)
    assert asked().backend == "marlin"
    (answer,) = (cache / "probes").glob("*.json")
    assert json.loads(answer.read_text())["why"] is None
    assert asked(n=80).backend == "marlin"
    odd = asked(n=80, k=33)
    assert odd.backend == "triton_w8a16"
    assert "more than twice the weight" in dict(odd.refused)["marlin"]
    assert "gfx1100" in dict(asked("gfx1100").refused)["marlin"]


def test_a_broken_marlin_is_marked_and_our_kernel_serves(marlin):
    cache = marlin("raise ImportError('undefined symbol: _ZN3c104cuda')")
    choice = asked()
    assert choice.backend == "triton_w8a16"
    assert "undefined symbol" in dict(choice.refused)["marlin"]
    (answer,) = (cache / "probes").glob("*.json")
    # the next process reads the answer: no child is started
    probe._tried.cache_clear()
    answer.write_text(answer.read_text().replace("undefined symbol", "read from the file"))
    assert "read from the file" in dict(asked().refused)["marlin"]


def test_a_hanging_marlin_is_given_up_after_the_time_limit(marlin, monkeypatch):
    cache = marlin("import time; time.sleep(600)")
    monkeypatch.setattr(probe, "LIMIT_S", 1.0)
    choice = asked()
    assert choice.backend == "triton_w8a16"
    assert "gave no answer within 1 s" in dict(choice.refused)["marlin"]
    (answer,) = (cache / "probes").glob("*.json")
    assert "gave no answer" in json.loads(answer.read_text())["why"]
