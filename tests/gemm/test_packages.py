"""Backends of other packages: arguments as the packages want them, trials that hang, codes back."""

import json
import sys
import types

import pytest
import torch

from anyfp8 import gemm, reference, testing_gemm
from anyfp8.device import ARCHES, CPU, find_device, generic_device
from anyfp8.gemm import marlin, packages, probe
from anyfp8.problem import Problem, QTensor, Scheme
from anyfp8.select import Request, plan, select

ROW = Scheme("channel", "token", True)
BLOCK = Scheme("block", "group", True, block=(128, 128), group=128)
H200, A100 = find_device("NVIDIA H200"), find_device("NVIDIA A100-SXM4-80GB")


@pytest.fixture
def install(monkeypatch):
    """Pretend that a package is installed: install("a.b", function, …) makes module a.b."""

    def add(name, *functions):
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            path = ".".join(parts[:i])
            if path not in sys.modules:
                monkeypatch.setitem(sys.modules, path, types.ModuleType(path))
        for function in functions:
            setattr(sys.modules[name], function.__name__, function)
        there = parts[0]
        monkeypatch.setattr(packages, "find_spec", lambda module: module == there or None)
        packages.installed.cache_clear()

    yield add
    monkeypatch.undo()
    packages.installed.cache_clear()


def seen(tensor, transposed=False):
    """What a kernel reads that goes by address and shape and never asks for a stride."""
    if tensor is None:
        return None
    assert tensor.data_ptr() % 16 == 0
    rows, columns = tensor.shape if tensor.ndim == 2 else (1, len(tensor))
    strides = (1, rows) if transposed else (columns, 1)
    return tensor.as_strided(tensor.shape, strides[-tensor.ndim :])


def scattered(tensor):
    """The same values in rows with NaN between them, from an address that is no multiple of 16."""
    wide = tensor if tensor.ndim == 2 else tensor[:, None]
    inside = testing_gemm.poisoned(torch.nn.functional.pad(wide, (1, 0)))[:, 1:]
    return inside if tensor.ndim == 2 else inside[:, 0]


def operands(layer, quantized):
    """(x, bias) of a layer: as they are, with gaps, and with gaps that keep rows aligned."""
    q, x = layer.q, layer.x
    if quantized:
        single = q.scale.ndim == 0
        yield q, layer.bias
        for apart in (scattered, testing_gemm.poisoned):
            codes = apart(q.codes).view(q.data.dtype)
            scale = q.scale if single else apart(q.scale)
            yield QTensor(codes, scale, q.block), scattered(layer.bias)
    else:
        yield from ((x, layer.bias), (scattered(x), scattered(layer.bias)))
        yield testing_gemm.poisoned(x), layer.bias


def product(a, b, sa, sb, bias=None):
    y = (a.float() * sa) @ (b.float() * sb)
    return y if bias is None else y + bias.float()


def run_both(backend, scheme, m=17, n=128, k=256, **more):
    layer = testing_gemm.random_layer(scheme, m, n, k)
    problem = testing_gemm.problem_of(layer, torch.bfloat16, True)
    quantized = backend.kind == "w8a8"
    prepared = backend.prepare(layer.weight, scheme, "bf16")
    config = backend.default_config(problem, CPU)
    wanted = testing_gemm.oracle(layer, quantized, True, torch.bfloat16)
    for x, bias in operands(layer, quantized):
        y = backend.run(x, prepared, problem, config, bias)
        torch.testing.assert_close(y.double(), wanted.exact, rtol=2**-7, atol=2**-6)
    return layer, prepared


@pytest.mark.parametrize(
    "scheme", [ROW, Scheme("tensor", "tensor"), Scheme("tensor", "token", True)]
)
def test_cutlass_of_sglang_gets_one_scale_a_row_and_a_column_major_weight(install, scheme):
    def fp8_scaled_mm(mat_a, mat_b, scales_a, scales_b, out_dtype, bias=None):
        assert mat_a.stride(1) == 1
        assert mat_b.stride(0) == 1
        assert scales_a.shape == (mat_a.shape[0], 1)
        assert scales_b.shape == (mat_b.shape[1], 1)
        a, b, sa, sb = seen(mat_a), seen(mat_b, True), seen(scales_a), seen(scales_b)
        return product(a, b, sa, sb.t(), seen(bias)).to(out_dtype)

    install("sgl_kernel", fp8_scaled_mm)
    assert gemm.backend("cutlass").missing() is None
    run_both(gemm.backend("cutlass"), scheme)


def test_cutlass_of_vllm_gets_its_scales_as_a_column_and_a_row(install):
    def cutlass_scaled_mm(a, b, scale_a, scale_b, out_dtype, bias=None):
        assert scale_b.shape == (1, b.shape[1])
        a, b, sa, sb = seen(a), seen(b, True), seen(scale_a), seen(scale_b)
        return product(a, b, sa, sb, seen(bias)).to(out_dtype)

    install("vllm._custom_ops", cutlass_scaled_mm)
    run_both(gemm.backend("cutlass"), ROW)


def test_deep_gemm_gets_column_major_scales_with_columns_16_bytes_apart(install):
    def fp8_gemm_nt(x, w, out):
        (a, sa), (b, sb) = x, w
        assert sa.stride(0) == 1
        assert sa.stride(1) % 4 == 0
        a, b, sb = seen(a), seen(b), seen(sb)
        one, two = sa.repeat_interleave(128, 1), sb.repeat_interleave(128, 0)
        out.copy_((a.float() * one) @ (b.float() * two.repeat_interleave(128, 1)).T)

    install("deep_gemm", fp8_gemm_nt)
    run_both(gemm.backend("deep_gemm"), BLOCK)


@pytest.mark.parametrize("m", [16, 17])
def test_flashinfer_gets_rows_padded_to_four(install, m):
    def gemm_fp8_nt_groupwise(a, b, a_scale, b_scale, scale_major_mode, out_dtype):
        assert scale_major_mode == "K"
        assert a.shape[0] % 4 == 0
        a, b, a_scale, b_scale = seen(a), seen(b), seen(a_scale), seen(b_scale)
        one, two = a_scale.repeat_interleave(128, 1), b_scale.repeat_interleave(128, 0)
        return ((a.float() * one) @ (b.float() * two.repeat_interleave(128, 1)).T).to(out_dtype)

    install("flashinfer.gemm", gemm_fp8_nt_groupwise)
    run_both(gemm.backend("flashinfer"), BLOCK, m)


def shuffling_marlin(n, k):
    order = torch.randperm(n * k)

    def prepare_fp8_layer_for_marlin(layer, size_k_first):
        assert not size_k_first
        assert layer.weight.shape == (n, k)
        codes = layer.weight.view(torch.uint8).reshape(-1)[order]
        layer.weight = torch.nn.Parameter(codes.view(torch.int32), requires_grad=False)
        layer.workspace = torch.zeros(4, dtype=torch.int32)

    def apply_fp8_marlin_linear(input, weight, weight_scale, workspace, size_n, size_k, bias):
        input = seen(input)
        codes = torch.empty(n * k, dtype=torch.uint8)
        codes[order] = weight.view(torch.uint8)
        w = codes.view(torch.float8_e4m3fn).view(size_n, size_k).float()
        if weight_scale.shape != (size_n, 1):
            weight_scale = reference.expand_scale(weight_scale, (128, 128), w.shape)
        return (input.float() @ (w * weight_scale).T).to(input.dtype)

    return prepare_fp8_layer_for_marlin, apply_fp8_marlin_linear


@pytest.mark.parametrize("package", ["vllm", "sglang"])
@pytest.mark.parametrize(
    "scheme", [Scheme("channel"), Scheme("tensor"), BLOCK], ids=lambda s: s.name
)
@pytest.mark.parametrize(("n", "k"), [(128, 256), (80, 320), (192, 200)])
def test_marlin_multiplies_padded_shapes_and_gives_the_codes_back(install, package, scheme, n, k):
    install(marlin._MODULES[package], *shuffling_marlin(-(-n // 64) * 64, -(-k // 128) * 128))
    layer, prepared = run_both(gemm.backend("marlin"), scheme, n=n, k=k)
    assert prepared.layout == "marlin"
    assert prepared.shape == (n, k)
    first = prepared.shuffled.view(torch.uint8)[: n * k]
    assert not torch.equal(first, layer.weight.codes.reshape(-1))
    back = prepared.canonical()
    assert torch.equal(back.codes, layer.weight.codes)
    assert torch.equal(back.scale.reshape(-1), layer.weight.scale.reshape(-1))


def test_marlin_serves_an_a100_where_it_imports_and_its_own_layout_is_kept(install):
    install(marlin._MODULES["vllm"], *shuffling_marlin(128, 256))
    found = plan(ROW, 4096, 4096, A100, request=Request(tune=False))
    assert {choice.backend for _, choice in found.choices} == {"marlin"}
    assert found.layout == "marlin"
    odd = plan(ROW, 80, 33, A100, request=Request(tune=False))
    assert {choice.backend for _, choice in odd.choices} == {"triton_w8a16"}
    assert "N=80, K=33 to 128x128" in dict(odd.choice(1).refused)["marlin"]
    padded = plan(ROW, 8608, 2688, A100, request=Request(tune=False))
    assert {choice.backend for _, choice in padded.choices} == {"marlin"}


def test_a_package_that_is_not_installed_is_named():
    refused = dict(select(Problem("linear", ROW, 1, 4096, 4096), A100).refused)
    assert "vllm or sglang" in refused["marlin"]
    refused = dict(select(Problem("linear", ROW, 1, 4096, 4096), H200).refused)
    assert "sglang-kernel" in refused["cutlass"]


@pytest.mark.parametrize("name", ["sm_100", "sm_103", "sm_110", "sm_120", "sm_121"])
def test_each_package_has_its_own_rule_on_blackwell(install, name):
    device = generic_device(ARCHES[name])
    data_centre = name in ("sm_100", "sm_103")
    install("deep_gemm")
    gates = {
        ("cutlass", ROW): name != "sm_110",
        ("cutlass", BLOCK): False,
        # its kernels for SM100 read packed exponents, which fp32 scales are not
        ("deep_gemm", BLOCK): False,
        ("flashinfer", BLOCK): data_centre,
        ("torch_scaled_mm", BLOCK): False,
        ("torch_scaled_mm", ROW): name not in ("sm_120", "sm_121"),
        ("torch_scaled_mm", Scheme("tensor", "tensor")): True,
    }
    for (backend, scheme), willing in gates.items():
        problem = Problem("gemm", scheme, 64, 4096, 4096, accumulate="fast")
        why = gemm.backend(backend).why_not(problem, device)
        assert (why is None) == willing, f"{backend} {scheme.name}: {why}"
    # generic Triton code is what is always left, and it fits
    for scheme, last in ((ROW, "triton_row"), (BLOCK, "triton_block")):
        for m in (1, 64, 4096):
            problem = Problem("gemm", scheme, m, 4096, 4096, accumulate="fp32_128")
            backend = gemm.backend(last)
            assert backend.why_not(problem, device) is None
            need = backend.smem_bytes(backend.default_config(problem, device), problem, device)
            assert need <= (101_376 if name in ("sm_120", "sm_121") else 232_448)


def test_a_backend_off_the_default_path_waits_for_its_name(install):
    install("deep_gemm")
    problem = Problem("linear", BLOCK, 1, 4096, 4096)
    choice = select(problem, H200)
    assert "names it" in dict(choice.refused)["deep_gemm"]
    assert select(problem, H200, Request("deep_gemm")).backend == "deep_gemm"


@pytest.mark.parametrize(
    ("program", "want"),
    [
        ("import time; time.sleep(60)", "gave no answer within 1 s"),
        ("import os; os.abort()", "broke down in its trial"),
        ("raise OSError('no such kernel image')", "no such kernel image"),
        ("print('noise'); print('{\"why\": \"errs\"}')", "errs"),
    ],
)
def test_a_trial_that_hangs_or_dies_is_a_refusal(program, want):
    assert want in probe.answer_of((sys.executable, "-c", program), 1)


def test_a_trial_runs_in_a_child_and_is_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("ANYFP8_CACHE_DIR", str(tmp_path))
    problem = Problem("linear", Scheme("channel"), 5, 64, 64, accumulate="fp32_128")
    probe._tried.cache_clear()
    assert probe.tried(gemm.backend("dequant"), problem, "torch") is None
    [path] = (tmp_path / "probes").glob("*.json")
    kept = json.loads(path.read_text())
    assert kept["why"] is None
    assert kept["backend"] == "dequant"
    monkeypatch.setattr(probe, "answer_of", lambda *_: "was asked again")
    probe._tried.cache_clear()
    assert probe.tried(gemm.backend("dequant"), problem, "torch") is None
    path.unlink()
    probe._tried.cache_clear()
    assert probe.tried(gemm.backend("dequant"), problem, "torch") == "was asked again"
    probe._tried.cache_clear()


def test_a_child_that_finds_no_memory_is_asked_again_by_the_next_process(tmp_path, monkeypatch):
    monkeypatch.setenv("ANYFP8_CACHE_DIR", str(tmp_path))
    problem = Problem("linear", Scheme("channel"), 5, 64, 64, accumulate="fp32_128")
    full = "broke down in its trial on this GPU: RuntimeError: CUDA error: out of memory"
    monkeypatch.setattr(probe, "answer_of", lambda *_: full)
    probe._tried.cache_clear()
    assert probe.tried(gemm.backend("dequant"), problem, "torch") == full
    probe._tried.cache_clear()
    monkeypatch.setattr(probe, "answer_of", lambda *_: None)
    assert probe.tried(gemm.backend("dequant"), problem, "torch") is None
    probe._tried.cache_clear()


def test_a_wrong_product_is_found_out():
    class Wrong(type(gemm.backend("dequant"))):
        def run(self, x, prepared, problem, config, bias=None, out=None):
            return super().run(x, prepared, problem, config, bias, out) * 1.5

    problem = Problem("linear", Scheme("channel"), 5, 64, 64, accumulate="fp32_128")
    assert "wrong product" in probe.judged(Wrong(), problem)
    assert probe.judged(gemm.backend("dequant"), problem) is None
