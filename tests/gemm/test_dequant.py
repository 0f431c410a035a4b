"""The dequant backend: exact codes back, right products, and what FP8 units would compute."""

from dataclasses import replace

import pytest
import torch

from anyfp8 import reference
from anyfp8.device import CPU
from anyfp8.gemm.base import canonical_weight
from anyfp8.gemm.dequant import BACKEND, DenseWeight, DequantConfig
from anyfp8.problem import DTYPE_NAMES, Problem, QTensor, Scheme

SCHEMES = (
    Scheme("tensor", "tensor", True),
    Scheme("channel", "token", True),
    Scheme("block", "group", True, block=(128, 128), group=128),
    Scheme("block", block=(32, 64)),
)


def weight(scheme, n, k, seed=0):
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(n, k, generator=g) * torch.exp(torch.randn(n, 1, generator=g))
    return reference.quantize_weight(w, scheme)


def all_codes(scheme, n, k):
    """Every finite code in every scale's reach, scales from tiny to large."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]
    data = codes.repeat(n * k // 254 + 1)[: n * k].view(n, k)
    shape = scheme.weight_scale_shape(n, k)
    scale = torch.logspace(-12, 2, max(1, torch.Size(shape).numel())).reshape(shape)
    return QTensor(data.view(torch.float8_e4m3fn), scale, scheme.block)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
@pytest.mark.parametrize("x_dtype", ["bf16", "fp16", "fp32"])
def test_canonical_gives_every_code_back(scheme, x_dtype):
    q = all_codes(scheme, 96, 508)
    back = BACKEND.prepare(q, scheme, x_dtype).canonical()
    assert torch.equal(back.codes, q.codes)
    assert torch.equal(back.scale, q.scale)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
def test_a_bf16_copy_replaces_the_codes(scheme):
    prepared = BACKEND.prepare(weight(scheme, 40, 300), scheme, "bf16")
    assert isinstance(prepared, DenseWeight)
    assert prepared.codes is None
    assert prepared.nbytes <= 2 * 40 * 300 + 4 * 40


def test_codes_that_do_not_come_back_are_kept():
    # fp16 cannot hold 2^-9 * 1e-8
    q = QTensor(torch.full((1, 4), 1, dtype=torch.uint8), torch.tensor(1e-8))
    prepared = BACKEND.prepare(q, Scheme(), "fp16")
    assert isinstance(prepared, DenseWeight)
    assert prepared.codes is not None
    assert torch.equal(prepared.canonical().codes, q.codes)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
@pytest.mark.parametrize("memory", ["load", "per_call"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("m", "n", "k"), [(0, 5, 7), (1, 33, 33), (17, 80, 320), (3, 1, 1)])
def test_product_is_torchs_on_the_dequantized_weight(scheme, memory, dtype, m, n, k):
    q = weight(scheme, n, k)
    x, bias = torch.randn(m, k).to(dtype), torch.randn(n).to(dtype)
    problem = Problem("linear", scheme, m, n, k, DTYPE_NAMES[dtype], DTYPE_NAMES[dtype], True)
    prepared = BACKEND.prepare(q, scheme, problem.x_dtype)
    y = BACKEND.run(x, prepared, problem, DequantConfig(memory), bias)
    want = x.double() @ reference.dequantize(q, dtype).double().T + bias.double()
    torch.testing.assert_close(y, want.to(dtype), rtol=2**-7, atol=2**-8 * k**0.5)


def test_per_call_in_chunks_equals_one_piece(monkeypatch):
    scheme = SCHEMES[2]
    q = weight(scheme, 400, 256)
    x = torch.randn(3, 256)
    problem = Problem("linear", scheme, 3, 400, 256, "fp32", "fp32")
    monkeypatch.setattr("anyfp8.gemm.dequant._CHUNK_BYTES", 4 * 256 * 130)
    y = BACKEND.run(
        x,
        canonical_weight(q, scheme),
        problem,
        DequantConfig("per_call"),
    )
    torch.testing.assert_close(y, x @ reference.dequantize(q).T)


@pytest.mark.parametrize("scheme", SCHEMES[:3], ids=lambda s: s.name)
def test_quantized_activations_are_multiplied_as_the_reference_does(scheme):
    q, x = weight(scheme, 96, 384), torch.randn(5, 384).bfloat16()
    bias = torch.randn(96)
    problem = Problem("linear", scheme, 5, 96, 384, "bf16", "fp32", bias=True)
    y = BACKEND.run(
        reference.quantize_activation(x, scheme),
        BACKEND.prepare(q, scheme, "bf16"),
        problem,
        DequantConfig(),
        bias,
    )
    want = reference.linear(x, q, scheme, bias=bias, out_dtype=torch.float64)
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-3)
    weight_only = reference.linear(x, q, scheme.weight_only, bias=bias, out_dtype=torch.float64)
    assert (y - weight_only).abs().max() > 10 * (y - want).abs().max()


def test_row_by_row_gives_a_row_the_same_bits_in_any_batch():
    scheme = SCHEMES[1]
    q, x = weight(scheme, 130, 512), torch.randn(65, 512).bfloat16()
    prepared = BACKEND.prepare(q, scheme, "bf16")
    problem = Problem("linear", scheme, 65, 130, 512)
    config = DequantConfig(row_by_row=True)
    full = BACKEND.run(x, prepared, problem, config)
    for m in (1, 2, 17):
        part = BACKEND.run(x[:m], prepared, replace(problem, m=m), config)
        assert torch.equal(part, full[:m])


def test_out_is_filled_and_returned():
    scheme = SCHEMES[0]
    q, x = weight(scheme, 8, 16), torch.randn(2, 16).bfloat16()
    out = torch.full((2, 8), float("nan"), dtype=torch.bfloat16)
    problem = Problem("linear", scheme, 2, 8, 16)
    y = BACKEND.run(x, BACKEND.prepare(q, scheme, "bf16"), problem, DequantConfig(), out=out)
    assert y is out
    assert not out.isnan().any()


def test_it_is_willing_on_the_cpu():
    assert BACKEND.why_not(Problem("linear", SCHEMES[0], 1, 1, 1), CPU) is None
