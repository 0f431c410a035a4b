from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import anyfp8
from anyfp8.errors import InputError
from anyfp8.tools.quantize import quantize_checkpoint

RANK = Path(__file__).with_name("rank.py")


def neighbour(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def on_ranks(size, folder, tmp_path, *scheme):
    """What every rank computed, as `rank.py` saves it."""
    store = tmp_path / "store"
    processes = [
        subprocess.Popen(
            [sys.executable, RANK, str(r), str(size), store, folder, tmp_path / f"{r}.pt", *scheme],
            stderr=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for r in range(size)
    ]
    errors = [process.communicate(timeout=120)[1].decode() for process in processes]
    assert all(process.returncode == 0 for process in processes), errors
    return [torch.load(tmp_path / f"{r}.pt") for r in range(size)]


@pytest.fixture(scope="module")
def biased(tmp_path_factory):
    """4 query heads over 2 key heads of width 48, biases, a width that no block divides."""
    changes = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True}
    folder = neighbour("conftest").save_tiny_llama(tmp_path_factory.mktemp("biased"), **changes)
    return folder


@pytest.mark.parametrize(
    "scheme",
    [
        pytest.param("w8a8-channel-token", marks=pytest.mark.slow),
        "w8a8-block128x128-group128",
    ],
)
def test_two_ranks_compute_what_one_computes(biased, tmp_path, scheme):
    quantize_checkpoint(biased, tmp_path / "fp8", scheme=scheme)
    whole = anyfp8.load(tmp_path / "fp8", device="cpu", dtype=torch.float32)
    ids = torch.arange(1, 33)[None]
    with torch.no_grad():
        logits = whole(ids).logits
    ranks = on_ranks(2, tmp_path / "fp8", tmp_path)
    assert torch.equal(ranks[0]["logits"], ranks[1]["logits"])
    torch.testing.assert_close(ranks[0]["logits"], logits, rtol=1e-4, atol=1e-5)
    assert torch.equal(ranks[0]["tokens"], ranks[1]["tokens"])
    attention, mlp = "model.layers.0.self_attn", "model.layers.0.mlp"
    shapes = ranks[1]["shapes"]
    assert shapes[f"{attention}.q_proj"] == (96, 192)
    assert shapes[f"{attention}.k_proj"] == (48, 192)
    assert shapes[f"{attention}.o_proj"] == (192, 96)
    assert shapes[f"{mlp}.up_proj"] == (160, 192)
    assert shapes[f"{mlp}.down_proj"] == (192, 160)


@pytest.mark.slow
def test_a_16_bit_checkpoint_is_quantized_whole_and_then_shared_out(biased, tmp_path):
    scheme = "w8a16-block128x128"
    whole = anyfp8.load(biased, device="cpu", scheme=scheme, dtype=torch.float32)
    ids = torch.arange(1, 33)[None]
    with torch.no_grad():
        logits = whole(ids).logits
    ranks = on_ranks(2, biased, tmp_path, scheme)
    torch.testing.assert_close(ranks[0]["logits"], logits, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_key_heads_are_repeated_where_there_are_fewer_than_ranks(tmp_path):
    changes = {"num_attention_heads": 6, "num_key_value_heads": 1, "num_hidden_layers": 1}
    folder = neighbour("conftest").save_tiny_llama(tmp_path / "mqa", **changes)
    quantize_checkpoint(folder, tmp_path / "fp8", scheme="w8a8-channel-token")
    whole = anyfp8.load(tmp_path / "fp8", device="cpu", dtype=torch.float32)
    ids = torch.arange(1, 33)[None]
    with torch.no_grad():
        logits = whole(ids).logits
    ranks = on_ranks(3, tmp_path / "fp8", tmp_path)
    assert ranks[2]["shapes"]["model.layers.0.self_attn.q_proj"] == (64, 192)
    assert ranks[2]["shapes"]["model.layers.0.self_attn.k_proj"] == (32, 192)
    # 320 over 3 ranks: uneven
    assert {r["shapes"]["model.layers.0.mlp.up_proj"][0] for r in ranks} == {128, 64}
    torch.testing.assert_close(ranks[0]["logits"], logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "family",
    ["Qwen3Moe", pytest.param("Mixtral", marks=pytest.mark.slow)],
)
def test_two_ranks_share_out_every_expert(tmp_path, family):
    folder = neighbour("test_experts").save_mixture(family, tmp_path / "bf16")
    quantize_checkpoint(folder, tmp_path / "fp8", scheme="w8a8-channel-token")
    whole = anyfp8.load(tmp_path / "fp8", device="cpu", dtype=torch.float32)
    ids = torch.arange(1, 33)[None]
    with torch.no_grad():
        logits = whole(ids).logits
    ranks = on_ranks(2, tmp_path / "fp8", tmp_path)
    assert torch.equal(ranks[0]["logits"], ranks[1]["logits"])
    torch.testing.assert_close(ranks[0]["logits"], logits, rtol=1e-4, atol=1e-5)
    experts = {n: shape for n, shape in ranks[1]["shapes"].items() if ".experts." in n}
    width = 24 if family == "Qwen3Moe" else 48
    assert len(experts) == 2 * 4 * 3
    assert set(experts.values()) == {(width, 64), (64, width)}


def test_tp_without_processes_says_how_to_start_them(tiny):
    with pytest.raises(InputError, match="without a process group") as caught:
        anyfp8.load(tiny, device="cpu", tp=2)
    assert "torchrun" in caught.value.hint


def test_one_rank_is_a_whole_model(tiny):
    model = anyfp8.load(tiny, device="cpu", tp=1)
    assert model.model.layers[0].mlp.up_proj.weight.shape == (320, 192)
