"""triton_scaled_mm and apply_fp8_linear: products, which table is asked, what is refused."""

import inspect
from dataclasses import replace

import pytest
import torch

from anyfp8 import reference, testing_gemm
from anyfp8.device import CPU, find_device
from anyfp8.errors import InputError
from anyfp8.integrations import sglang, sglang_linear, sglang_tables
from anyfp8.problem import QTensor, Scheme

ROW = Scheme("channel", "token", True)
M, N, K = 5, 48, 64


@pytest.fixture
def layer():
    return testing_gemm.random_layer(ROW, M, N, K)


def product(x, weight, bias=None):
    """In fp64, on the dequantized operands."""
    x = reference.dequantize(x) if isinstance(x, QTensor) else x
    y = x.double() @ reference.dequantize(weight).double().T
    return y if bias is None else y + bias.double()


def close(y, want):
    return (y.double() - want).norm() < 0.004 * want.norm()


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        (
            "triton_scaled_mm",
            "input weight scale_a scale_b out_dtype bias=None block_size_m=32 block_size_n=32 "
            "block_size_k=32 use_heuristic=True num_warps=None num_stages=None",
        ),
        (
            "apply_fp8_linear",
            "input weight weight_scale input_scale=None input_scale_ub=None bias=None "
            "cutlass_fp8_supported=None use_per_token_if_dynamic=False pad_output=None "
            "compressed_tensor_quant=False pre_quant_output_dtype=None",
        ),
        ("get_w8a8_channelwise_fp8_configs", "N K"),
        ("get_w8a8_channelwise_fp8_config", "N K M"),
        ("get_w8a8_block_fp8_configs", "N K block_n block_k"),
    ],
)
def test_arguments_are_named_as_in_sglang(name, parameters):
    found = inspect.signature(getattr(sglang, name)).parameters.values()
    empty = inspect.Parameter.empty
    told = [p.name if p.default is empty else f"{p.name}={p.default}" for p in found]
    assert told == parameters.split()


def test_lookups_are_those_of_the_tables():
    assert sglang.get_w8a8_channelwise_fp8_config is sglang_tables.get_w8a8_channelwise_fp8_config


@pytest.mark.parametrize("heuristic", [True, False])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [True, False], ids=["column", "flat"])
def test_the_product_of_quantized_operands(layer, heuristic, out_dtype, columns):
    q, weight, bias = layer.q, layer.weight, layer.bias.to(out_dtype)
    sx, sw = (q.scale, weight.scale) if columns else (q.scale.flatten(), weight.scale.flatten())
    y = sglang.triton_scaled_mm(
        q.data, weight.data.t(), sx, sw, out_dtype, bias, 16, 16, 32, heuristic, 2, 2
    )
    assert y.shape == (M, N)
    assert y.dtype == out_dtype
    assert close(y, product(q, weight, bias))


def test_one_scale_serves_a_whole_operand(layer):
    q, weight = layer.q, layer.weight
    a, b = torch.tensor([0.5]), torch.tensor(0.25)
    y = sglang.triton_scaled_mm(q.data, weight.data.t(), a, b, torch.bfloat16)
    assert close(y, product(QTensor(q.data, a.reshape(())), QTensor(weight.data, b)))


def test_operands_that_do_not_fit_are_refused(layer):
    q, w = layer.q, layer.weight.data.t()
    with pytest.raises(InputError, match="do not fit each other"):
        sglang.triton_scaled_mm(q.data, w[1:], q.scale, layer.weight.scale, torch.bfloat16)
    with pytest.raises(InputError, match="scales do not fit"):
        sglang.triton_scaled_mm(q.data, w, q.scale[1:], layer.weight.scale, torch.bfloat16)


def test_a_tile_that_the_gpu_cannot_run_is_refused(layer, monkeypatch):
    monkeypatch.setattr(sglang_linear, "device_of", lambda _: find_device("NVIDIA H200"))
    operands = layer.q.data, layer.weight.data.t(), layer.q.scale, layer.weight.scale
    with pytest.raises(InputError, match="shared memory"):
        sglang.triton_scaled_mm(*operands, torch.bfloat16, None, 128, 256, 512, False, 8, 6)


@pytest.mark.parametrize("shape", [(M, K), (1, M, K), (0, K)], ids=str)
def test_activations_stay_in_16_bits_where_there_are_no_fp8_units(layer, shape):
    x = layer.x[: shape[0]] if len(shape) == 2 else layer.x[None]
    weight = layer.weight
    for scale in (weight.scale, weight.scale.flatten()):
        y = sglang.apply_fp8_linear(x, weight.data.t(), scale, bias=layer.bias)
        assert y.shape == (*shape[:-1], N)
        assert y.dtype == x.dtype
        want = product(x.reshape(-1, K), weight, layer.bias)
        assert close(y.reshape(-1, N), want) or not y.numel()


@pytest.mark.parametrize("per_token", [True, False])
def test_quantized_activations_are_multiplied_as_they_come(layer, per_token):
    q = layer.q if per_token else reference.quantize_per_tensor(layer.x)
    scale = q.scale if per_token else q.scale.reshape(1)
    w, sw = layer.weight.data.t(), layer.weight.scale
    y = sglang.apply_fp8_linear(q.data, w, sw, scale, bias=layer.bias)
    assert y.dtype == torch.bfloat16
    assert close(y, product(q, layer.weight, layer.bias))
    half = sglang.apply_fp8_linear(q.data, w, sw, scale, pre_quant_output_dtype=torch.float16)
    assert half.dtype == torch.float16
    with pytest.raises(InputError, match="without their scales"):
        sglang.apply_fp8_linear(q.data, w, sw)


@pytest.fixture
def asked(monkeypatch):
    """What plans are asked for; each is made for the CPU, where they can run."""
    calls = []

    def plan_for(scheme, n, k, device, dtype, bias, request, ms):
        calls.append((scheme, request))
        return real(scheme, n, k, CPU, dtype, bias, replace(request, emulate=True), ms)

    real = sglang_linear.plan_for
    monkeypatch.setattr(sglang_linear, "plan_for", plan_for)
    sglang_linear._plan.cache_clear()
    yield calls
    sglang_linear._plan.cache_clear()


@pytest.mark.parametrize(
    ("n", "k", "per_channel", "supported", "tuned"),
    [
        (48, 64, True, True, True),
        (48, 64, True, False, False),
        (48, 64, True, None, False),
        (48, 64, False, True, False),
        (40, 64, True, True, False),
        (48, 72, True, True, False),
    ],
)
def test_tables_are_asked_only_where_sglang_would_have_gone_to_cutlass(
    asked, n, k, per_channel, supported, tuned
):
    layer = testing_gemm.random_layer(Scheme("channel" if per_channel else "tensor"), M, n, k)
    w, sw = layer.weight.data.t(), layer.weight.scale
    for _ in range(2):
        sglang.apply_fp8_linear(layer.x, w, sw, cutlass_fp8_supported=supported)
    ((scheme, request),) = asked
    assert request.tune is (None if tuned else False)
    assert scheme.weight == ("channel" if per_channel else "tensor")


@pytest.mark.parametrize(
    ("options", "activation", "dynamic"),
    [
        ({}, "token", True),
        ({"compressed_tensor_quant": True}, "tensor", True),
        (
            {"compressed_tensor_quant": True, "use_per_token_if_dynamic": True},
            "token",
            True,
        ),
        ({"input_scale": torch.tensor([0.02])}, "tensor", False),
    ],
    ids=["default", "tensor", "token", "static"],
)
def test_activations_are_quantized_as_the_caller_says(asked, layer, options, activation, dynamic):
    y = sglang.apply_fp8_linear(layer.x, layer.weight.data.t(), layer.weight.scale, **options)
    ((scheme, _),) = asked
    assert (scheme.activation, scheme.dynamic) == (activation, dynamic)
    q = {
        "token": reference.quantize_per_token,
        "tensor": reference.quantize_per_tensor,
    }[activation](layer.x, *(v for v in options.values() if isinstance(v, torch.Tensor)))
    assert close(y, product(q, layer.weight))


def test_another_environment_is_another_plan(asked, layer, monkeypatch):
    w, sw = layer.weight.data.t(), layer.weight.scale
    sglang.apply_fp8_linear(layer.x, w, sw)
    monkeypatch.setenv("ANYFP8_ENABLE_FP8_GEMM_CONFIG_TUNE", "0")
    sglang.apply_fp8_linear(layer.x, w, sw)
    assert len(asked) == 2
