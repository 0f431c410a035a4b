"""torch.compile: one op a layer, the real M meets the plan, bits as in eager."""

import copy
import pickle

import pytest
import torch
import torch._dynamo.testing

from anyfp8.errors import InputError
from anyfp8.linear import convert, replan
from anyfp8.linear.plans import LayerFacts, plan_of
from anyfp8.problem import Problem, Scheme
from anyfp8.select import Request

MS = (1, 2, 17, 33, 512)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def two_layers(**options) -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 64, bias=False)
    )
    model = model.to(torch.bfloat16)
    convert(model, request=Request(**options))
    return model


@pytest.mark.parametrize("emulate", [False, True])
def test_two_graphs_serve_every_m_with_the_bits_of_eager(emulate):
    model = two_layers(emulate=emulate)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for m in MS:
        x = torch.randn(m, 64).bfloat16()
        assert torch.equal(compiled(x), model(x))
    assert counter.frame_count <= 2


def test_the_plan_is_asked_for_the_real_m():
    model = two_layers()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    replan()
    for m in MS:
        compiled(torch.randn(m, 64).bfloat16())
    for layer in (model[0], model[2]):
        assert set(MS) <= set(layer.plan()._seen)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_of_a_prepared_model_trace_too(copied):
    model = two_layers()
    x = torch.randn(3, 64).bfloat16()
    compiled = torch.compile(copied(model), fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), model(x))


def test_three_dimensional_activations():
    model = two_layers()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((2, 5, 64), (3, 4, 64), (2, 0, 64)):
        x = torch.randn(shape).bfloat16()
        assert torch.equal(compiled(x), model(x))


def test_the_op_keeps_torchs_rules():
    model = two_layers()
    x = torch.randn(5, 64).bfloat16()
    layer = model[0]
    arguments = (x, layer._stored, layer.bias, None, layer._key(torch.bfloat16))
    torch.library.opcheck(torch.ops.anyfp8.linear.default, arguments)


def test_a_layer_that_is_not_prepared_says_what_to_call():
    model = two_layers()
    model[0].unprepare()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"prepare\(\)"):
        compiled(torch.randn(3, 64).bfloat16())


def test_the_key_of_a_layer_reads_back():
    scheme = Scheme.parse("w8a8-block128x128-group128")
    problem = Problem("linear", scheme, 1, 33, 80, "fp16", "fp16", True)
    for request in (Request(), Request(backend="dequant", strict=True, emulate=True, tune=False)):
        facts = LayerFacts(problem, request)
        assert LayerFacts.parse(facts.key) == facts
    for bad in ("", "linear", facts.key + "x", facts.key.replace("dequant", '", "nosuch": "')):
        with pytest.raises(InputError):
            LayerFacts.parse(bad)


def test_replan_reads_the_environment_again(monkeypatch):
    model = two_layers()
    x = torch.randn(3, 64).bfloat16()
    want = model(x)
    monkeypatch.setenv("ANYFP8_BACKEND", "dequant")
    assert model[0].plan().choice(3).source == "default"
    replan()
    assert model[0].plan().choice(3).source == "environment"
    assert torch.equal(model(x), want)
    plan_of.cache_clear()
