"""Official runtimes' arithmetic: their outputs bit for bit, from files and inputs of theirs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from anyfp8.checkpoint import open_checkpoint
from anyfp8.errors import InputError
from anyfp8.linear import Fp8Linear
from anyfp8.problem import Scheme
from anyfp8.tools.runtimes import RUNTIMES, emulate_runtime, fake_quantized

DATA = Path(__file__).parent.parent / "data" / "checkpoints"
FOLDERS = {
    "compressed-tensors-static": "compressed-tensors",
    "compressed-tensors-dynamic": "compressed-tensors",
    "compressed-tensors-block": "compressed-tensors",
    "compressed-tensors-tensor-token": "compressed-tensors",
    "compressed-tensors-weight-only": "compressed-tensors",
    "quark": "quark",
}


@pytest.mark.parametrize("folder", FOLDERS)
def test_layers_give_the_runtimes_outputs_to_the_last_bit(folder):
    stored = load_file(DATA / "official.safetensors")
    names = {key.split("/")[1][:-2] for key in stored if key.startswith(f"{folder}/")}
    assert names
    for name in names:
        found = open_checkpoint(DATA / folder).layer(name)
        n, k = found.weight.data.shape
        layer = Fp8Linear(k, n, found.scheme, device="meta")
        layer.load(found.weight, input_scale=found.input_scale)
        layer.prepare()
        x, y = (stored[f"{folder}/{name}.{leaf}"] for leaf in "xy")
        before = layer(x)
        line = emulate_runtime(torch.nn.Sequential(layer), FOLDERS[folder])
        assert torch.equal(layer(x), y)
        assert line.startswith(f"1 layer as {FOLDERS[folder]} computes them")
        if found.scheme.activation != "none":
            assert not torch.equal(before, y)


def test_a_last_group_that_is_not_whole_is_one_of_its_own():
    scheme = Scheme("block", "group", True, (128, 128), 128)
    x = torch.randn(3, 160).bfloat16()
    whole = torch.cat([x[:, :128], torch.nn.functional.pad(x[:, 128:], (0, 96))], 1)
    assert torch.equal(
        fake_quantized(x, scheme, "quark"), fake_quantized(whole, scheme, "quark")[:, :160]
    )


@pytest.mark.parametrize("activation", ["token", "tensor"])
@pytest.mark.parametrize("name", RUNTIMES)
def test_rows_of_zeros_stay_zero(activation, name):
    x = torch.zeros(2, 32).bfloat16()
    assert torch.equal(fake_quantized(x, Scheme("channel", activation, dynamic=True), name), x)


def test_modelopts_own_fake_quantization_is_met_to_the_last_bit():
    # written by modelopt.torch.quantization.tensor_quant.fp8_eager of nvidia-modelopt 0.47
    stored = load_file(DATA / "modelopt-fake-quant.safetensors")
    x = stored["x"]
    static = fake_quantized(x, Scheme("tensor", "tensor"), "modelopt", stored["input_scale"])
    assert torch.equal(static, stored["static"])
    tokens = fake_quantized(x, Scheme("channel", "token", dynamic=True), "modelopt")
    assert torch.equal(tokens, stored["per_token"])


def test_an_unknown_runtime_is_refused_by_name():
    with pytest.raises(InputError, match="runtime") as caught:
        emulate_runtime(torch.nn.Sequential(), "vllm")
    assert "compressed-tensors, quark, modelopt" in caught.value.want
