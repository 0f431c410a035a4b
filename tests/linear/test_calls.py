"""A call that came before is made again only for an x that its launches fit."""

import copy
import pickle

import pytest
import torch

from anyfp8.linear import Fp8Linear, calls, replan
from anyfp8.linear.calls import Call
from anyfp8.problem import QTensor, Scheme
from anyfp8.replay import replay_of

N, K, M = 96, 64, 3
# tensors of the CPU are on device -1: what is asked of a GPU's tensors is asked of them
CPU = -1


@pytest.fixture
def launched(monkeypatch):
    """(call, what it launched): x, the weight, a bias and a scale go in, y comes out."""
    for name, answer in (("_cuda_getCurrentRawStream", 77), ("_cuda_getDevice", CPU)):
        monkeypatch.setattr(torch._C, name, lambda *a, answer=answer: answer, raising=False)
    monkeypatch.setattr("anyfp8.replay.empty_strided", torch._C._dynamo.guards._empty_strided_cpu)
    seen = []

    def make(bias=False, scaled=False):
        x, w, y = torch.zeros(M, K).bfloat16(), torch.zeros(N, K), torch.zeros(M, N).bfloat16()
        inputs = [x, w, *(torch.zeros(N) for _ in range(bias + scaled))]
        started = [(lambda *a, stream: seen.append(a), (*inputs, y))]
        replay = replay_of(started, inputs, y)
        return Call(N, K, torch.bfloat16, CPU, "dense", scaled, replay, True), seen

    return make


@pytest.mark.parametrize("shape", [(M, K), (1, M, K), (M, 1, K), (1, M, 1, K)])
def test_the_same_rows_in_any_shape_are_launched_again(launched, shape):
    call, seen = launched()
    x = torch.zeros(shape).bfloat16()
    y = call.again(x, [32], None, None)
    want = x.new_empty((*shape[:-1], N))
    assert (y.shape, y.stride(), y.dtype) == (want.shape, want.stride(), torch.bfloat16)
    assert seen == [(x.data_ptr(), 32, y.data_ptr())]


def test_bias_and_scale_are_the_callers_own(launched):
    call, seen = launched(bias=True, scaled=True)
    x, bias, scale = torch.zeros(M, K).bfloat16(), torch.zeros(N), torch.ones(())
    y = call.again(x, [32], bias, scale)
    assert seen == [(x.data_ptr(), 32, bias.data_ptr(), scale.data_ptr(), y.data_ptr())]


def test_an_activation_scale_that_is_not_read_is_not_passed(launched):
    call, seen = launched()
    call.again(torch.zeros(M, K).bfloat16(), [32], None, torch.ones(()))
    assert len(seen[0]) == 3


WRONG = {
    "dtype": torch.zeros(M, K),
    "columns": torch.zeros(2 * M, K // 2).bfloat16(),
    "strides": torch.zeros(K, M).bfloat16().t(),
    "a slice of wider rows": torch.zeros(M, 2 * K).bfloat16()[:, :K],
    "alignment": torch.zeros(M * K + 1).bfloat16()[1:].view(M, K),
}


@pytest.mark.parametrize("what", WRONG)
def test_another_x_takes_the_full_path(launched, what):
    call, seen = launched()
    assert call.again(WRONG[what], [32], None, None) is None
    assert not seen


def test_a_bias_that_is_not_aligned_takes_the_full_path(launched):
    call, seen = launched(bias=True)
    x = torch.zeros(M, K).bfloat16()
    assert call.again(x, [32], torch.zeros(N + 1)[1:], None) is None
    assert not seen


def test_another_devices_tensors_take_the_full_path(launched):
    call, seen = launched(bias=True)
    x, bias = torch.zeros(M, K).bfloat16(), torch.zeros(N)
    call = Call(N, K, torch.bfloat16, 0, "dense", False, call.replay, True)
    assert call.again(x, [32], bias, None) is None
    assert not seen


def layer_with(call):
    layer = Fp8Linear(K, N, Scheme("channel", "token", True))
    codes = torch.randint(0, 100, (N, K), dtype=torch.uint8)
    layer.load(QTensor(codes.view(torch.float8_e4m3fn), torch.ones(N, 1)))
    layer.prepare()
    layer._known[M * K] = call, [32]
    return layer


def test_a_layer_makes_known_calls_again_and_no_others(launched):
    call, seen = launched()
    layer = layer_with(call)
    layer(torch.zeros(M, K).bfloat16())
    assert len(seen) == 1
    x = torch.randn(M + 1, K).bfloat16()
    weight = layer.weight.float() * layer.weight_scale
    assert torch.allclose(layer(x).float(), x.float() @ weight.T, rtol=0.02, atol=0.5)
    assert len(seen) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: replan(),
        lambda layer: layer.unprepare(),
        lambda layer: layer.to(torch.float16),
        lambda layer: layer.load(
            QTensor(torch.zeros(N, K).to(torch.float8_e4m3fn), torch.ones(N, 1))
        ),
    ],
    ids=["replan", "unprepare", "to", "load"],
)
def test_what_changes_a_layer_forgets_its_calls(launched, change):
    call, seen = launched()
    layer = layer_with(call)
    change(layer)
    layer(torch.zeros(M, K, dtype=layer.dtype))
    assert not seen


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_know_nothing_of_the_originals_memory(launched, copied):
    call, seen = launched()
    twin = copied(layer_with(call))
    twin(torch.zeros(M, K).bfloat16())
    assert not seen


def test_replan_forgets_what_the_op_knows(launched):
    call, _ = launched()
    x = torch.zeros(M, K).bfloat16()
    calls._calls["layer", M, 0] = call
    replan()
    assert calls.find("layer", x) is None
    assert not calls._calls
