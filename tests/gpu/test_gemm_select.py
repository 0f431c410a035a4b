"""Selection at work on the GPU: kill switch, over-limit rows, graphs, batch invariance, probes."""

from dataclasses import replace

import pytest
import torch

from anyfp8 import gemm, testing_gemm
from anyfp8.device import current_device
from anyfp8.errors import InputError
from anyfp8.problem import QTensor, Scheme
from anyfp8.select import Request, plan, select
from anyfp8.select.table import Header, Row, Table, Tables

pytestmark = pytest.mark.gpu

ROW = Scheme("channel", "token", True)
BLOCK = Scheme("block", "group", True, block=(128, 128), group=128)
N, K = 2112, 4096


@pytest.fixture(scope="module", params=[ROW, BLOCK], ids=["row", "block"])
def layer(request):
    return testing_gemm.random_layer(request.param, 512, N, K, device="cuda")


def table_with(layer, tile):
    backend = "triton_block" if layer.scheme.block else "triton_row"
    rows = tuple(
        Row(layer.scheme.name, N, K, m, backend, config=tuple(tile.items())) for m in (1, 4, 16, 64)
    )
    device = current_device()
    return Tables(device, (("user table", Table(Header(device.name), rows)),))


def run(found, layer, m):
    choice = found.choice(m)
    x = layer.x[:m]
    if choice.quantizes:
        x = QTensor(layer.q.data[:m], layer.q.scale[:m], layer.q.block)
    return found.run(x, found.prepare(layer.weight), layer.bias)


def close(layer, m, y):
    wanted = testing_gemm.oracle(layer, True, True, torch.bfloat16)
    error = (y.double() - wanted.exact[:m]).norm() / wanted.exact[:m].norm()
    return error.item() < 0.01


def test_the_kill_switch_gives_the_default_paths_bytes(layer, monkeypatch):
    tile = {"block_m": 32, "block_n": 64, "block_k": 64, "num_warps": 4, "num_stages": 2}
    tables = table_with(layer, tile)
    device = current_device()
    tuned = plan(layer.scheme, N, K, device, bias=True, tables=tables)
    monkeypatch.setenv("ANYFP8_ENABLE_FP8_GEMM_CONFIG_TUNE", "0")
    off = plan(layer.scheme, N, K, device, bias=True, tables=tables)
    for m in (1, 16, 64):
        assert tuned.choice(m).source == "user table"
        assert off.choice(m).source == "default"
        first = gemm.backend(off.choice(m).backend)
        problem = off.problem_at(m)
        x = QTensor(layer.q.data[:m], layer.q.scale[:m], layer.q.block)
        direct = first.run(
            x,
            off.prepare(layer.weight),
            problem,
            first.default_config(problem, device),
            layer.bias,
        )
        assert torch.equal(run(off, layer, m), direct)
        assert close(layer, m, run(tuned, layer, m))


def test_an_over_limit_row_is_lowered_and_the_next_calls_are_fine(layer):
    tile = {"block_m": 128, "block_n": 256, "block_k": 128, "num_warps": 8, "num_stages": 12}
    found = plan(layer.scheme, N, K, current_device(), bias=True, tables=table_with(layer, tile))
    assert found.choice(64).config.num_stages < 12
    for m in (64, 1, 64):
        assert close(layer, m, run(found, layer, m))


def test_every_m_of_a_plan_is_right_and_can_be_captured_in_a_graph(layer):
    found = plan(layer.scheme, N, K, current_device(), bias=True)
    prepared = found.prepare(layer.weight)
    for m in (1, 3, 16, 17, 64, 133, 512):
        choice = found.choice(m)
        assert choice.quantizes
        x = QTensor(layer.q.data[:m], layer.q.scale[:m], layer.q.block)
        y = found.run(x, prepared, layer.bias)
        assert close(layer, m, y)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = found.run(x, prepared, layer.bias)
        again.fill_(float("nan"))
        graph.replay()
        assert torch.equal(again, y)


@pytest.mark.parametrize("scheme", [ROW, BLOCK, Scheme("channel")], ids=lambda s: s.name)
def test_a_row_has_the_same_bits_at_every_m_when_batch_invariant(scheme):
    m, n, k = 4097, 320, 1096
    layer = testing_gemm.random_layer(scheme, m, n, k, device="cuda")
    request = Request(batch_invariant=True)
    found = plan(scheme, n, k, current_device(), bias=True, request=request)
    full = run(found, layer, m)
    wanted = testing_gemm.oracle(layer, scheme != Scheme("channel"), True, torch.bfloat16)
    assert (full.double() - wanted.exact).norm() < 0.01 * wanted.exact.norm()
    same = [torch.equal(run(found, layer, rows), full[:rows]) for rows in range(1, m)]
    assert all(same), f"M={same.index(False) + 1} has other bits"


def test_without_rows_the_kill_switch_turns_the_ranker_off_too(layer, monkeypatch):
    device, none = current_device(), Tables(current_device(), ())
    ranked = plan(layer.scheme, N, K, device, bias=True, tables=none)
    monkeypatch.setenv("SGLANG_ENABLE_FP8_GEMM_CONFIG_TUNE", "0")
    off = plan(layer.scheme, N, K, device, bias=True, tables=none)
    bare = plan(layer.scheme, N, K, device, bias=True, request=Request(tune=False))
    for m in (1, 17, 64, 512):
        assert ranked.choice(m).source == "ranker"
        assert off.choice(m).source == "default"
        assert torch.equal(run(off, layer, m), run(bare, layer, m))
        assert close(layer, m, run(ranked, layer, m))


def test_forced_weight_only_is_exact_on_the_dequantized_weight(layer):
    request = Request(force_weight_only=True)
    found = plan(layer.scheme, N, K, current_device(), bias=True, request=request)
    wanted = testing_gemm.oracle(layer, False, True, torch.bfloat16)
    for m in (1, 16, 64, 512):
        assert found.choice(m).backend == "triton_w8a16"
        y = run(found, layer, m)
        error = (y.double() - wanted.exact[:m]).square().mean().sqrt().item()
        assert error <= 2 * wanted.rms_error


def test_a_failing_kernel_is_refused_by_its_trial_and_the_gpu_stays_usable(monkeypatch):
    backend = gemm.backend("torch_scaled_mm")

    def broken(*args, **kwargs):
        raise RuntimeError("no kernel for this recipe")

    monkeypatch.setattr("anyfp8.gemm.torch_scaled_mm._multiply", broken)
    from anyfp8.gemm import probe

    probe._judged.cache_clear()
    found = plan(ROW, N, K, current_device(), request=Request(tune=False))
    assert found.choice(16).backend == "triton_row"
    assert "no kernel for this recipe" in dict(found.choice(16).refused)[backend.name]
    probe._judged.cache_clear()


def test_tensors_on_two_devices_are_an_error_that_names_them():
    layer = testing_gemm.random_layer(ROW, 4, 64, 64, device="cuda")
    problem = testing_gemm.problem_of(layer, torch.bfloat16, False)
    backend, device = gemm.backend("triton_row"), current_device()
    prepared = backend.prepare(layer.weight, ROW, "bf16")
    on_cpu = prepared.replaced({"codes": prepared.codes, "scale": prepared.scale.cpu()})
    with pytest.raises(InputError, match="several devices") as caught:
        backend.run(layer.q, on_cpu, problem, backend.default_config(problem, device))
    assert "sw on cpu" in str(caught.value)


def test_operands_past_two_gibibytes_are_addressed_in_64_bits():
    m, n, k = 70_000, 48, 32_768
    x = torch.full((m, k), 0x38, dtype=torch.uint8, device="cuda")
    x[-1] = 0x40
    w = torch.full((n, k), 0x30, dtype=torch.uint8, device="cuda")
    one = torch.ones((), device="cuda")
    scheme = Scheme("tensor", "tensor", True)
    weight = testing_gemm.canonical_weight(QTensor(w, one), scheme)
    problem = testing_gemm.Problem("gemm", scheme, m, n, k, accumulate="fp32_128")
    backend = gemm.backend("triton_row")
    y = backend.run(
        QTensor(x.view(torch.float8_e4m3fn), one),
        weight,
        problem,
        backend.default_config(problem, current_device()),
    )
    assert (y[:-1] == k / 2).all()
    assert (y[-1] == k).all()


def test_explaining_another_gpu_tries_nothing_here(monkeypatch):
    from anyfp8.device import find_device

    def never(*args):
        raise AssertionError("a trial ran for a GPU that is not here")

    monkeypatch.setattr(type(gemm.backend("torch_scaled_mm")), "probe", never)
    other = find_device("NVIDIA L40S")
    assert plan(ROW, N, K, other).choice(1)
    problem = testing_gemm.Problem("linear", ROW, 1, N, K)
    assert select(replace(problem, m=16), other)
