from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import anyfp8
from anyfp8.device import find_device
from anyfp8.errors import CheckpointError, InputError
from anyfp8.integrations.transformers import load, reload, save
from anyfp8.problem import QTensor
from anyfp8.tools.quantize import quantize_checkpoint

IDS = torch.arange(1, 33)[None]


def conftest():
    spec = importlib.util.spec_from_file_location("tiny", Path(__file__).with_name("conftest.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two FP8 checkpoints of one architecture and other weights."""
    root = tmp_path_factory.mktemp("reload")
    found = []
    for seed in (0, 1):
        source = conftest().save_tiny_llama(root / f"bf16-{seed}", seed=seed)
        windows = [torch.randint(1, 256, (1, 32)) for _ in range(2)]
        quantize_checkpoint(source, root / f"fp8-{seed}", calib=windows)
        found.append(root / f"fp8-{seed}")
    return found


def test_a_loaded_model_is_saved_with_the_bytes_it_came_with(folders, tmp_path):
    model = load(folders[0], device="cpu")
    logits(model)
    assert save(model, tmp_path / "out") == "modelopt"
    before = load_file(folders[0] / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype
        assert tensor.reshape(-1).view(torch.uint8).equal(after[name].reshape(-1).view(torch.uint8))
    for file in ("config.json", "hf_quant_config.json"):
        ours, theirs = (json.loads((f / file).read_text()) for f in (tmp_path / "out", folders[0]))
        for config in (ours, theirs):
            config.get("quantization_config", {}).pop("ignore", None)
            config.get("quantization", {}).pop("exclude_modules", None)
        assert ours == theirs
    assert (tmp_path / "out" / "tokenizer.json").is_file()


@pytest.mark.parametrize("format", ["compressed-tensors", "finegrained"])
def test_a_model_saved_in_another_format_computes_the_same(folders, tmp_path, format):
    model = load(folders[0], device="cpu")
    assert save(model, tmp_path / "out", format=format) == format
    assert torch.equal(logits(load(tmp_path / "out", device="cpu")), logits(model))


def test_a_converted_model_in_memory_is_saved_too(tiny, tmp_path):
    model = load(tiny, device="cpu")
    anyfp8.convert(model, "w8a16-channel")
    assert save(model, tmp_path / "out") == "compressed-tensors"
    assert torch.equal(logits(load(tmp_path / "out", device="cpu")), logits(model))


def test_tied_embeddings_are_saved_once(tmp_path):
    source = conftest().save_tiny_llama(tmp_path / "bf16", tie_word_embeddings=True)
    model = load(source, device="cpu", scheme="w8a8-channel-token")
    save(model, tmp_path / "out")
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(logits(load(tmp_path / "out", device="cpu")), logits(model))


def test_a_model_without_fp8_layers_is_not_saved(tiny, tmp_path):
    with pytest.raises(InputError, match="no quantized layers"):
        save(load(tiny, device="cpu"), tmp_path / "out")


def test_a_reload_equals_a_fresh_load_however_often(folders):
    model = load(folders[0], device="cpu")
    first = logits(model)
    reload(model, folders[1])
    assert torch.equal(logits(model), logits(load(folders[1], device="cpu")))
    reload(model, folders[0])
    reload(model, folders[0])
    assert torch.equal(logits(model), first)


def broken(folder, out, change):
    shutil.copytree(folder, out)
    tensors = load_file(out / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


LAST = "model.layers.1.mlp.up_proj"


def nan_code(tensors):
    tensors[f"{LAST}.weight"].view(torch.uint8)[0, 0] = 0x7F


def zero_scale(tensors):
    tensors[f"{LAST}.weight_scale"].zero_()


def other_shape(tensors):
    tensors["model.norm.weight"] = torch.ones(7)


def no_norm(tensors):
    del tensors["model.norm.weight"]


def fewer_layers(tensors):
    for leaf in ("weight", "weight_scale", "input_scale"):
        del tensors[f"{LAST}.{leaf}"]


@pytest.mark.parametrize("change", [nan_code, zero_scale, other_shape, no_norm, fewer_layers])
def test_a_failed_reload_leaves_the_old_weights(folders, tmp_path, change):
    model = load(folders[0], device="cpu")
    before = logits(model)
    bytes_before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"up_proj|norm|does not fill"):
        reload(model, broken(folders[1], tmp_path / "broken", change))
    assert torch.equal(logits(model), before)
    for name, tensor in model.state_dict().items():
        old = bytes_before[name]
        assert tensor.reshape(-1).view(torch.uint8).equal(old.reshape(-1).view(torch.uint8))


def test_a_reload_of_another_scheme_is_refused(folders, tiny, tmp_path):
    quantize_checkpoint(tiny, tmp_path / "channel", scheme="w8a8-channel-token")
    with pytest.raises(CheckpointError, match="does not fit the model") as caught:
        reload(load(folders[0], device="cpu"), tmp_path / "channel")
    assert "w8a8-channel-token" in caught.value.got


def test_a_layer_that_cannot_be_prepared_again_keeps_working(folders, monkeypatch):
    model = load(folders[0], device="cpu")
    layer = model.model.layers[0].mlp.up_proj
    x = torch.randn(3, layer.in_features).bfloat16()
    y = layer(x)
    q = QTensor(torch.zeros(layer.weight.shape, dtype=torch.uint8), torch.ones(()))

    def fail(self):
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patched:
        patched.setattr(type(layer), "prepare", fail)
        with pytest.raises(torch.OutOfMemoryError):
            layer.load(q, input_scale=torch.ones(()))
    assert torch.equal(layer(x), y)


def test_kv_cache_scales_on_the_attention_module_survive_load_and_save(folders, tmp_path):
    def add(tensors):
        tensors["model.layers.0.self_attn.k_scale"] = torch.tensor([0.25])

    folder = broken(folders[0], tmp_path / "kv", add)
    save(load(folder, device="cpu"), tmp_path / "out")
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert saved["model.layers.0.self_attn.k_scale"].item() == 0.25


def test_a_kv_cache_that_the_gpu_cannot_hold_is_named_while_loading(folders, monkeypatch, caplog):
    import anyfp8.integrations.transformers as home

    folder = folders[0]
    monkeypatch.setattr(home, "device_of", lambda _: find_device("a100"))
    load(folder, device="cpu")
    assert "KV cache" not in caplog.text
    plan = home.open_checkpoint
    monkeypatch.setattr(home, "open_checkpoint", lambda *a, **k: with_kv_cache(plan(*a, **k)))
    load(folder, device="cpu")
    assert "NVIDIA A100-SXM4-80GB cannot hold the E4M3 KV cache" in caplog.text


def with_kv_cache(checkpoint):
    object.__setattr__(checkpoint.plan, "kv_cache", "FP8")
    return checkpoint
