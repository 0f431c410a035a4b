"""Selection on a laptop: which backend serves which GPU, why not the others, and in which order."""

from dataclasses import replace

import pytest
import torch

from anyfp8 import gemm
from anyfp8.device import ARCHES, CATALOGUE, CPU, find_device, generic_device
from anyfp8.errors import InputError, NoBackend
from anyfp8.gemm.base import Backend
from anyfp8.problem import Problem, Scheme
from anyfp8.select import M_GRID, Request, plan, select

ROW = Scheme("channel", "token", True)
STATIC = Scheme("tensor", "tensor")
BLOCK = Scheme("block", "group", True, block=(128, 128), group=128)
SCHEMES = (ROW, STATIC, BLOCK, Scheme("channel"))
H200, L40S = find_device("NVIDIA H200"), find_device("NVIDIA L40S")
A100 = find_device("NVIDIA A100-SXM4-80GB")


def problem(scheme=ROW, m=16, n=4096, k=4096, **more):
    return Problem("linear", scheme, m, n, k, **more)


@pytest.fixture
def fake(monkeypatch):
    """Put another backend in front of ours."""

    def install(backend):
        every = (backend, *gemm.BACKENDS)
        monkeypatch.setattr(gemm, "backends", lambda: every)
        return backend

    return install


class Fast(Backend):
    name, kind = "fast_one", "w8a8"

    def why_not(self, problem, device):
        return "needs N divisible by 128" if problem.n % 128 else None


@pytest.mark.parametrize("name", ARCHES)
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
def test_every_architecture_gets_a_backend_that_can_run_and_true_reasons(name, scheme):
    device = generic_device(ARCHES[name])
    choice = select(problem(scheme), device)
    backend = gemm.backend(choice.backend)
    asked = problem(scheme, accumulate=choice.accumulate)
    assert backend.why_not(asked, device) is None
    assert backend.illegal(choice.config, asked, device) is None
    quantizes = scheme.activation != "none" and device.has_fp8
    assert choice.quantizes == quantizes
    assert choice.numerics == ("scheme" if device.has_fp8 else "at_least")
    for refused, why in choice.refused:
        assert refused != choice.backend
        assert "ANYFP8" not in why
        if gemm.backend(refused).kind == "w8a8" and not quantizes:
            assert device.name in why or "quantize" in why


@pytest.mark.parametrize(
    ("arch", "scheme", "want"),
    [
        ("sm_75", ROW, "dequant"),
        ("sm_80", ROW, "triton_w8a16"),
        ("sm_86", BLOCK, "triton_w8a16"),
        ("sm_87", STATIC, "triton_w8a16"),
        ("sm_89", ROW, "torch_scaled_mm"),
        ("sm_89", BLOCK, "triton_block"),
        ("sm_90", BLOCK, "torch_scaled_mm"),
        ("sm_100", BLOCK, "triton_block"),
        ("sm_120", ROW, "triton_row"),
        ("sm_120", STATIC, "torch_scaled_mm"),
        ("sm_121", BLOCK, "triton_block"),
        ("gfx90a", ROW, "triton_w8a16"),
        ("gfx942", ROW, "triton_row"),
        ("gfx1100", BLOCK, "triton_w8a16"),
        ("gfx1201", BLOCK, "triton_block"),
        ("cpu", ROW, "dequant"),
    ],
)
def test_default_path_by_architecture(arch, scheme, want):
    device = generic_device(ARCHES[arch])
    assert select(problem(scheme), device, Request(tune=False)).backend == want


@pytest.mark.parametrize("device", CATALOGUE.values(), ids=lambda d: d.name.replace(" ", "_"))
def test_every_known_gpu_has_a_plan_for_every_m(device):
    for scheme in (ROW, BLOCK):
        found = plan(scheme, 2112, 7168, device, ms=(1, 17, 512, 4096))
        for m in (1, 17, 512, 4096):
            choice = found.choice(m)
            backend = gemm.backend(choice.backend)
            assert backend.can_read(found.layout)
            at = found.problem_at(m)
            assert backend.why_not(at, device) is None
            assert backend.illegal(choice.config, at, device) is None


@pytest.mark.parametrize("n", [33, 80, 1, 4096])
@pytest.mark.parametrize("k", [33, 576, 4096])
def test_shapes_that_a_library_refuses_go_to_triton(n, k):
    choice = select(problem(n=n, k=k), H200, Request(tune=False))
    assert choice.backend == ("triton_row" if n % 16 or k % 16 else "torch_scaled_mm")
    if n % 16 or k % 16:
        assert f"N={n}, K={k}" in dict(choice.refused)["torch_scaled_mm"]


def test_a_failed_probe_removes_a_backend_and_its_reason_is_kept():
    def probe(backend, problem):
        return "failed its trial" if backend.name == "torch_scaled_mm" else None

    choice = select(problem(), H200, Request(tune=False), probe=probe)
    assert choice.backend == "triton_row"
    assert ("torch_scaled_mm", "failed its trial") in choice.refused


def test_the_callers_argument_comes_before_the_environment(monkeypatch):
    monkeypatch.setenv("ANYFP8_BACKEND", "triton_row")
    by_environment = plan(ROW, 4096, 4096, H200, ms=(1,))
    assert by_environment.choice(1).source == "environment"
    assert by_environment.choice(1).backend == "triton_row"
    by_argument = plan(ROW, 4096, 4096, H200, request=Request("dequant"), ms=(1,))
    assert (by_argument.choice(1).source, by_argument.choice(1).backend) == ("argument", "dequant")


def test_an_unknown_backend_is_an_error_that_lists_those_there_are():
    with pytest.raises(InputError, match="no such backend") as caught:
        select(problem(), H200, Request("nosuch"))
    assert "triton_row" in str(caught.value)


def test_a_forced_backend_that_is_not_installed_is_an_error(fake):
    class Missing(Fast):
        def missing(self):
            return "needs the package fast-one, which is not installed"

    fake(Missing())
    gemm_backend = gemm.backend("fast_one")
    assert gemm_backend.missing()
    with pytest.raises(NoBackend, match="fast-one") as caught:
        select(problem(), H200, Request("fast_one"))
    assert "fast_one" in caught.value.reasons


def test_a_forced_backend_that_cannot_serve_one_layer_falls_back_there_only(fake, caplog):
    fake(Fast())
    assert select(problem(n=4096), H200, Request("fast_one")).backend == "fast_one"
    choice = select(problem(n=80), H200, Request("fast_one", tune=False))
    assert choice.backend == "torch_scaled_mm"
    assert ("fast_one", "needs N divisible by 128") in choice.refused
    assert "fast_one is not used" in caplog.text
    with pytest.raises(NoBackend, match="divisible by 128"):
        select(problem(n=80), H200, Request("fast_one", strict=True))


def test_weight_only_when_forced(monkeypatch):
    monkeypatch.setenv("SGLANG_FORCE_FP8_MARLIN", "1")
    found = plan(STATIC, 4096, 4096, H200)
    assert {c.backend for _, c in found.choices} == {"triton_w8a16"}
    assert not any(c.quantizes for _, c in found.choices)
    assert "weight-only was asked for" in dict(found.choice(1).refused)["triton_row"]


def test_at_least_admits_weight_only_to_the_ranking_and_scheme_does_not():
    strict = plan(ROW, 4096, 4096, H200, request=Request(numerics="scheme"))
    assert all(c.quantizes for _, c in strict.choices)
    loose = plan(ROW, 4096, 4096, H200, request=Request(numerics="at_least"))
    assert loose.choice(1).numerics == "at_least"
    assert not loose.choice(1).quantizes


def test_auto_accumulates_fast_up_to_k_16384_and_is_promoted_above():
    assert select(problem(k=16384), H200).accumulate == "fast"
    assert select(problem(k=16385), H200).accumulate == "fp32_128"
    assert select(problem(), A100).accumulate == "fp32_128"
    choice = select(problem(k=65536), H200, Request("triton_row"))
    assert choice.config.block_k <= 128


def test_one_configuration_serves_every_m_when_results_must_not_depend_on_the_batch():
    found = plan(ROW, 4096, 4096, H200, request=Request(batch_invariant=True), ms=M_GRID)
    assert len({(c.backend, c.config) for _, c in found.choices}) == 1
    assert found.choice(4097).config == found.choice(1).config
    assert gemm.backend(found.choice(1).backend).batch_invariant


def test_dynamic_per_tensor_scales_are_refused_when_batch_invariance_is_asked_for():
    dynamic = Scheme("tensor", "tensor", True)
    with pytest.raises(NoBackend, match="whole batch"):
        plan(dynamic, 64, 64, H200, request=Request(batch_invariant=True))
    assert plan(dynamic, 64, 64, A100, request=Request(batch_invariant=True)).choice(1)


def test_the_cpu_is_weight_only_unless_it_emulates():
    choice = plan(ROW, 64, 64, CPU).choice(3)
    assert (choice.backend, choice.quantizes, choice.numerics) == ("dequant", False, "at_least")
    emulated = plan(ROW, 64, 64, CPU, request=Request(emulate=True)).choice(3)
    assert (emulated.backend, emulated.quantizes, emulated.numerics) == ("dequant", True, "scheme")


def test_one_layout_serves_every_m_of_a_layer():
    for device in (H200, L40S, A100, CPU):
        found = plan(ROW, 6144, 4096, device)
        assert all(gemm.backend(c.backend).can_read(found.layout) for _, c in found.choices)
    assert plan(ROW, 64, 64, CPU).layout == "dense"
    assert plan(ROW, 64, 64, CPU, request=Request(memory="per_call")).layout == "canonical"


def test_a_plan_says_what_each_m_runs():
    text = plan(ROW, 6144, 4096, L40S).describe()
    assert "M=1: triton_row block_m=16 block_n=32 block_k=1024" in text
    assert "shipped table" in text


def test_a_choice_runs():
    from anyfp8 import reference

    scheme = replace(ROW)
    found = plan(scheme, 24, 40, CPU, bias=True)
    q = reference.quantize_weight(torch.randn(24, 40), scheme)
    x, bias = torch.randn(5, 40).bfloat16(), torch.randn(24).bfloat16()
    y = found.run(x, found.prepare(q), bias)
    want = reference.linear(x, q, scheme.weight_only, bias=bias)
    torch.testing.assert_close(y, want, rtol=2**-6, atol=2**-6)
