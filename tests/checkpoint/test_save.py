from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from anyfp8.checkpoint import open_checkpoint, save_checkpoint
from anyfp8.errors import InputError
from anyfp8.problem import QTensor


def save(checkpoint, out, **options):
    plan = checkpoint.plan
    save_checkpoint(
        out,
        config=plan.config,
        layers=list(checkpoint.layers()),
        plain={n: checkpoint.tensor(n) for n in (*plan.plain, *plan.optional)},
        ignore=[pattern for pattern, _ in plan.rules],
        kv_cache=plan.kv_cache,
        **options,
    )


def equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name].float(), tensor.float())


@pytest.mark.parametrize("folder", ["modelopt-fp8", "modelopt-fp8-pcpt", "modelopt-fp8-pb-wo"])
def test_an_official_file_is_saved_as_it_was(data, tmp_path, folder):
    save(open_checkpoint(data / folder), tmp_path / "out")
    equal(
        load_file(tmp_path / "out" / "model.safetensors"),
        load_file(data / folder / "model.safetensors"),
    )
    ours, theirs = (
        json.loads((path / folder_file).read_text())
        for path in (tmp_path / "out", data / folder)
        for folder_file in ["config.json"]
    )
    for config in (ours, theirs):
        config["quantization_config"].pop("producer")
    assert ours == theirs


def test_cache_scales_biases_and_a_static_input_scale_survive(make_folder, fp8_layer, tmp_path):
    k = "model.layers.0.self_attn.k_proj"
    tensors = {
        **fp8_layer(k),
        f"{k}.k_scale": torch.tensor(0.5),
        f"{k}.bias": torch.randn(64).bfloat16(),
        "model.layers.0.self_attn.attn.v_scale": torch.tensor([0.25]),
        "model.norm.weight": torch.ones(8),
    }
    config = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    save(open_checkpoint(make_folder(tensors, config)), tmp_path / "out")
    equal(load_file(tmp_path / "out" / "model.safetensors"), tensors)
    plan = open_checkpoint(tmp_path / "out").plan
    assert plan.kv_cache == "FP8"
    assert plan.warnings == ()


def test_scales_that_share_memory_are_all_saved(make_folder, fp8_layer, tmp_path):
    checkpoint = open_checkpoint(make_folder(fp8_layer("m.a") | fp8_layer("m.b", seed=1)))
    shared = torch.tensor(0.5)
    layers = [
        type(layer)(layer.name, layer.scheme, QTensor(layer.weight.codes, shared), shared)
        for layer in checkpoint.layers()
    ]
    save_checkpoint(tmp_path / "out", config={}, layers=layers, plain={}, ignore=[])
    again = open_checkpoint(tmp_path / "out")
    for layer in layers:
        found = again.layer(layer.name)
        assert torch.equal(found.weight.codes, layer.weight.codes)
        assert found.weight.scale == 0.5 == found.input_scale


def test_sidecars_lie_beside_the_weights(data, tmp_path):
    def sidecars(folder):
        (folder / "tokenizer.json").write_text("{}")

    save(open_checkpoint(data / "modelopt-fp8"), tmp_path / "out", sidecars=sidecars)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


def test_saving_no_layers_is_an_error(tmp_path):
    with pytest.raises(InputError, match="no quantized layers"):
        save_checkpoint(tmp_path / "out", config={}, layers=[], plain={"a": torch.ones(1)})
