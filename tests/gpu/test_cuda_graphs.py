"""Capture after warmup at any warmed M; what would decide inside is refused, and decided later."""

from contextlib import contextmanager

import pytest
import torch

import anyfp8
from anyfp8 import quantize, reference
from anyfp8.errors import DeviceError
from anyfp8.form import counting
from anyfp8.gemm import probe
from anyfp8.linear import Fp8Linear, calls
from anyfp8.problem import Scheme
from anyfp8.select import Request

pytestmark = pytest.mark.gpu

SCHEMES = {
    "w8a8-channel-token": Request(backend="triton_row"),
    "w8a8-tensor-static": Request(),
    "w8a8-block128x128-group128": Request(backend="triton_block"),
    "w8a16-channel": Request(),
}
N, K = 640, 512


def layer_of(scheme, request=None, device="cuda", bias=True, n=N, k=K):
    scheme = Scheme.parse(scheme)
    torch.manual_seed(n + k)
    layer = Fp8Linear(k, n, scheme, bias=bias, device=device, request=request)
    weight = reference.quantize_weight(torch.randn(n, k) / k**0.5, scheme)
    static = scheme.activation == "tensor" and not scheme.dynamic
    layer.load(
        anyfp8.problem.QTensor(weight.data.to(device), weight.scale.to(device), weight.block),
        input_scale=torch.tensor(0.02, device=device) if static else None,
        bias=torch.randn(n, device=device) if bias else None,
    )
    layer.prepare()
    return layer


@pytest.fixture(autouse=True)
def no_grad():
    anyfp8.replan()
    with torch.inference_mode():
        yield
    torch.cuda.synchronize()


def captured(layer, x):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    return graph, y


@contextmanager
def a_capture():
    """A capture of something else, which what happens inside must not break."""
    other = torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        other.add_(1)
        yield
        other.add_(1)
    graph.replay()
    assert other.item() == 2


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("m", [1, 8, 33])
def test_replays_with_new_data_equal_eager(scheme, m):
    layer = layer_of(scheme, SCHEMES[scheme])
    anyfp8.warmup(layer, ms=[m])
    x = torch.randn(m, K, device="cuda").bfloat16()
    graph, y = captured(layer, x)
    before = torch.cuda.memory_reserved()
    for round in range(1000 if m == 8 else 20):
        x.normal_(std=1 + round % 7)
        graph.replay()
        if round % 10 == 0:
            assert torch.equal(y, layer(x))
    assert torch.cuda.memory_reserved() <= before + (32 << 20)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_repeats_give_the_bits_of_the_full_path(scheme):
    layer = layer_of(scheme, SCHEMES[scheme])
    for shape in ((1, K), (17, K), (2, 3, K), (128, K)):
        x = torch.randn(shape, device="cuda").bfloat16()
        full, again, third = layer(x), layer(x), layer(x.clone())
        assert torch.equal(full, again)
        assert torch.equal(full, third)
        calls.forget()
        assert torch.equal(full, layer(x))


def test_our_kernels_alone_are_replayed():
    for scheme, ours in (("w8a8-channel-token", "triton_row"), ("w8a16-channel", "triton_w8a16")):
        layer = layer_of(scheme, Request(backend=ours))
        anyfp8.warmup(layer, ms=[8])
        assert calls._calls[layer.key, 8, 0].replay is not None
    layer = layer_of("w8a8-tensor-static", Request(backend="torch_scaled_mm"))
    anyfp8.warmup(layer, ms=[8])
    assert calls._calls[layer.key, 8, 0].replay is None


def test_strided_activations_are_right_too():
    layer = layer_of("w8a8-channel-token", Request(backend="triton_row"))
    wide = torch.randn(24, 3 * K, device="cuda").bfloat16()
    x = wide[:, K : 2 * K]
    want = layer(x.contiguous())
    assert torch.equal(layer(x), want)
    odd = torch.randn(24 * K + 1, device="cuda").bfloat16()[1:].view(24, K)
    assert torch.equal(layer(odd), layer(odd.clone()))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_unwarmed_m_is_refused_and_the_stream_goes_on(scheme):
    layer = layer_of(scheme, SCHEMES[scheme])
    anyfp8.warmup(layer, ms=[8])
    x = torch.randn(24, K, device="cuda").bfloat16()
    y = torch.zeros(8, N, device="cuda").bfloat16()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # the capture goes on after the refusal: nothing touched its stream
        with pytest.raises(DeviceError, match="before the capture") as raised:
            layer(x)
        y.copy_(layer(x[:8]))
    assert "anyfp8.warmup(model, ms=[24])" in raised.value.hint
    graph.replay()
    assert torch.equal(y, layer(x[:8]))
    anyfp8.warmup(layer, ms=[24])
    graph, y = captured(layer, x)
    graph.replay()
    assert torch.equal(y, layer(x))


def test_a_fresh_layer_is_neither_prepared_nor_placed_inside_a_capture():
    layer = layer_of("w8a8-channel-token", n=768)
    layer.unprepare()
    x = torch.randn(8, K, device="cuda").bfloat16()
    with a_capture(), pytest.raises(DeviceError, match="is prepared before") as raised:
        layer(x)
    assert "warmup" in raised.value.hint
    # decided again afterwards, from nothing that the capture left behind
    assert layer(x).isfinite().all()
    assert layer.plan().choice(8).backend in ("torch_scaled_mm", "triton_row", "cutlass")


def test_a_trial_inside_a_capture_is_no_answer():
    from anyfp8 import gemm

    backend = gemm.backend("torch_scaled_mm")
    problem = anyfp8.Problem("linear", Scheme.parse("w8a8-tensor-static"), 16, 256, 512)
    probe.forget()
    with a_capture(), pytest.raises(DeviceError, match="is tried before"):
        probe.judged(backend, problem)
    assert probe.judged(backend, problem) is None


def test_a_failed_trial_is_made_again_after_replan(monkeypatch):
    from anyfp8.gemm.torch_scaled_mm import TorchScaledMM

    def broken(*args, **kwargs):
        raise RuntimeError("no kernel today")

    with monkeypatch.context() as patch:
        patch.setattr(TorchScaledMM, "run", broken)
        layer = layer_of("w8a8-tensor-static", n=1024)
        chosen = layer.plan().choice(16)
        assert chosen.backend != "torch_scaled_mm"
        assert "no kernel today" in dict(chosen.refused)["torch_scaled_mm"]
    anyfp8.replan()
    assert "torch_scaled_mm" not in dict(layer.plan().choice(16).refused)


def test_quantizers_alone_are_refused_unless_they_ran_before():
    x = torch.randn(5, 1328, device="cuda").bfloat16()
    with a_capture(), pytest.raises(DeviceError, match="has not run in this form"):
        quantize.per_token(x)
    want = quantize.per_token(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q = quantize.per_token(x)
    graph.replay()
    assert torch.equal(q.codes, want.codes)


def test_after_warmup_nothing_is_compiled():
    model = torch.nn.Sequential(
        layer_of("w8a8-channel-token", Request(backend="triton_row"), n=K),
        layer_of("w8a8-block128x128-group128", Request(backend="triton_block")),
    )
    warmed = anyfp8.warmup(model, ms=range(1, 65))
    assert (warmed.layers, warmed.calls) == (2, 128)
    with counting() as counts:
        for m in range(1, 65):
            model(torch.randn(m, K, device="cuda").bfloat16())
    assert counts == {"compiled": 0, "loaded": 0}


def test_a_sweep_compiles_by_configuration_not_by_m(tmp_path, monkeypatch):
    from triton import knobs

    layer = layer_of("w8a8-channel-token", Request(backend="triton_row"), n=1280)
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    with counting() as counts:
        anyfp8.warmup(layer, ms=range(1, 513))
    configs = {layer.plan().choice(m).config for m in range(1, 513)}
    # whole tiles or not, and quantizers for few and for many rows
    assert sum(counts.values()) <= 2 * len(configs) + 3


def test_streams_do_not_share_scratch():
    # split K leaves partial sums in scratch
    layer = layer_of("w8a16-channel", Request(), n=256, k=8192)
    xs = [torch.randn(1, 8192, device="cuda").bfloat16() * (i + 1) for i in range(4)]
    want = [layer(x) for x in xs]
    streams = [torch.cuda.Stream() for _ in xs]
    torch.cuda.synchronize()
    for _ in range(50):
        got = []
        for x, stream in zip(xs, streams, strict=True):
            with torch.cuda.stream(stream):
                got.append(layer(x))
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_tensors_on_a_gpu_that_is_not_the_current_one(scheme):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    here, there = layer_of(scheme, SCHEMES[scheme]), layer_of(scheme, SCHEMES[scheme], "cuda:1")
    for m in (1, 16, 200):
        x = torch.randn(m, K, device="cuda").bfloat16()
        for _ in range(3):
            y = there(x.to("cuda:1"))
            assert y.device == torch.device("cuda:1")
            assert torch.equal(y.cpu(), here(x).cpu())
    assert torch.cuda.current_device() == 0


def test_operands_on_different_devices_are_refused_by_name():
    layer = layer_of("w8a8-channel-token", Request(backend="triton_row"), bias=False)
    x = torch.randn(8, K, device="cuda").bfloat16()
    layer(x)
    with pytest.raises(anyfp8.AnyFp8Error, match="another device") as raised:
        layer(x.cpu())
    assert "x on cpu" in str(raised.value.got)
    q = quantize.per_token(x)
    far = layer._prepared.replaced(
        {name: t.cpu() if name == "scale" else t for name, t in layer._prepared.tensors().items()}
    )
    for _ in range(2):
        with pytest.raises(anyfp8.AnyFp8Error, match="several devices") as raised:
            layer.plan().run(q, far)
        assert "sw on cpu" in raised.value.got


def test_products_of_quantized_rows_repeat_with_and_without_an_output():
    layer = layer_of("w8a8-channel-token", Request(backend="triton_row"), bias=False)
    plan = layer.plan()
    q = quantize.per_token(torch.randn(16, K, device="cuda").bfloat16())
    want = plan.run(q, layer._prepared)
    out = torch.full_like(want, float("nan"))
    assert plan.run(q, layer._prepared, out=out) is out
    assert torch.equal(out, want)
    wide = torch.full((16, 2 * N), float("nan"), device="cuda").bfloat16()
    plan.run(q, layer._prepared, out=wide[:, :N])
    assert torch.equal(wide[:, :N], want)
    assert wide[:, N:].isnan().all()


def test_an_engines_products_are_recorded_once_and_serve_other_weights(monkeypatch):
    from anyfp8.integrations.sglang import apply_fp8_linear
    from anyfp8.select import choice

    recorded, record = [], choice.first
    monkeypatch.setattr(choice, "first", lambda *a: recorded.append(1) or record(*a))
    monkeypatch.setenv("ANYFP8_BACKEND", "triton_row")
    x = torch.randn(7, 1024, device="cuda").bfloat16()
    for seed in range(2):
        torch.manual_seed(seed)
        w = (torch.randn(656, 1024, device="cuda") / 32).to(torch.float8_e4m3fn).t()
        scale = torch.rand(656, 1, device="cuda") + 0.5
        arguments = {"weight_scale": scale, "compressed_tensor_quant": True}
        arguments["use_per_token_if_dynamic"] = True
        first, again = (apply_fp8_linear(x, w, **arguments) for _ in range(2))
        want = x.float() @ (w.float() * scale.t())
        assert torch.equal(first, again)
        assert (first.float() - want).norm() < 0.05 * want.norm()
    assert recorded == [1]
    # a library's product cannot be repeated, and is recorded no second time
    monkeypatch.setenv("ANYFP8_BACKEND", "torch_scaled_mm")
    recorded.clear()
    for _ in range(3):
        assert torch.isfinite(apply_fp8_linear(x, w, **arguments)).all()
    assert recorded == [1]


def test_compiled_models_capture_and_equal_eager():
    model = torch.nn.Sequential(
        layer_of("w8a8-channel-token", Request(backend="triton_row"), n=K),
        torch.nn.ReLU(),
        layer_of("w8a8-channel-token", Request(backend="triton_row")),
    )
    anyfp8.warmup(model, ms=[1, 2, 17, 33])
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (1, 2, 17, 33):
        x = torch.randn(m, K, device="cuda").bfloat16()
        assert torch.equal(compiled(x), model(x))
        graph, y = captured(compiled, x)
        x.normal_()
        graph.replay()
        assert torch.equal(y, model(x))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_empty_batches_launch_nothing_and_the_next_call_is_right(scheme):
    layer = layer_of(scheme, SCHEMES[scheme])
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    x = torch.randn(3, K, device="cuda").bfloat16()
    want = layer(x)
    for call in (layer, compiled):
        for shape in ((0, K), (2, 0, K)):
            y = call(torch.empty(shape, device="cuda").bfloat16())
            assert (y.shape, y.dtype) == ((*shape[:-1], N), torch.bfloat16)
        assert torch.equal(call(x), want)
    assert quantize.per_group(x[:0]).scale.shape == (0, K // 128)
