"""Many tokens on two streams: the bits of one stream, from any stream, in a capture, in threads."""

from threading import Thread

import pytest
import torch

from anyfp8 import testing_gemm
from anyfp8.device import current_device
from anyfp8.errors import InputError
from anyfp8.gemm import w8a16_chunks
from anyfp8.gemm.triton_w8a16 import BACKEND, W8A16Config
from anyfp8.linear import Fp8Linear
from anyfp8.problem import Scheme
from anyfp8.select import Request

pytestmark = pytest.mark.gpu

BLOCK = Scheme("block", block=(128, 128))
CHUNKED = W8A16Config("chunked")
# twelve chunks of 256 rows and a short one
M, N, K = 1000, 12 * 256 + 80, 1024


@pytest.fixture
def lanes(monkeypatch):
    """Chunks of 256 rows by turns on so many streams as the test says."""

    def use(count):
        monkeypatch.setattr(w8a16_chunks, "SCRATCH_BYTES", count * 2 * 256 * K)
        monkeypatch.setattr(w8a16_chunks, "lanes_for", lambda *_: count)

    return use


def call_of(scheme, dtype=torch.bfloat16, bias=True, seed=0):
    layer = testing_gemm.random_layer(scheme, M, N, K, dtype, "cuda", seed)
    problem = testing_gemm.problem_of(layer, dtype, bias)
    weight = testing_gemm.canonical_weight(layer.weight, layer.scheme)
    added = layer.bias if bias else None
    y = torch.empty(M, N, dtype=dtype, device="cuda")
    return layer.x, y, lambda: BACKEND.run(layer.x, weight, problem, CHUNKED, added, y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scheme", [Scheme("channel"), BLOCK], ids=lambda s: s.name)
def test_two_streams_give_the_bits_of_one(lanes, scheme, bias, dtype):
    _, y, call = call_of(scheme, dtype, bias)
    lanes(1)
    call()
    want = y.clone()
    lanes(2)
    for _ in range(20):
        y.fill_(float("nan"))
        call()
        assert torch.equal(y, want)


def test_a_caller_on_its_own_stream_waits_for_nothing_itself(lanes):
    x, y, call = call_of(Scheme("channel"))
    lanes(1)
    call()
    want = y.clone()
    lanes(2)
    mine = torch.cuda.Stream()
    mine.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(mine):
        given = x.clone()
        for _ in range(20):
            # x is written late and y read at once, both in the caller's order only
            x.zero_()
            torch.cuda._sleep(200_000)
            x.copy_(given)
            y.fill_(float("nan"))
            call()
            found = y.clone()
            y.zero_()
            assert torch.equal(found, want)


def test_scratch_that_the_next_call_gets_is_not_read_any_more(lanes):
    lanes(1)
    calls = [call_of(Scheme("channel"), seed=seed) for seed in range(4)]
    wants = []
    for _, y, call in calls:
        call()
        wants.append(y.clone())
    lanes(2)
    for _ in range(10):
        for _, _, call in calls:
            call()
        for (_, y, _), want in zip(calls, wants, strict=True):
            assert torch.equal(y, want)
            y.zero_()


def test_a_capture_holds_both_streams_and_its_replays_equal_eager_calls(lanes):
    x, y, call = call_of(Scheme("channel"))
    lanes(2)
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for round in range(20):
        x.normal_(std=1 + round % 3)
        y.fill_(float("nan"))
        graph.replay()
        found = y.clone()
        call()
        assert torch.equal(found, y)


def test_a_refusal_before_the_first_product_leaves_a_capture_whole(lanes, monkeypatch):
    x, _, call = call_of(Scheme("channel"))
    lanes(2)
    call()

    def refuse(*_):
        raise InputError("no")

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), monkeypatch.context() as patched:
        patched.setattr(w8a16_chunks, "_dequantize", refuse)
        with pytest.raises(InputError):
            call()
        doubled = 2 * x
    graph.replay()
    assert torch.equal(doubled, 2 * x)
    call()


def test_threads_on_streams_of_their_own_do_not_meet(lanes):
    lanes(1)
    calls = [call_of(Scheme("channel"), seed=seed) for seed in range(3)]
    wants = []
    for _, y, call in calls:
        call()
        wants.append(y.clone())
    lanes(2)
    wrong = []

    def work(number):
        _, y, call = calls[number]
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                y.zero_()
                call()
                if not torch.equal(y, wants[number]):
                    wrong.append(number)

    torch.cuda.synchronize()
    threads = [Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_compiled_layer_with_many_tokens_equals_the_eager_one():
    n, k, m = 24576, 4096, 2048
    layer = Fp8Linear(k, n, Scheme("channel"), device="cuda", request=Request())
    random = testing_gemm.random_layer(Scheme("channel"), m, n, k, device="cuda")
    layer.load(random.weight)
    layer.prepare()
    assert layer.plan().choice(m).config == CHUNKED
    assert w8a16_chunks.lanes_for(m, n, k, current_device()) == 2
    with torch.inference_mode():
        want = layer(random.x)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        for _ in range(3):
            assert torch.equal(compiled(random.x), want)
