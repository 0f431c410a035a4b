from __future__ import annotations

import hashlib
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from anyfp8.checkpoint import open_checkpoint, open_source, quantize_stream, stream
from anyfp8.errors import CalibrationError, CheckpointError, InputError
from anyfp8.problem import Scheme
from anyfp8.reference import dequantize, quantize_weight

STATIC = Scheme("tensor", "tensor")
CHANNEL = Scheme("channel", "token", dynamic=True)
BLOCK = Scheme("block", block=(128, 128))
OFFICIAL = {STATIC: "modelopt-fp8", CHANNEL: "modelopt-fp8-pcpt", BLOCK: "modelopt-fp8-pb-wo"}
LAYERS = [
    "model.layers.0.mlp.down_proj",
    "model.layers.0.self_attn.k_proj",
    "model.layers.0.self_attn.v_proj",
]


def digests(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


@pytest.mark.parametrize("scheme", OFFICIAL, ids=lambda s: s.name)
def test_what_is_written_agrees_with_the_official_exporter(data, tmp_path, scheme):
    official = open_checkpoint(data / OFFICIAL[scheme])
    scales = {n: official.input_scale(n) for n in official.plan.layers}
    before = digests(data / "bf16")
    report = quantize_stream(
        open_source(data / "bf16"),
        tmp_path / "out",
        scheme,
        input_scales=scales if scheme == STATIC else None,
    )
    assert digests(data / "bf16") == before
    assert sorted(report.layers) == LAYERS
    ours = open_checkpoint(tmp_path / "out")
    assert ours.plan.warnings == ()
    assert ours.plan.schemes == {scheme: 3}
    for name in LAYERS:
        mine, theirs = ours.layer(name), official.layer(name)
        assert torch.equal(mine.weight.scale, theirs.weight.scale)
        assert mine.input_scale == theirs.input_scale
        # the exporter divides in bf16, so that some codes are one step off
        step = (mine.weight.codes.int() - theirs.weight.codes.int()).abs()
        assert step.max() <= 1
        assert (step > 0).float().mean() < 0.05
    for name, tensor in load_file(data / "bf16" / "model.safetensors").items():
        if name.removesuffix(".weight") not in LAYERS:
            assert torch.equal(ours.tensor(name), tensor)


def test_the_configs_say_what_was_written(data, tmp_path):
    report = quantize_stream(open_source(data / "bf16"), tmp_path / "out", CHANNEL)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    quantization = config.pop("quantization_config")
    assert config == json.loads((data / "bf16" / "config.json").read_text())
    assert quantization["quant_algo"] == "FP8_PER_CHANNEL_PER_TOKEN"
    assert quantization["ignore"] == ["lm_head", "model.embed_tokens"]
    assert (tmp_path / "out" / "generation_config.json").exists()
    assert dict(report.excluded) == {
        "lm_head": "excluded by 'lm_head'",
        "model.embed_tokens": "embedding",
    }
    assert report.bytes_out < report.bytes_in
    assert report.unmatched_rules == ()


@pytest.mark.parametrize("scheme", [STATIC, CHANNEL, BLOCK], ids=lambda s: s.name)
@pytest.mark.parametrize("shape", [(1, 7), (300, 200), (129, 64)])
def test_quantizing_in_slices_changes_no_byte(monkeypatch, scheme, shape):
    monkeypatch.setattr(stream, "_SLICE_VALUES", 1000)
    w = torch.randn(shape).bfloat16()
    found, whole = stream.quantize_rows("w", w, scheme), quantize_weight(w, scheme)
    assert torch.equal(found.codes, whole.codes)
    assert torch.equal(found.scale, whole.scale)


def test_tensors_go_to_shards_and_back(data, tmp_path):
    source = open_source(data / "bf16")
    quantize_stream(source, tmp_path / "out", CHANNEL, shard_bytes=100_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    for layer in open_checkpoint(tmp_path / "out").layers():
        w = source.tensor(f"{layer.name}.weight").float()
        assert (dequantize(layer.weight) - w).norm() / w.norm() < 0.03


def test_progress_ends_at_the_number_of_tensors(data, tmp_path):
    steps = []
    source = open_source(data / "bf16")
    quantize_stream(source, tmp_path / "out", CHANNEL, progress=lambda *s: steps.append(s))
    assert steps == [(i + 1, len(source.specs)) for i in range(len(source.specs))]


def test_exactly_the_named_modules_are_quantized(data, tmp_path):
    report = quantize_stream(
        open_source(data / "bf16"),
        tmp_path / "out",
        CHANNEL,
        exclude=["v_proj", "idle"],
        modules=[LAYERS[1], LAYERS[2], "lm_head"],
    )
    assert sorted(report.layers) == ["lm_head", LAYERS[1]]
    assert report.unmatched_rules == ("idle",)
    assert dict(report.excluded)[LAYERS[0]] == "not in the list of modules"
    assert sorted(open_checkpoint(tmp_path / "out").plan.layers) == ["lm_head", LAYERS[1]]


def test_a_tied_lm_head_stays_tied_and_is_listed(make_folder, tmp_path):
    folder = make_folder({"model.layers.0.mlp.up_proj.weight": torch.randn(8, 8)}, None)
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    report = quantize_stream(open_source(folder), tmp_path / "out", CHANNEL)
    assert report.unmatched_rules == ()
    plan = open_checkpoint(tmp_path / "out").plan
    assert dict(plan.rules) == {"lm_head": ("lm_head",)}
    assert "lm_head.weight" not in plan.files


def test_stacked_experts_are_reported_and_kept(make_folder, tmp_path):
    tensors = {
        "m.proj.weight": torch.randn(8, 16),
        "m.experts.gate_up_proj": torch.randn(2, 8, 4),
    }
    report = quantize_stream(open_source(make_folder(tensors, None)), tmp_path / "out", CHANNEL)
    assert dict(report.excluded) == {"m.experts.gate_up_proj": "3-D tensor"}
    kept = open_checkpoint(tmp_path / "out").tensor("m.experts.gate_up_proj")
    assert torch.equal(kept, tensors["m.experts.gate_up_proj"])


def test_biases_are_kept_beside_their_weights(make_folder, tmp_path):
    tensors = {"m.proj.weight": torch.randn(8, 16), "m.proj.bias": torch.randn(8)}
    quantize_stream(open_source(make_folder(tensors, None)), tmp_path / "out", CHANNEL)
    layer = open_checkpoint(tmp_path / "out").layer("m.proj")
    assert torch.equal(layer.bias, tensors["m.proj.bias"])


@pytest.mark.parametrize("scales", [None, {LAYERS[0]: 0.5}, dict.fromkeys(LAYERS, 0.0)])
def test_a_static_layer_without_a_usable_scale_is_named(data, tmp_path, scales):
    with pytest.raises(CalibrationError, match="static layers have no input scale") as caught:
        quantize_stream(open_source(data / "bf16"), tmp_path / "out", STATIC, input_scales=scales)
    assert caught.value.got.startswith("model.layers.0.")
    assert list(tmp_path.iterdir()) == []


def test_quantizing_nothing_is_an_error(data, tmp_path):
    with pytest.raises(InputError, match="0 of 5 linear layers"):
        quantize_stream(open_source(data / "bf16"), tmp_path / "out", CHANNEL, exclude=["*"])
    assert list(tmp_path.iterdir()) == []


def test_a_module_that_does_not_exist_is_named(data, tmp_path):
    with pytest.raises(InputError, match=r"m\.absent"):
        quantize_stream(open_source(data / "bf16"), tmp_path / "out", CHANNEL, modules=["m.absent"])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(make_folder, tmp_path, value):
    w = torch.randn(8, 8)
    w[5, 2] = value
    source = open_source(make_folder({"m.proj.weight": w}, None))
    with pytest.raises(CheckpointError, match=r"m\.proj\.weight") as caught:
        quantize_stream(source, tmp_path / "out", CHANNEL)
    assert "[5, 2]" in caught.value.got
    assert not (tmp_path / "out").exists()


def test_the_output_may_not_be_or_hold_the_source(make_folder):
    folder = make_folder({"m.proj.weight": torch.randn(8, 8)}, None)
    before = digests(folder)
    for out in (folder, folder / "inside", folder.parent):
        with pytest.raises(CheckpointError, match="is or holds the source"):
            quantize_stream(open_source(folder), out, CHANNEL, overwrite=True)
    assert digests(folder) == before


def test_a_zero_weight_stays_zero(make_folder, tmp_path):
    source = open_source(make_folder({"m.proj.weight": torch.zeros(8, 8)}, None))
    quantize_stream(source, tmp_path / "out", BLOCK)
    layer = open_checkpoint(tmp_path / "out").layer("m.proj")
    assert torch.equal(dequantize(layer.weight), torch.zeros(8, 8))
    assert bool((layer.weight.scale > 0).all())


MEASURE = """
import resource, sys, torch
torch.set_num_threads(1)
from anyfp8.checkpoint import open_source, quantize_stream
from anyfp8.problem import Scheme
scheme = Scheme.parse(sys.argv[4])
quantize_stream(open_source(sys.argv[1]), sys.argv[1] + "-out", scheme)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
quantize_stream(open_source(sys.argv[2]), sys.argv[3], scheme, shard_bytes=1 << 24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("scheme", [CHANNEL, BLOCK], ids=lambda s: s.name)
def test_memory_stays_below_a_shard_and_two_tensors(make_folder, tmp_path, scheme):
    shape = (2048, 4096)
    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(8)]
    tensors = {name: torch.randn(shape, dtype=torch.bfloat16) for name in names}
    shards = [names[i : i + 3] for i in range(0, len(names), 3)]
    big = make_folder(tensors, None, name="big", shards=shards)
    small = make_folder({names[0]: torch.randn(1024, 1024)}, None, name="small")
    largest = 2 * shape[0] * shape[1]
    command = [sys.executable, "-c", MEASURE, small, big, tmp_path / "out", scheme.name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    # ru_maxrss is in KiB
    assert int(done.stdout) * 1024 < (1 << 24) + 2 * largest < len(names) * largest / 2
