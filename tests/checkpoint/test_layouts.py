from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from anyfp8.checkpoint import open_checkpoint, open_source, quantize_stream, save_checkpoint
from anyfp8.checkpoint.layouts import choose_layout
from anyfp8.errors import InputError
from anyfp8.problem import Scheme
from anyfp8.reference import dequantize, quantize_weight

COMPRESSED = (
    *("w8a8-tensor-static", "w8a8-tensor-dynamic", "w8a8-tensor-token", "w8a16-tensor"),
    *("w8a8-channel-static", "w8a8-channel-token", "w8a16-channel", "w8a16-block1x64"),
    *("w8a8-block128x128-group128", "w8a16-block128x128", "w8a8-block64x128-static"),
    "w8a16-block1x32-ue8m0",
)
FINE = ("w8a8-block128x128-group128", "w8a8-block128x128-group128-ue8m0")
FINE = (*FINE, "w8a8-tensor-dynamic", "w8a8-tensor-static")
WRITTEN = [("compressed-tensors", s) for s in COMPRESSED] + [("finegrained", s) for s in FINE]
N, K = 200, 320


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "bf16"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    tensors = {"lm_head.weight": torch.randn(8, 16, generator=generator).bfloat16()}
    for i, name in enumerate(("m.up_proj", "m.down_proj")):
        w = torch.randn(N, K, generator=generator) * 10.0 ** (i - 1)
        tensors[f"{name}.weight"] = w.bfloat16()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "bfloat16"}))
    return open_source(folder)


@pytest.mark.parametrize(("format", "name"), WRITTEN)
def test_what_is_written_is_read_back_as_the_same_scheme_and_bytes(tmp_path, source, format, name):
    scheme = Scheme.parse(name)
    scales = {"m.up_proj": 0.123, "m.down_proj": 0.0456}
    report = quantize_stream(source, tmp_path / "out", scheme, input_scales=scales, format=format)
    assert report.format == format
    checkpoint = open_checkpoint(tmp_path / "out")
    assert checkpoint.plan.schemes == {scheme: 2}
    assert checkpoint.plan.warnings == ()
    raw = load_file(tmp_path / "out" / "model.safetensors")
    narrow = format == "compressed-tensors" and scheme.scale_format == "float32"
    for layer in checkpoint.layers():
        w = source.tensor(f"{layer.name}.weight")
        plain = quantize_weight(w, scheme).scale
        # transformers keeps compressed-tensors' scales in the model's dtype
        wanted = plain.bfloat16().float() if narrow else plain
        assert torch.equal(layer.weight.scale, wanted)
        assert torch.equal(
            layer.weight.codes.view(torch.float8_e4m3fn).float(),
            raw[f"{layer.name}.weight"].float(),
        )
        error = (dequantize(layer.weight) - w.float()).norm() / w.float().norm()
        assert error < 0.03
        if layer.input_scale is not None:
            static = torch.tensor(scales[layer.name])
            assert layer.input_scale == (static.bfloat16().float() if narrow else static)


@pytest.mark.parametrize(
    ("schemes", "format", "chosen"),
    [
        (["w8a8-tensor-static"], None, "modelopt"),
        (["w8a16-channel"], None, "compressed-tensors"),
        (["w8a8-block128x128-group128-ue8m0"], None, "finegrained"),
        (["w8a8-tensor-static", "w8a16-channel"], None, "compressed-tensors"),
        (["w8a8-tensor-static", "w8a16-block128x128"], None, "modelopt"),
        (["w8a8-tensor-static"], "finegrained", "finegrained"),
    ],
)
def test_modelopts_layout_comes_first_and_then_whichever_holds_the_schemes(schemes, format, chosen):
    assert choose_layout(map(Scheme.parse, schemes), format) == chosen


@pytest.mark.parametrize(
    ("schemes", "format", "said"),
    [
        (["w8a16-channel"], "finegrained", "compressed-tensors"),
        (["w8a16-channel"], "modelopt", "compressed-tensors"),
        (["w8a8-block128x128-group128-ue8m0"], "compressed-tensors", "finegrained"),
        (["w8a8-tensor-static", "w8a8-tensor-dynamic"], "finegrained", "one scheme"),
        (["w8a16-channel", "w8a8-block128x128-group128-ue8m0"], None, "finegrained"),
        (["w8a16-channel"], "gguf", "modelopt, compressed-tensors, finegrained"),
    ],
)
def test_a_layout_that_cannot_hold_the_schemes_names_one_that_can(schemes, format, said):
    with pytest.raises(InputError) as caught:
        choose_layout(map(Scheme.parse, schemes), format)
    assert said in str(caught.value)


def test_layers_of_several_schemes_become_groups_with_their_names(tmp_path, source):
    layers = []
    for name, scheme in (
        ("m.up_proj", "w8a16-channel"),
        ("m.down_proj", "w8a8-block128x128-group128"),
    ):
        quantize_stream(
            source,
            tmp_path / name,
            Scheme.parse(scheme),
            modules=[name],
            format="compressed-tensors",
        )
        layers.append(open_checkpoint(tmp_path / name).layer(name))
    plain = {"lm_head.weight": torch.zeros(8, 16)}
    written = save_checkpoint(tmp_path / "both", config=source.config, layers=layers, plain=plain)
    assert written == "compressed-tensors"
    checkpoint = open_checkpoint(tmp_path / "both")
    for layer in layers:
        again = checkpoint.layer(layer.name)
        assert again.scheme == layer.scheme
        assert torch.equal(again.weight.codes, layer.weight.codes)
        assert torch.equal(again.weight.scale, layer.weight.scale)


@pytest.mark.parametrize(
    "folder",
    [
        "compressed-tensors-static",
        "compressed-tensors-dynamic",
        "compressed-tensors-block",
        "compressed-tensors-weight-only",
        "compressed-tensors-mxfp8",
        "finegrained-block",
    ],
)
def test_written_groups_say_what_the_official_ones_say(data, tmp_path, folder):
    layers = list(open_checkpoint(data / folder).layers())
    format = "finegrained" if folder.startswith("fine") else "compressed-tensors"
    save_checkpoint(tmp_path / "out", config={}, layers=layers, plain={}, format=format)
    official = json.loads((data / folder / "config.json").read_text())["quantization_config"]
    ours = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    if format == "finegrained":
        assert ours.items() <= (official | {"modules_to_not_convert": ["lm_head"]}).items()
        return
    assert (ours["format"], ours["ignore"]) == (official["format"], official["ignore"])
    theirs = official["config_groups"]["group_0"]
    for side in ("weights", "input_activations"):
        mine = ours["config_groups"]["group_0"][side]
        if folder.endswith("mxfp8") and side == "input_activations":
            assert mine is None
        else:
            assert (mine or {}).items() <= (theirs[side] or {}).items()
            assert (mine is None) == (theirs[side] is None)


@pytest.mark.parametrize(
    "folder",
    [
        "finegrained-block",
        "finegrained-tensor",
        "fbgemm",
        "quark",
        "torchao-row",
        "compressed-tensors-mxfp8",
    ],
)
def test_official_layers_saved_in_another_layout_keep_every_bit(data, tmp_path, folder):
    layers = list(open_checkpoint(data / folder).layers())
    save_checkpoint(tmp_path / "out", config={}, layers=layers, plain={})
    again = open_checkpoint(tmp_path / "out")
    for layer in layers:
        found = again.layer(layer.name)
        assert found.scheme == layer.scheme
        assert torch.equal(found.weight.codes, layer.weight.codes)
        assert torch.equal(found.weight.scale, layer.weight.scale)
