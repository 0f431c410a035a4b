"""The rule for products: it contains the weight's rounding, and refuses sums that 16 bits lost."""

from dataclasses import replace

import pytest
import torch

from anyfp8 import testing_gemm
from anyfp8.device import CPU
from anyfp8.gemm.dequant import BACKEND, Dequant, DequantConfig
from anyfp8.problem import Scheme

BF16 = torch.bfloat16
SHAPES = [(65, 256, 12288), (33, 128, 28672)]


@pytest.fixture(params=SHAPES, ids="{0[0]}x{0[1]}x{0[2]}".format)
def case(request):
    layer = testing_gemm.random_layer(Scheme("channel"), *request.param)
    problem = testing_gemm.problem_of(layer, BF16, False)
    return layer, testing_gemm.oracle(layer, False, False, BF16), problem


def rms(error):
    return error.square().mean().sqrt().item()


def test_a_weight_rounded_to_bf16_errs_as_the_rule_assumes_without_an_allowance(case):
    layer, wanted, problem = case
    weight = testing_gemm.canonical_weight(layer.weight, problem.scheme)
    y = BACKEND.run(layer.x, weight, problem, DequantConfig("per_call"))
    error = rms(y.double() - wanted.exact)
    assert 0.95 * wanted.rms_error < error < 1.05 * wanted.rms_error
    # the output's rounding and the weight's, independent of each other
    w = testing_gemm.reference.dequantize(layer.weight).double()
    output = rms(wanted.exact.to(BF16).double() - wanted.exact)
    rounded = rms(layer.x.double() @ (w.to(BF16).double() - w).T)
    assert error == pytest.approx((output**2 + rounded**2) ** 0.5, rel=0.05)
    assert testing_gemm.allowance(BACKEND, problem, CPU) == 0


class SumsIn16Bits(Dequant):
    """What a library may do that splits K: parts are rounded to bf16 and so is their sum."""

    parts = 1

    def run(self, x, prepared, problem, config, bias=None, out=None):
        w = testing_gemm.reference.dequantize(prepared.canonical()).to(x.dtype).float()
        total = torch.zeros(len(x), len(w), dtype=x.dtype)
        for at in torch.arange(w.shape[1]).tensor_split(self.parts):
            total += (x[:, at].float() @ w[:, at].T).to(x.dtype)
        return out.copy_(total)


@pytest.mark.parametrize(("parts", "refused"), [(1, False), (32, True)])
def test_parts_of_k_that_are_added_in_bf16_are_refused(case, parts, refused):
    layer, wanted, problem = case
    backend = SumsIn16Bits()
    backend.parts = parts
    found = testing_gemm.check(backend, layer, wanted, replace(problem, m=1), CPU)
    assert (found is not None and "rms error" in found) == refused


@pytest.mark.parametrize(
    "scheme",
    [
        Scheme("channel"),
        Scheme("channel", "token", True),
        Scheme("tensor", "tensor", True),
        Scheme("block", "group", True, block=(32, 16), group=16),
    ],
    ids=lambda s: s.name,
)
@pytest.mark.parametrize("quantized", [False, True])
def test_a_layer_and_its_products_are_the_same_made_in_parts(monkeypatch, scheme, quantized):
    def made():
        layer = testing_gemm.random_layer(scheme, 50, 150, 72)
        plain = testing_gemm.oracle(layer, quantized, False, BF16, (1, 16))
        biased = testing_gemm.oracle(layer, quantized, True, BF16, (1, 16), plain.product)
        problem = replace(testing_gemm.problem_of(layer, BF16, True), m=16)
        weak = replace(biased, rms_error=0.0, worst_error=0.0, batches={})
        said = testing_gemm.check(SumsIn16Bits(), layer, weak, problem, CPU)
        return layer, plain, biased, said

    monkeypatch.setattr(testing_gemm, "_PART", 1 << 40)
    whole, *wanted, said = made()
    monkeypatch.setattr(testing_gemm, "_PART", 1000)
    parts, *found, again = made()
    assert torch.equal(parts.x, whole.x)
    assert torch.equal(parts.bias, whole.bias)
    for one, other in ((parts.weight, whole.weight), (parts.q, whole.q)):
        if other is not None:
            assert torch.equal(one.codes, other.codes)
            assert torch.equal(one.scale, other.scale)
            assert one.block == other.block
    x = whole.x if not quantized or whole.q is None else testing_gemm.reference.dequantize(whole.q)
    exact = x.double() @ testing_gemm.reference.dequantize(whole.weight).double().T
    for one, other, bias in zip(found, wanted, (0, whole.bias.double()), strict=True):
        torch.testing.assert_close(one.exact, exact + bias, rtol=1e-12, atol=1e-12)
        assert one.errors(50) == pytest.approx(other.errors(50), rel=1e-3)
        assert one.errors(16) == pytest.approx(other.errors(16), rel=1e-3)
    assert found[1].product is found[0].product
    assert said == again
    assert "rms error" in said
