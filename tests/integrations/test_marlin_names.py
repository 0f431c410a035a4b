"""SGLang's weight-only functions under its names, on the CPU and with faked GPUs."""

import os
import subprocess
import sys

import pytest
import torch

from anyfp8 import reference
from anyfp8.errors import InputError
from anyfp8.integrations import marlin, sglang
from anyfp8.problem import QTensor, Scheme


def shards(sizes=(48, 16, 16), k=64, seed=0):
    """Weights of merged layers, each with its own scale: codes [N, K], scales, values [N, K]."""
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(n, k, generator=generator) * 4**i for i, n in enumerate(sizes)]
    quantized = [reference.quantize_weight(w, Scheme("tensor")) for w in parts]
    codes = torch.cat([q.codes for q in quantized]).view(torch.float8_e4m3fn)
    scales = torch.stack([q.scale for q in quantized])
    return codes, scales, torch.cat([reference.dequantize(q) for q in quantized])


def filled(method, sizes=(48, 16, 16), k=64, dtype=torch.bfloat16):
    layer = torch.nn.Module()
    method.create_weights(layer, k, list(sizes), k, sum(sizes), dtype, weight_loader=len)
    assert layer.weight.weight_loader is len
    codes, scales, values = shards(sizes, k)
    layer.weight.data.copy_(codes)
    layer.weight_scale.data.copy_(scales)
    layer.input_scale.data.fill_(0.01)
    return layer, values


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("NVIDIA A100-SXM4-80GB", True),
        ("NVIDIA GeForce RTX 3090", True),
        ("NVIDIA L40S", False),
        ("NVIDIA H200", False),
    ],
)
def test_marlin_is_automatic_exactly_below_fp8_units(name, want, monkeypatch):
    monkeypatch.setenv("ANYFP8_DEVICE_NAME", name)
    assert marlin.can_auto_enable_marlin_fp8() is want
    assert marlin.ModelOptFp8LinearMethod().use_marlin is want
    monkeypatch.setenv("SGLANG_FORCE_FP8_MARLIN", "1")
    assert marlin.ModelOptFp8LinearMethod().use_marlin


@pytest.mark.parametrize("bias", [False, True])
def test_merged_shards_keep_their_own_scales(bias, monkeypatch):
    monkeypatch.setenv("ANYFP8_FORCE_FP8_MARLIN", "1")
    method = marlin.ModelOptFp8LinearMethod()
    layer, values = filled(method)
    codes = layer.weight.data.clone()
    method.process_weights_after_loading(layer)
    assert not hasattr(layer, "input_scale")
    assert layer.workspace is not None
    assert torch.equal(layer.weight.view(torch.uint8), codes.view(torch.uint8))
    x = torch.randn(2, 3, 64).bfloat16()
    b = torch.randn(80).bfloat16() if bias else None
    y = method.apply(layer, x, b)
    want = x.double() @ values.double().T + (0 if b is None else b.double())
    assert y.dtype == torch.bfloat16
    # shard by shard: the scales differ by 16, and a wrong one would hide beside a larger
    for got, right in zip(
        y.double().split((48, 16, 16), -1), want.split((48, 16, 16), -1), strict=True
    ):
        assert (got - right).norm() / right.norm() < 2**-7


def test_without_marlin_activations_are_quantized_with_the_largest_input_scale():
    method = marlin.ModelOptFp8LinearMethod()
    assert not method.use_marlin
    layer, values = filled(method)
    layer.input_scale.data.copy_(torch.tensor([0.01, 0.02, 0.005]))
    method.process_weights_after_loading(layer)
    assert layer.input_scale.item() == pytest.approx(0.02)
    x = torch.randn(5, 64).bfloat16()
    want = x.double() @ values.double().T
    torch.testing.assert_close(method.apply(layer, x).double(), want, rtol=0.1, atol=0.5)


def test_one_scale_of_a_merged_file_serves_all_shards(monkeypatch):
    monkeypatch.setenv("ANYFP8_FORCE_FP8_MARLIN", "1")
    method = marlin.ModelOptFp8LinearMethod()
    layer, _ = filled(method)
    layer.weight_scale.data[1:] = torch.finfo(torch.float32).min
    first = layer.weight_scale.data[0].item()
    method.process_weights_after_loading(layer)
    assert layer.weight_scale.shape == ()
    assert layer.weight_scale.item() == first


def test_scales_that_no_file_filled_are_an_error(monkeypatch):
    monkeypatch.setenv("ANYFP8_FORCE_FP8_MARLIN", "1")
    method = marlin.ModelOptFp8LinearMethod()
    layer, _ = filled(method)
    layer.weight_scale.data.fill_(torch.finfo(torch.float32).min)
    with pytest.raises(InputError, match="weight_scale"):
        method.process_weights_after_loading(layer)


@pytest.mark.parametrize("n", [128, 256])
@pytest.mark.parametrize("size_k_first", [False, True])
def test_the_layout_is_declared_and_not_guessed_from_the_shape(n, size_k_first):
    codes, scales, values = shards((n,), 128)
    layer = torch.nn.Module()
    layer.input_size_per_partition, layer.output_size_per_partition = 128, n
    layer.orig_dtype = torch.float32
    weight = codes.view(torch.uint8).t().contiguous() if size_k_first else codes.view(torch.uint8)
    weight = weight.view(torch.float8_e4m3fn)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(scales, requires_grad=False)
    marlin.prepare_fp8_layer_for_marlin(layer, size_k_first)
    x = torch.randn(3, 128)
    stored = (layer.weight, layer.weight_scale, layer.workspace)
    y = torch.ops.anyfp8.apply_fp8_marlin_linear(x, *stored, n, 128, None)
    torch.testing.assert_close(y, x @ values.T)


def test_block_scales_lose_their_inverse_name():
    q = reference.quantize_weight(torch.randn(200, 256), Scheme("block", block=(128, 128)))
    layer = torch.nn.Module()
    layer.input_size_per_partition, layer.output_size_per_partition = 256, 200
    layer.orig_dtype, layer.weight_block_size = torch.float32, [128, 128]
    layer.weight = torch.nn.Parameter(q.data, requires_grad=False)
    layer.weight_scale_inv = torch.nn.Parameter(q.scale, requires_grad=False)
    marlin.prepare_fp8_layer_for_marlin(layer, size_k_first=False)
    assert not hasattr(layer, "weight_scale_inv")
    x = torch.randn(3, 256)
    stored = (layer.weight, layer.weight_scale, layer.workspace)
    y = marlin.apply_fp8_marlin_linear(x, *stored, 200, 256, None)
    torch.testing.assert_close(y, x @ reference.dequantize(q).T)


def test_the_op_is_traced_without_a_break():
    codes, scales, values = shards((64,), 64)
    workspace = torch.zeros(1, dtype=torch.int32)

    def call(x):
        op = torch.ops.anyfp8.apply_fp8_marlin_linear
        return op(x, codes, scales[0], workspace, 64, 64, None) + 1

    x = torch.randn(3, 64)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), x @ values.T + 1)


def test_the_module_of_sglangs_names_has_these_too():
    assert all(getattr(sglang, name) is getattr(marlin, name) for name in marlin.__all__)


def test_a_scale_of_unknown_blocks_is_an_error():
    workspace = torch.zeros(1, dtype=torch.int32)
    q = QTensor(torch.zeros(96, 96, dtype=torch.uint8), torch.ones(7, 5))
    with pytest.raises(InputError, match=r"\(7, 5\)"):
        marlin.apply_fp8_marlin_linear(torch.zeros(1, 96), q.data, q.scale, workspace, 96, 96, None)


PROGRAM = """
import torch
from anyfp8 import gemm
from anyfp8.checkpoint import open_checkpoint
from anyfp8.device import find_device
from anyfp8.integrations import marlin
from anyfp8 import reference
import sys

a100 = find_device("NVIDIA A100-SXM4-80GB")
marlin.device_of = lambda place: a100
marlin.planning_device = lambda: a100
checkpoint = open_checkpoint(sys.argv[1])
names = [n for n in checkpoint.plan.layers if n.endswith(("q_proj", "k_proj", "v_proj"))][:3]
parts = [checkpoint.layer(name) for name in names]
k = parts[0].weight.data.shape[1]
method = marlin.ModelOptFp8LinearMethod()
assert method.use_marlin
layer = torch.nn.Module()
method.create_weights(layer, k, [len(p.weight.data) for p in parts])
layer.weight.data.copy_(torch.cat([p.weight.codes for p in parts]).view(torch.float8_e4m3fn))
layer.weight_scale.data.copy_(torch.stack([p.weight.scale for p in parts]))
layer.input_scale.data.copy_(torch.stack([p.input_scale for p in parts]))
method.process_weights_after_loading(layer)
values = torch.cat([reference.dequantize(p.weight) for p in parts]).double()
torch.manual_seed(0)
for m in (1, 3, 5, 16):
    x = torch.randn(m, k).bfloat16()
    y = method.apply(layer, x).double()
    want = x.double() @ values.T
    assert (y - want).norm() / want.norm() < 2**-8, m
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is on Linux only")
def test_a_modelopt_layer_runs_on_an_a100s_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    from pathlib import Path

    data = Path(__file__).parent.parent / "data" / "checkpoints" / "modelopt-fp8"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(data)],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
