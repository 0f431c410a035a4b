"""Files of every official tool, against torch alone and against the official runtimes."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from anyfp8.checkpoint import open_checkpoint, read_plan
from anyfp8.errors import CheckpointError
from anyfp8.linear import Fp8Linear
from anyfp8.problem import Scheme
from anyfp8.reference import dequantize, quantize_per_tensor
from anyfp8.select import Request

K_PROJ = "model.layers.0.self_attn.k_proj"
SCHEMES = {
    "compressed-tensors-static": "w8a8-tensor-static",
    "compressed-tensors-dynamic": "w8a8-channel-token",
    "compressed-tensors-block": "w8a8-block128x128-group128",
    "compressed-tensors-tensor-token": "w8a8-tensor-token",
    "compressed-tensors-weight-only": "w8a16-channel",
    "compressed-tensors-mxfp8": "w8a16-block1x32-ue8m0",
    "finegrained-block": "w8a8-block128x128-group128",
    "finegrained-tensor": "w8a8-tensor-dynamic",
    "fbgemm": "w8a8-channel-token",
    "quark": "w8a8-tensor-static",
    "quark-kv": "w8a8-tensor-static",
    "torchao-row": "w8a8-channel-token",
    "torchao-tensor": "w8a8-tensor-dynamic",
    "modelopt-mxfp8": "w8a16-block1x32-ue8m0",
}
WITH_RUNTIME = [name for name in SCHEMES if name.split("-")[0] in ("compressed", "torchao")]


def values_by_hand(raw, name):
    """codes · scale in fp32 with torch alone, whatever the two are called and shaped."""
    leaf = "_weight_qdata" if f"{name}._weight_qdata" in raw else "weight"
    codes = raw[f"{name}.{leaf}"].float()
    (scale,) = (
        tensor
        for key in ("weight_scale", "weight_scale_inv", "_weight_scale")
        if (tensor := raw.get(f"{name}.{key}")) is not None
    )
    if scale.dtype == torch.uint8:
        exponents = 2.0 ** (scale.double() - 127)
        return codes * exponents.float().repeat_interleave(32, 1)
    scale = scale.float()
    n, k = codes.shape
    if scale.numel() in (1, n):
        return codes * scale.reshape(-1, 1)
    return codes * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:n, :k]


@pytest.mark.parametrize("folder", SCHEMES)
def test_layers_dequantize_to_codes_times_scale(data, folder):
    checkpoint = open_checkpoint(data / folder)
    raw = load_file(data / folder / "model.safetensors")
    layers = list(checkpoint.layers())
    assert {layer.scheme.name for layer in layers} == {SCHEMES[folder]}
    assert K_PROJ in {layer.name for layer in layers}
    assert "lm_head.weight" in checkpoint.plan.plain
    for layer in layers:
        assert torch.equal(dequantize(layer.weight), values_by_hand(raw, layer.name))
        static = raw.get(f"{layer.name}.input_scale")
        assert (layer.input_scale is None) == (static is None)
        assert static is None or torch.equal(layer.input_scale, static.float().reshape(()))
    assert checkpoint.plan.warnings == ()


@pytest.mark.parametrize("folder", SCHEMES)
def test_layers_are_near_their_16_bit_original(data, folder):
    layer = open_checkpoint(data / folder).layer(K_PROJ)
    w = load_file(data / "bf16" / "model.safetensors")[f"{K_PROJ}.weight"].float()
    # E8M0 scales waste up to a bit of range, never of precision
    assert (dequantize(layer.weight) - w).norm() / w.norm() < 0.03


def official(data, folder):
    found = load_file(data / "official.safetensors")
    names = {key.split("/")[1][:-2] for key in found if key.startswith(f"{folder}/")}
    return {n: [found[f"{folder}/{n}.{leaf}"] for leaf in "xyw"] for n in sorted(names)}


@pytest.mark.parametrize("folder", [*WITH_RUNTIME, "finegrained-block", "finegrained-tensor"])
def test_weights_equal_the_official_runtimes(data, folder):
    checkpoint = open_checkpoint(data / folder)
    for name, (_, _, w) in official(data, folder).items():
        ours = dequantize(checkpoint.layer(name).weight, torch.bfloat16)
        assert torch.equal(ours[:8], w.to(torch.bfloat16))


def fake_quantized(x, layer, double_rounding):
    """x as the official runtime sees it: quantized in 16-bit arithmetic and dequantized."""
    scheme = layer.scheme
    if scheme.activation == "none":
        return x
    parts = x.reshape(len(x), -1, scheme.group or x.shape[1])
    if scheme.activation == "tensor" and not scheme.dynamic:
        scale = layer.input_scale
    elif scheme.activation == "tensor":
        scale = x.abs().amax() / 448
    else:
        scale = parts.abs().amax(-1, keepdim=True) / 448
    scale = scale.to(x.dtype)
    scaled = parts / scale if double_rounding else parts.float() / scale.float()
    codes = scaled.clamp(-448, 448).to(torch.float8_e4m3fn)
    return (codes.to(x.dtype) * scale).reshape(x.shape)


@pytest.mark.parametrize("folder", [f for f in WITH_RUNTIME if not f.endswith("mxfp8")])
def test_layer_outputs_equal_the_official_runtimes(data, folder):
    # compressed-tensors divides in bf16 and torchao in fp32; given that, nothing else may differ
    double_rounding = folder.startswith("compressed")
    for name, (x, y, _) in official(data, folder).items():
        layer = open_checkpoint(data / folder).layer(name)
        seen = fake_quantized(x, layer, double_rounding)
        ours = torch.nn.functional.linear(seen, dequantize(layer.weight, torch.bfloat16))
        if double_rounding:
            assert torch.equal(ours, y)
        else:
            assert (ours - y).float().norm() / y.float().norm() < 2**-8


@pytest.mark.parametrize("folder", WITH_RUNTIME)
def test_prepared_layers_are_within_activation_rounding_of_the_official_runtimes(data, folder):
    for name, (x, y, _) in official(data, folder).items():
        found = open_checkpoint(data / folder).layer(name)
        n, k = found.weight.data.shape
        layer = Fp8Linear(k, n, found.scheme, device="meta", request=Request(emulate=True))
        layer.load(found.weight, input_scale=found.input_scale)
        layer.prepare()
        # E4M3 rounds to 3 mantissa bits: 0.026 relative on normal values
        assert (layer(x) - y).float().norm() / y.float().norm() < 0.033


STATIC = ["compressed-tensors-static", "quark"]


@pytest.mark.parametrize("folder", STATIC)
def test_static_outputs_are_the_official_ones_given_their_16_bit_division(data, folder):
    for name, (x, y, w) in official(data, folder).items():
        layer = open_checkpoint(data / folder).layer(name)
        weight = dequantize(layer.weight, torch.bfloat16)
        if w.dtype == torch.float8_e4m3fn:
            # Quark's runtime keeps the codes
            assert torch.equal(layer.weight.codes[:8], w.view(torch.uint8))
        else:
            assert torch.equal(weight[:8], w)
        # those runtimes round x / scale to bf16 and then to FP8, twice in all
        assert torch.equal(torch.nn.functional.linear(fake_quantized(x, layer, True), weight), y)
        # NUMERICS: an fp32 scale and its fp32 reciprocal, one rounding
        ours = quantize_per_tensor(x, layer.input_scale)
        reciprocal = 1 / layer.input_scale.double()
        once = (x.double() * reciprocal.float().double()).float().clamp(-448, 448)
        assert torch.equal(ours.codes, once.to(torch.float8_e4m3fn).view(torch.uint8))
        twice = (x / layer.input_scale.to(x.dtype)).clamp(-448, 448).to(torch.float8_e4m3fn)
        moved = (twice.view(torch.uint8).int() - ours.codes.int()).abs()
        # a user sees some codes one step apart, none further
        assert 0 < (moved != 0).float().mean() < 0.1
        assert moved.max() == 1


def test_uninitialised_static_scales_are_refused_by_name(data):
    with pytest.raises(CheckpointError, match=r"q_proj\.activation_scale") as caught:
        read_plan(data / "finegrained-static")
    assert "dynamic_fallback=True" in caught.value.hint
    plan = read_plan(data / "finegrained-static", dynamic_fallback=True)
    dynamic = Scheme("tensor", "tensor", dynamic=True)
    assert plan.layers["model.layers.0.self_attn.q_proj"].scheme == dynamic
    # 3e9 is a scale, but none that a calibration gives
    assert [warning.split(":")[0] for warning in plan.warnings] == [
        "input scales that no calibration gives, check the outputs",
        "no usable input_scale, activations quantized dynamically",
    ]


def test_kv_cache_scales_are_kept_beside_their_layer(data):
    checkpoint = open_checkpoint(data / "quark-kv")
    assert checkpoint.plan.kv_cache == "FP8"
    raw = load_file(data / "quark-kv" / "model.safetensors")
    for layer in checkpoint.layers():
        assert torch.equal(layer.extras["output_scale"], raw[f"{layer.name}.output_scale"])
