"""How candidates are judged before they are timed, on the CPU; the GPU's part is tests/gpu."""

from dataclasses import replace

import pytest
import torch

from anyfp8 import gemm, reference
from anyfp8.device import find_device
from anyfp8.gemm.dequant import Dequant
from anyfp8.problem import QTensor, Scheme
from anyfp8.tools import gemm_operands, timing, tune_measure, tune_peers
from anyfp8.tools.timing import Timing
from anyfp8.tools.tune_cells import cells_of, read_shapes
from anyfp8.tools.tune_data import Data
from anyfp8.tools.tune_measure import Bench
from anyfp8.tools.tune_peers import Peers

H200 = find_device("h200")
NAMES = (
    "w8a8-channel-token", "w8a8-tensor-static", "w8a8-tensor-dynamic",
    "w8a8-block128x128-group128", "w8a16-channel", "w8a16-block128x128",
)  # fmt: skip


def made(name, n=400, k=264, m=80, dtype="bf16"):
    return Data(Scheme.parse(name), n, k, m, dtype, "cpu", 2, seed=3)


def product(data, m, quantized, weight=None):
    x = reference.dequantize(data.quantize(m)) if quantized else data.x[:m].float()
    return (x @ reference.dequantize(weight or data.weights[1]).T).to(data.x.dtype)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("m", [1, 5, 80])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_right_product_passes_whatever_the_scheme(name, m, dtype):
    data = made(name, dtype=dtype)
    for quantized in {data.scheme.activation != "none", False}:
        assert data.judge(product(data, m, quantized), m, quantized, "fast") == ""


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_wrong_product_is_told(name):
    data = made(name)
    quantized = data.scheme.activation != "none"
    right = product(data, 80, quantized)

    def judged(y):
        return data.judge(y, 80, quantized, "fast")

    assert "errs by 1.00e+00" in judged(torch.zeros_like(right))
    assert "errs by" in judged(right * 1.02)
    assert "not finite" in judged(right.clone().index_fill_(1, torch.tensor([7]), float("nan")))
    # one row, one column, the last ragged tile
    assert judged(right.clone().index_fill_(0, torch.tensor([79]), 0.0))
    assert judged(right.clone().index_fill_(1, torch.tensor([399]), 0.0))
    last = right.clone()
    last[:, 384:] = 0.0
    assert judged(last)
    assert "gives (79, 400)" in judged(right[:79])
    assert "float16" in judged(right.half())


@pytest.mark.parametrize(
    ("name", "axis"),
    [("w8a8-channel-token", 0), ("w8a8-block128x128-group128", 0),
     ("w8a8-block128x128-group128", 1), ("w8a16-block128x128", 1)],
)  # fmt: skip
def test_mixed_up_scales_are_wrong(name, axis):
    data = made(name, n=512, k=512)
    w = data.weights[0]
    mixed = QTensor(w.data, w.scale.roll(1, axis), w.block)
    quantized = data.scheme.activation != "none"
    assert "errs by" in data.judge(product(data, 80, quantized, mixed), 80, quantized, "fast")


def test_activation_scales_that_are_mixed_up_are_wrong():
    data = made("w8a8-block128x128-group128", n=512, k=512)
    q = data.quantize(80)
    for axis in (0, 1):
        mixed = QTensor(q.data, q.scale.roll(1, axis), q.block)
        w = reference.dequantize(data.weights[0])
        y = (reference.dequantize(mixed) @ w.T).bfloat16()
        assert "errs by" in data.judge(y, 80, True, "fast")


def test_a_large_weight_is_made_in_parts_with_the_scales_of_the_whole(monkeypatch):
    from anyfp8.tools import tune_data

    monkeypatch.setattr(tune_data, "_PART", 128 * 264)
    for name in NAMES:
        data = made(name)
        scheme, w = data.scheme, data.weights[0]
        assert tuple(w.scale.shape) in ((), scheme.weight_scale_shape(400, 264))
        assert data.judge(product(data, 5, False), 5, False, "fast") == ""


@pytest.fixture
def bench(monkeypatch):
    """A bench whose graphs are plain calls, on the CPU."""

    def race(contenders, rounds, block_us, at_least, captured):
        for calls in contenders.values():
            calls[0]()
        return {
            name: Timing(5.0 + i, 5, 6, tuple(5.0 + i + 0.01 * j for j in range(rounds)), 24)
            for i, name in enumerate(contenders)
        }

    found = Bench.__new__(Bench)
    found.device, found._kept, found._pool = H200, {}, None
    monkeypatch.setattr(timing, "race", race)
    monkeypatch.setattr(Bench, "_captured", lambda self, calls, repeats: calls[0]())
    monkeypatch.setattr(Bench, "_measured", lambda self, calls, us: calls[0]() is None or 7.0)
    monkeypatch.setattr(tune_measure, "_once_us", lambda call: 7.0)
    monkeypatch.setattr(tune_measure.torch.cuda, "synchronize", lambda *_: None)
    real = gemm_operands.Operands
    monkeypatch.setattr(
        tune_peers, "Operands", lambda n, k, m, place, seed, copies: real(n, k, m, "cpu", seed, 2)
    )

    def opened(name="w8a16-channel"):
        scheme = Scheme.parse(name)
        (cell,) = cells_of(read_shapes(["384,256"], scheme)[0], H200, [16])
        found._data = Data(scheme, 384, 256, 32, "bf16", "cpu", 2, 0)
        found._peers = Peers(cell, 32, 0, 2, None)
        return found, cell

    return opened


def ask(bench, cell, what, **options):
    return bench.serve({"do": what, "cell": cell.to_dict(), **options})


def test_a_candidate_that_lies_or_raises_has_no_time(bench, monkeypatch):
    worker, cell = bench()
    about = {"backend": "dequant", "config": {"memory": "per_call"}, "share": 1}
    assert ask(worker, cell, "time", **about) == {"us": 7.0}
    right = Dequant.run
    for lie, kind in (
        (lambda y: y.zero_(), "wrong"),
        (lambda y: y.fill_(float("nan")), "wrong"),
        (lambda y: 1 / 0, "failed"),
    ):
        monkeypatch.setattr(Dequant, "run", lambda *a, lie=lie, **k: lie(right(*a, **k)))
        found = ask(worker, cell, "time", **about)
        assert found["kind"] == kind
        assert "us" not in found


def test_a_configuration_that_is_not_legal_is_refused_before_it_runs(bench):
    worker, cell = bench()
    config = {"how": "fused", "block_m": 128, "block_n": 256, "block_k": 256, "num_stages": 8}
    found = ask(worker, cell, "time", backend="triton_w8a16", config=config, share=1)
    assert found["kind"] == "failed"
    assert gemm.backend("triton_w8a16").name


def test_a_race_has_ratios_to_the_default_and_leaves_out_who_is_wrong(bench, monkeypatch):
    worker, cell = bench()
    entries = {
        "default": {"backend": "dequant", "config": {"memory": "per_call"}},
        "dequant#1": {"backend": "dequant", "config": {"memory": "load"}},
    }
    race = {"op": "linear", "entries": entries, "default": "default"}
    found = ask(worker, cell, "race", peers=True, **race)
    assert list(found["us"]) == ["default", "dequant#1", "torch bf16"]
    assert found["ratios"]["default"] == (1.0, 1.0, 1.0)
    middle, low, high = found["ratios"]["dequant#1"]
    assert low <= middle <= high < 1
    assert found["peers"] == ["torch bf16"]
    assert ask(worker, cell, "race", peers=False, **race)["peers"] == []
    right = Dequant.run

    def run(self, x, prepared, problem, config, bias=None, out=None):
        y = right(self, x, prepared, problem, config, bias, out)
        return y.zero_() if config.memory == "load" else y

    monkeypatch.setattr(Dequant, "run", run)
    found = ask(worker, cell, "race", peers=False, **race)
    assert list(found["us"]) == ["default"]
    assert found["refused"]["dequant#1"][0] == "wrong"


def test_operands_of_the_last_few_shapes_are_kept(bench, monkeypatch):
    worker, _ = bench()
    made = []
    monkeypatch.setattr(tune_measure, "Data", lambda *about: made.append(about[1:3]) or object())
    monkeypatch.setattr(tune_measure, "Peers", lambda *about: object())
    cuda = tune_measure.torch.cuda
    monkeypatch.setattr(cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(cuda, "current_device", lambda: 0)
    facts = type("Facts", (), {"L2_cache_size": 1 << 20})
    monkeypatch.setattr(cuda, "get_device_properties", lambda _: facts)
    shapes = read_shapes(["384,256"], Scheme.parse("w8a16-channel"))[0]
    of = {n: cells_of([replace(shapes[0], n=n)], H200, [16])[0] for n in (128, 256, 384, 512)}
    seen = {}
    for n in (128, 256, 384, 128, 512, 128, 384, 256):
        ask(worker, of[n], "open", m_most=16, seed=0, peers=None)
        assert seen.setdefault((n, made.count((n, 256))), worker._data) is worker._data
    # 256 was the one asked for longest ago when the fourth came
    assert [n for n, _ in made] == [128, 256, 384, 512, 256]
