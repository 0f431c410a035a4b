from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from anyfp8.checkpoint import open_checkpoint, recast
from anyfp8.errors import CheckpointError, InputError
from anyfp8.problem import Scheme
from anyfp8.reference import dequantize


def same_values(before, after):
    """Codes bit-equal and values equal, layer by layer; the rest of the tensors untouched."""
    assert list(after.plan.layers) == list(before.plan.layers)
    for layer in before.layers():
        found = after.layer(layer.name)
        assert torch.equal(found.weight.codes, layer.weight.codes)
        assert torch.equal(dequantize(found.weight), dequantize(layer.weight))
        if found.scheme.activation == "tensor" and not found.scheme.dynamic:
            assert torch.equal(found.input_scale, layer.input_scale)
    assert set(after.plan.plain) == set(before.plan.plain)
    for name in before.plan.plain:
        assert torch.equal(after.tensor(name), before.tensor(name))


@pytest.mark.parametrize(
    ("folder", "format", "scheme"),
    [
        ("modelopt-fp8", "compressed-tensors", "w8a8-tensor-static"),
        ("modelopt-fp8", "finegrained", "w8a8-tensor-static"),
        ("modelopt-fp8-pcpt", "compressed-tensors", "w8a8-channel-token"),
        ("modelopt-fp8-pb-wo", "compressed-tensors", "w8a16-block128x128"),
        ("modelopt-mxfp8", "compressed-tensors", "w8a16-block1x32-ue8m0"),
        ("compressed-tensors-static", "modelopt", "w8a8-tensor-static"),
        ("compressed-tensors-dynamic", "modelopt", "w8a8-channel-token"),
        ("compressed-tensors-tensor-token", "modelopt", "w8a8-channel-token"),
        ("compressed-tensors-block", "finegrained", "w8a8-block128x128-group128"),
        ("finegrained-block", "compressed-tensors", "w8a8-block128x128-group128"),
        ("finegrained-tensor", "compressed-tensors", "w8a8-tensor-dynamic"),
        ("fbgemm", "modelopt", "w8a8-channel-token"),
        ("quark", "modelopt", "w8a8-tensor-static"),
        ("torchao-row", "modelopt", "w8a8-channel-token"),
        ("torchao-tensor", "finegrained", "w8a8-tensor-dynamic"),
    ],
)
def test_official_files_become_another_layout_with_every_code(
    data, tmp_path, folder, format, scheme
):
    before = open_checkpoint(data / folder)
    report = recast(before, tmp_path / "out", format=format)
    after = open_checkpoint(tmp_path / "out")
    same_values(before, after)
    assert (report.format, dict(report.schemes)) == (format, {scheme: len(after.plan.layers)})
    assert (report.exact, report.requantized) == (len(after.plan.layers), ())
    assert after.plan.schemes == {Scheme.parse(scheme): len(after.plan.layers)}


def test_there_and_back_gives_the_same_tensors(data, tmp_path):
    recast(open_checkpoint(data / "modelopt-fp8"), tmp_path / "ct", format="compressed-tensors")
    recast(open_checkpoint(tmp_path / "ct"), tmp_path / "back", format="modelopt")
    first = load_file(data / "modelopt-fp8" / "model.safetensors")
    last = load_file(tmp_path / "back" / "model.safetensors")
    assert first.keys() == last.keys()
    for name, tensor in first.items():
        assert tensor.dtype == last[name].dtype
        assert torch.equal(tensor.float(), last[name].float())


def test_scales_that_the_target_cannot_hold_are_refused_before_anything_is_written(data, tmp_path):
    checkpoint = open_checkpoint(data / "finegrained-block")
    with pytest.raises(InputError, match=r"down_proj|k_proj") as caught:
        recast(checkpoint, tmp_path / "out", scheme=Scheme.parse("w8a8-channel-token"))
    assert "--requantize" in caught.value.hint
    assert not (tmp_path / "out").exists()


def test_requantizing_says_what_it_loses(data, tmp_path):
    checkpoint = open_checkpoint(data / "finegrained-block")
    scheme = Scheme.parse("w8a8-channel-token")
    report = recast(checkpoint, tmp_path / "out", scheme=scheme, requantize=True)
    after = open_checkpoint(tmp_path / "out")
    assert set(report.requantized) == set(after.plan.layers)
    lost = total = 0.0
    for layer in checkpoint.layers():
        values = dequantize(layer.weight)
        lost += float((dequantize(after.layer(layer.name).weight) - values).square().sum())
        total += float(values.square().sum())
    assert report.relative_error == pytest.approx((lost / total) ** 0.5, rel=1e-4)
    # rounding a second time to 3 mantissa bits
    assert 0.001 < report.relative_error < 0.03


def test_requantizing_touches_only_layers_that_need_it(data, tmp_path):
    report = recast(
        open_checkpoint(data / "modelopt-fp8"),
        tmp_path / "out",
        scheme=Scheme.parse("w8a8-channel-token"),
        requantize=True,
    )
    assert report.requantized == ()


def test_a_static_target_needs_a_static_source(data, tmp_path):
    checkpoint = open_checkpoint(data / "modelopt-fp8-pcpt")
    with pytest.raises(InputError, match="cannot become w8a8-channel-static"):
        recast(checkpoint, tmp_path / "out", scheme=Scheme.parse("w8a8-channel-static"))


def test_powers_of_two_are_asked_for_only_where_all_scales_are(data, tmp_path):
    checkpoint = open_checkpoint(data / "finegrained-block")
    wanted = Scheme.parse("w8a8-block128x128-group128-ue8m0")
    with pytest.raises(InputError, match="cannot become"):
        recast(checkpoint, tmp_path / "out", scheme=wanted)


def test_a_format_that_cannot_hold_the_schemes_names_one_that_can(data, tmp_path):
    checkpoint = open_checkpoint(data / "finegrained-block")
    with pytest.raises(InputError, match="ModelOpt") as caught:
        recast(checkpoint, tmp_path / "out", format="modelopt")
    assert "compressed-tensors" in caught.value.hint


def test_kv_cache_scales_go_where_the_target_looks_for_them(data, tmp_path):
    before = open_checkpoint(data / "quark-kv")
    raw = load_file(data / "quark-kv" / "model.safetensors")
    attention = "model.layers.0.self_attn"
    recast(before, tmp_path / "mo", format="modelopt")
    recast(open_checkpoint(tmp_path / "mo"), tmp_path / "ct", format="compressed-tensors")
    modelopt = load_file(tmp_path / "mo" / "model.safetensors")
    compressed = load_file(tmp_path / "ct" / "model.safetensors")
    for kind in "kv":
        stored = raw[f"{attention}.{kind}_proj.output_scale"]
        assert torch.equal(modelopt[f"{attention}.{kind}_proj.{kind}_scale"], stored)
        assert torch.equal(compressed[f"{attention}.{kind}_scale"], stored)
    assert open_checkpoint(tmp_path / "ct").plan.kv_cache == "FP8"


def test_a_16_bit_checkpoint_is_no_source(data, tmp_path):
    with pytest.raises(CheckpointError, match="no FP8 layers"):
        recast(open_checkpoint(data / "bf16"), tmp_path / "out")


def test_the_source_is_never_the_target(data):
    checkpoint = open_checkpoint(data / "quark")
    with pytest.raises(CheckpointError):
        recast(checkpoint, data / "quark", overwrite=True)
