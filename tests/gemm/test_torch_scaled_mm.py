"""torch_scaled_mm: shapes for which the library finds no kernel are multiplied by a detour."""

from dataclasses import replace

import pytest
import torch

from anyfp8 import reference, testing_gemm
from anyfp8.gemm import torch_scaled_mm
from anyfp8.gemm.base import Config
from anyfp8.gemm.torch_scaled_mm import TorchScaledMM
from anyfp8.problem import Problem, Scheme

ROW = Scheme("channel", "token", True)
M, N, K = 5, 48, 64
UNSUPPORTED = (
    "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmulAlgoGetHeuristic`"
)


@pytest.fixture
def library(monkeypatch):
    """A library that has no kernel for what `refuses` says, and the calls made to it."""

    def install(refuses, message=UNSUPPORTED):
        calls = []

        def multiply(x, w, sx, sw, recipe, bias, out_dtype, fast):
            calls.append((bias is not None, fast))
            if refuses(bias is not None, fast):
                raise RuntimeError(message)
            y = (x.float() @ w.float()) * sx * sw
            return (y if bias is None else y + bias.float()).to(out_dtype)

        monkeypatch.setattr(torch_scaled_mm, "_multiply", multiply)
        return calls

    return install


def run(backend, layer, bias=True):
    problem = Problem("gemm", ROW, M, N, K, bias=bias, accumulate="fast")
    prepared = backend.prepare(layer.weight, ROW, "bf16")
    return backend.run(layer.q, prepared, problem, Config(), layer.bias if bias else None)


@pytest.mark.parametrize(
    ("refuses", "tried"),
    [
        (lambda bias, fast: bias and fast, [(True, True), (False, True)]),
        (lambda bias, fast: fast, [(True, True), (False, True), (True, False)]),
    ],
    ids=["bias", "fast"],
)
def test_a_call_without_a_kernel_is_made_another_way_and_that_is_remembered(
    library, refuses, tried
):
    calls = library(refuses)
    layer, backend = testing_gemm.random_layer(ROW, M, N, K), TorchScaledMM()
    x, w = reference.dequantize(layer.q).double(), reference.dequantize(layer.weight).double()
    want = x @ w.T + layer.bias.double()
    y = run(backend, layer)
    assert calls == tried
    assert (y.double() - want).norm() < 0.01 * want.norm()
    assert torch.equal(run(backend, layer), y)
    assert calls == [*tried, tried[-1]]


@pytest.mark.parametrize(("before", "gap"), [(0, 16), (0, 3), (5, 16), (16, 0)])
def test_rows_are_handed_over_16_bytes_aligned_with_their_gaps_if_they_can_be(
    monkeypatch, before, gap
):
    def multiply(x, w, sx, sw, recipe, bias, out_dtype, fast):
        assert (x.stride(0) % 16, x.stride(1), x.data_ptr() % 16) == (0, 1, 0)
        assert bias.is_contiguous()
        given.append(x)
        return ((x.float() @ w.float()) * sx * sw + bias.float()).to(out_dtype)

    given = []
    monkeypatch.setattr(torch_scaled_mm, "_multiply", multiply)
    layer = testing_gemm.random_layer(ROW, M, N, K)
    wide = torch.full((M, before + K + gap), 0x7F, dtype=torch.uint8)
    inside = wide[:, before : before + K]
    inside.copy_(layer.q.codes)
    q = replace(layer.q, data=inside.view(torch.float8_e4m3fn))
    bias = torch.stack([layer.bias, layer.bias * float("nan")], 1)[:, 0]
    y = run(TorchScaledMM(), replace(layer, q=q, bias=bias))
    assert torch.equal(y, run(TorchScaledMM(), layer))
    copied = given[0].data_ptr() != inside.data_ptr()
    assert copied == (before % 16 != 0 or (before + gap) % 16 != 0)


def test_a_call_that_no_way_serves_raises_what_the_library_said(library):
    calls = library(lambda bias, fast: True)
    layer = testing_gemm.random_layer(ROW, M, N, K)
    with pytest.raises(RuntimeError, match="NOT_SUPPORTED"):
        run(TorchScaledMM(), layer, bias=False)
    assert calls == [(False, True), (False, False)]


def test_other_errors_are_not_taken_for_a_missing_kernel(library):
    calls = library(lambda bias, fast: True, "CUDA error: an illegal memory access")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run(TorchScaledMM(), testing_gemm.random_layer(ROW, M, N, K))
    assert calls == [(True, True)]


def test_torchs_own_error_in_a_small_batch_is_part_of_what_is_allowed():
    layer = testing_gemm.random_layer(Scheme("channel"), 64, 32, 512, torch.float16)
    exact = testing_gemm.oracle(layer, False, True, torch.float16, batches=(1, 16, 64))
    w = reference.dequantize(layer.weight)
    y = torch.nn.functional.linear(layer.x[:16], w.half()).float() + layer.bias.float()
    rms = (y.half().double() - exact.exact[:16]).square().mean().sqrt().item()
    assert set(exact.batches) == {1, 16}
    assert exact.batches[16][0] == pytest.approx(rms, rel=1e-6)
    assert exact.errors(16)[0] >= exact.rms_error
