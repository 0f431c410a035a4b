from __future__ import annotations

import pytest
import torch

from anyfp8.checkpoint import LayerData, merge_layers, open_checkpoint
from anyfp8.checkpoint.reader import _NAN_BYTES, _nan_here, _nan_there
from anyfp8.errors import CheckpointError, InputError
from anyfp8.problem import QTensor, Scheme
from anyfp8.reference import dequantize, quantize_weight

STATIC = Scheme("tensor", "tensor")


def layer(name, w, scheme=STATIC, input_scale=0.5, extras=None):
    q = quantize_weight(w, scheme)
    static = torch.tensor(input_scale) if scheme.activation == "tensor" else None
    return LayerData(name, scheme, QTensor(q.codes, q.scale, q.block), static, None, extras or {})


def two_parts(scheme=STATIC):
    w1, w2 = torch.randn(64, 64) * 0.02, torch.randn(64, 64) * 2
    return torch.cat([w1, w2]), [layer("m.gate_proj", w1, scheme), layer("m.up_proj", w2, scheme)]


def test_tensors_come_in_file_order_and_only_the_unquantized_ones(make_folder, fp8_layer):
    tensors = {
        **fp8_layer("m.a"),
        "x": torch.ones(2),
        "lm_head.weight": torch.arange(4.0).reshape(2, 2),
    }
    checkpoint = open_checkpoint(make_folder(tensors))
    found = dict(checkpoint.tensors())
    assert set(found) == {"x", "lm_head.weight"}
    assert all(torch.equal(found[name], tensors[name]) for name in found)
    assert [found.name for found in checkpoint.layers()] == ["m.a"]


def test_an_unknown_layer_or_tensor_is_refused(make_folder, fp8_layer):
    checkpoint = open_checkpoint(make_folder(fp8_layer("m.a")))
    with pytest.raises(CheckpointError, match=r"m\.b"):
        checkpoint.layer("m.b")
    with pytest.raises(CheckpointError, match=r"m\.b\.weight"):
        checkpoint.tensor("m.b.weight")


@pytest.mark.parametrize("has_nan", [_nan_here, _nan_there])
@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_one_nan_code_is_found_wherever_it_lies(has_nan, code):
    codes = (torch.arange(2 * _NAN_BYTES + 24, dtype=torch.int32) % 254).to(torch.uint8)
    codes[codes == 0x7F] = 0xFE
    assert not has_nan(codes.view(-1, 8))
    for place in (0, _NAN_BYTES - 1, _NAN_BYTES, len(codes) - 1):
        spoilt = codes.clone()
        spoilt[place] = code
        assert has_nan(spoilt.view(-1, 8))


def test_codes_go_to_the_device_that_is_asked_for(make_folder, fp8_layer):
    checkpoint = open_checkpoint(make_folder(fp8_layer("m.a")))
    found = checkpoint.layer("m.a", torch.device("cpu"))
    assert torch.equal(found.weight.codes, checkpoint.layer("m.a").weight.codes)


def test_merging_different_scales_keeps_every_value(make_folder):
    w, parts = two_parts()
    merged = merge_layers("m.gate_up_proj", parts)
    assert merged.layer.scheme == Scheme("channel", "tensor")
    assert merged.sizes == (64, 64)
    assert merged.relative_error == 0.0
    values = dequantize(merged.layer.weight)
    assert torch.equal(values, torch.cat([dequantize(part.weight) for part in parts]))
    for rows in (slice(0, 64), slice(64, 128)):
        assert (values[rows] - w[rows]).norm() / w[rows].norm() < 0.03


def test_merging_equal_scales_changes_nothing():
    _, (first, second) = two_parts()
    second = LayerData("m.up_proj", STATIC, QTensor(second.weight.codes, first.weight.scale))
    first = LayerData("m.gate_proj", STATIC, first.weight)
    for requantize in (False, True):
        merged = merge_layers("m.gate_up_proj", [first, second], requantize=requantize)
        assert merged.layer.scheme == STATIC
        assert merged.layer.weight.scale == first.weight.scale
        assert merged.relative_error == 0.0
        codes = torch.cat([first.weight.codes, second.weight.codes])
        assert torch.equal(merged.layer.weight.codes, codes)


def test_requantizing_to_one_scale_reports_its_loss():
    w, parts = two_parts()
    merged = merge_layers("m.gate_up_proj", parts, requantize=True)
    assert merged.layer.scheme == STATIC
    assert merged.layer.weight.scale == torch.stack([p.weight.scale for p in parts]).amax()
    exact = torch.cat([dequantize(part.weight) for part in parts])
    error = (dequantize(merged.layer.weight) - exact).norm() / exact.norm()
    assert merged.relative_error == pytest.approx(float(error), rel=1e-3)
    # the part with small weights loses what the larger scale cannot hold
    small = dequantize(merged.layer.weight)[:64]
    assert 0.03 < (small - w[:64]).norm() / w[:64].norm() < 0.1


@pytest.mark.parametrize(
    "scheme", [Scheme("channel", "token", True), Scheme("block", block=(32, 32))]
)
def test_merging_channels_and_blocks_stacks_them(scheme):
    _, parts = two_parts(scheme)
    merged = merge_layers("m.gate_up_proj", parts).layer
    assert merged.scheme == scheme
    exact = torch.cat([dequantize(part.weight) for part in parts])
    assert torch.equal(dequantize(merged.weight), exact)


def test_a_merged_layer_keeps_the_larger_input_range_biases_and_extras():
    parts = [
        layer("m.q_proj", torch.randn(8, 16), input_scale=0.5),
        layer("m.k_proj", torch.randn(4, 16), input_scale=0.75, extras={"k_scale": torch.ones(1)}),
    ]
    merged = merge_layers("m.qk_proj", parts).layer
    assert merged.input_scale == 0.75
    assert list(merged.extras) == ["k_proj.k_scale"]


def test_layers_that_do_not_fit_are_not_merged():
    a, b = layer("a", torch.randn(8, 16)), layer("b", torch.randn(8, 32))
    with pytest.raises(InputError, match="cannot merge"):
        merge_layers("ab", [a, b])
    with pytest.raises(InputError, match="cannot merge"):
        merge_layers("none", [])
    block = Scheme("block", block=(32, 32))
    odd = [layer(name, torch.randn(40, 32), block) for name in "ab"]
    with pytest.raises(InputError, match="multiple of the block"):
        merge_layers("ab", odd)
