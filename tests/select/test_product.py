"""A product that came before is launched again only for operands that its launch fits."""

import gc
from weakref import ref

import pytest
import torch

from anyfp8.gemm.base import CanonicalWeight
from anyfp8.problem import Scheme
from anyfp8.replay import replay_of
from anyfp8.select.choice import Product, _form_of

M, N, K = 4, 48, 64
# tensors of the CPU are on device -1: what is asked of a GPU's tensors is asked of them
CPU = -1
SCHEME = Scheme("channel", "token", True)


@pytest.fixture
def weight():
    return CanonicalWeight(torch.zeros(N, K, dtype=torch.uint8), torch.ones(N, 1), SCHEME)


@pytest.fixture
def product(monkeypatch, weight):
    """(product, what it launched)."""
    for name, answer in (("_cuda_getCurrentRawStream", 77), ("_cuda_getDevice", CPU)):
        monkeypatch.setattr(torch._C, name, lambda *a, answer=answer: answer, raising=False)
    monkeypatch.setattr("anyfp8.replay.empty_strided", torch._C._dynamo.guards._empty_strided_cpu)
    seen = []
    data, scale, y = codes(), torch.ones(M, 1), torch.zeros(M, N).bfloat16()
    inputs = [data, *weight.stored, scale]
    started = [(lambda *a, stream: seen.append(a), (*inputs, y))]
    replay = replay_of(started, inputs, y)
    where = [t.data_ptr() for t in weight.stored]
    form = (scale.stride(), scale.dtype)
    return Product(replay, ref(weight), where, _form_of(weight), data.shape, form, False), seen


def codes(*shape):
    return torch.zeros(shape or (M, K), dtype=torch.uint8)


def test_it_is_launched_on_its_own_operands(product, weight):
    known, seen = product
    data, scale = codes(), torch.ones(M, 1)
    y = known.again(data, scale, weight, None, None)
    out = torch.empty(M, N).bfloat16()
    assert known.again(data, scale, weight, None, out) is out
    w = [t.data_ptr() for t in weight.stored]
    fixed = (data.data_ptr(), *w, scale.data_ptr())
    assert seen == [(*fixed, y.data_ptr()), (*fixed, out.data_ptr())]
    assert (y.shape, y.dtype) == ((M, N), torch.bfloat16)


def test_another_weight_of_the_same_form_is_multiplied_too(product, weight):
    known, seen = product
    other = CanonicalWeight(codes(N, K), torch.ones(N, 1), SCHEME)
    data, scale = codes(), torch.ones(M, 1)
    known.again(data, scale, other, None, None)
    assert seen[0][1:3] == (other.codes.data_ptr(), other.scale.data_ptr())
    assert other.codes.data_ptr() != weight.codes.data_ptr()
    del weight
    gc.collect()
    assert known.again(data, scale, other, None, None) is not None


WRONG = {
    "rows": {"data": codes(M + 1, K)},
    "strides": {"data": codes(M, 2 * K)[:, :K]},
    "alignment": {"data": codes(M * K + 1)[1:].view(M, K)},
    "the layout of scales": {"scale": torch.ones(M, 4)[:, :1]},
    "packed scales": {"scale": torch.ones(M, 1, dtype=torch.int32)},
    "a bias": {"bias": torch.zeros(N)},
    "an output of other columns": {"out": torch.empty(M, N + 16).bfloat16()},
    "an output in a wider one": {"out": torch.empty(M, 2 * N).bfloat16()[:, :N]},
    "an output of another dtype": {"out": torch.empty(M, N)},
    "a weight in wider rows": {
        "prepared": CanonicalWeight(codes(N, 2 * K)[:, :K], torch.ones(N, 1), SCHEME),
    },
    "a weight that is not aligned": {
        "prepared": CanonicalWeight(codes(N * K + 1)[1:].view(N, K), torch.ones(N, 1), SCHEME),
    },
    "one scale for the weight": {
        "prepared": CanonicalWeight(codes(N, K), torch.ones(()), SCHEME),
    },
}


@pytest.mark.parametrize("what", WRONG)
def test_other_operands_take_the_full_path(product, weight, what):
    known, seen = product
    given = {"data": codes(), "scale": torch.ones(M, 1), "prepared": weight}
    given |= {"bias": None, "out": None} | WRONG[what]
    assert known.again(**given) is None
    assert not seen


def test_a_weight_is_not_kept_alive():
    weight = CanonicalWeight(codes(N, K), torch.ones(N, 1), SCHEME)
    alive = ref(weight)
    assert weight.stored[0] is weight.codes
    del weight
    gc.collect()
    assert alive() is None
