"""KV-cache scales: found in every format, named as engines do; E4M3 refused where there is none."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from anyfp8.checkpoint import open_checkpoint, read_plan
from anyfp8.checkpoint.kv_cache import (
    ENGINES,
    KvScale,
    check_kv_cache,
    engine_scales,
    is_e4m3,
    kv_cache_refusal,
    kv_scales,
)
from anyfp8.device import CATALOGUE, find_device
from anyfp8.errors import DeviceError, InputError

QUARK = Path(__file__).parents[1] / "data" / "checkpoints" / "quark-kv"


def test_quarks_output_scales_of_k_and_v_are_the_caches(tmp_path):
    found = kv_scales(read_plan(QUARK))
    assert found
    assert {scale.kind for scale in found} == {"k", "v"}
    stored = load_file(QUARK / "model.safetensors")
    for scale in found:
        assert scale.tensor in stored
        assert scale.tensor == f"{scale.attention}.{scale.kind}_proj.output_scale"


@pytest.mark.parametrize(
    ("tensor", "attention", "kinds"),
    [
        ("model.layers.0.self_attn.k_proj.k_scale", "model.layers.0.self_attn", "k"),
        ("model.layers.0.self_attn.v_proj.v_scale", "model.layers.0.self_attn", "v"),
        ("model.layers.0.self_attn.k_scale", "model.layers.0.self_attn", "k"),
        ("model.layers.0.self_attn.attn.v_scale", "model.layers.0.self_attn", "v"),
        ("model.layers.0.self_attn.qkv_proj.k_scale", "model.layers.0.self_attn", "k"),
        ("model.layers.0.self_attn.kv_scale", "model.layers.0.self_attn", "kv"),
        ("model.layers.0.mlp.down_proj.output_scale", "", ""),
        ("model.layers.0.self_attn.o_proj.output_scale", "", ""),
    ],
)
def test_where_formats_put_them(tensor, attention, kinds):
    found = kv_scales(SimpleNamespace(layers={}, optional=(tensor,), kv_cache="FP8"))
    assert [(s.attention, s.kind) for s in found] == [(attention, kind) for kind in kinds]


def test_each_engine_has_its_name():
    scale = KvScale("x", "model.layers.3.self_attn", "k")
    assert {engine: scale.name_in(engine) for engine in ENGINES} == {
        "modelopt": "model.layers.3.self_attn.k_proj.k_scale",
        "compressed-tensors": "model.layers.3.self_attn.k_scale",
        "sglang": "model.layers.3.self_attn.attn.k_scale",
        "vllm": "model.layers.3.self_attn.attn.k_scale",
    }
    with pytest.raises(InputError, match="not an engine"):
        scale.name_in("trt")


def test_an_engine_gets_the_values_under_its_names():
    stored = load_file(QUARK / "model.safetensors")
    checkpoint = open_checkpoint(QUARK)
    found = engine_scales(checkpoint, "sglang")
    assert len(found) == len(kv_scales(checkpoint.plan))
    for scale in kv_scales(checkpoint.plan):
        value = found[scale.name_in("sglang")]
        assert (value.dtype, tuple(value.shape)) == (torch.float32, ())
        assert value.item() == stored[scale.tensor].float().item()


@pytest.mark.parametrize(
    ("word", "e4m3"),
    [
        *[("FP8", True), ("fp8_e4m3", True), ("FLOAT8", True)],
        *[("fp8_e5m2", False), ("INT8", False), ("", False), ("NVFP4", False)],
    ],
)
def test_plain_fp8_means_e4m3(word, e4m3):
    assert is_e4m3(word) is e4m3


def test_only_gpus_without_fp8_units_refuse_an_e4m3_cache():
    for name in CATALOGUE:
        device = find_device(name)
        refusal = kv_cache_refusal("FP8", device)
        assert (refusal is None) == device.has_fp8, name
    assert kv_cache_refusal("", find_device("a100")) is None
    assert kv_cache_refusal("FP8", find_device("cpu")) is None


def test_an_engine_is_stopped_before_it_allocates_by_an_error_with_a_way_out():
    with pytest.raises(DeviceError) as caught:
        check_kv_cache(read_plan(QUARK), find_device("3090"))
    error = caught.value
    assert "NVIDIA GeForce RTX 3090 cannot hold the E4M3 KV cache" in error.what
    assert "FP8 on sm_86" in error.got
    assert "16 bits" in error.want
    assert "--kv-cache-dtype" in error.hint
    check_kv_cache(read_plan(QUARK), find_device("l4"))
