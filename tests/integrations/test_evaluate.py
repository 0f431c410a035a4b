"""eval: figures that agree with plain torch, and a fault named where it is."""

import copy
import math

import pytest
import torch

from anyfp8.errors import InputError
from anyfp8.integrations.transformers import load
from anyfp8.linear import convert
from anyfp8.problem import QTensor
from anyfp8.select import Request
from anyfp8.tools.evaluate import agreement, layer_errors


def token_windows(count: int = 2, length: int = 48) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, 256, (1, length), generator=generator) for _ in range(count)]


@pytest.fixture(scope="module")
def original(tiny):
    return load(tiny)


def quantized(original, scheme: str, **options):
    model = copy.deepcopy(original)
    calib = token_windows(4) if scheme.endswith("static") else None
    convert(model, scheme, calib=calib, request=Request(**options))
    return model


def replace_weight(layer, codes=None, scale=None) -> None:
    codes = layer.weight if codes is None else codes
    scale = layer.weight_scale if scale is None else scale
    layer.load(QTensor(codes, scale, layer.scheme.block), input_scale=layer.input_scale)


def test_perplexity_is_the_exponential_of_the_mean_cross_entropy(original):
    windows = token_windows()
    with torch.inference_mode():
        losses = [
            torch.nn.functional.cross_entropy(original(w).logits[0, :-1].float(), w[0, 1:])
            for w in windows
        ]
    want = math.exp(torch.stack(losses).mean())
    assert agreement(original, windows).perplexity == pytest.approx(want, rel=1e-5)


def test_a_model_agrees_with_itself(original):
    found = agreement(original, token_windows(), original)
    assert found.perplexity == found.source_perplexity
    assert found.kl == 0.0
    assert found.top1 == 1.0
    assert found.tokens == 2 * 47


def test_divergence_is_that_of_torch(original):
    model = quantized(original, "w8a16-channel")
    windows = token_windows()
    with torch.inference_mode():
        p = torch.cat([model(w).logits[0, :-1].float() for w in windows]).log_softmax(-1)
        q = torch.cat([original(w).logits[0, :-1].float() for w in windows]).log_softmax(-1)
    want = torch.nn.functional.kl_div(p, q, log_target=True, reduction="batchmean")
    found = agreement(model, windows, original)
    assert found.kl == pytest.approx(float(want), rel=1e-3)
    assert found.top1 == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).float().mean()))


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("w8a16-channel", {}),
        ("w8a16-block128x128", {}),
        ("w8a8-tensor-static", {}),
        ("w8a8-tensor-static", {"emulate": True}),
        ("w8a8-channel-token", {"emulate": True}),
    ],
)
def test_a_sound_model_has_no_suspect_layer(original, scheme, options):
    layers = layer_errors(quantized(original, scheme, **options), original, token_windows(1))
    assert len(layers) == 14
    assert [layer for layer in layers if layer.suspect] == []
    assert all(0.005 < layer.error < 0.08 for layer in layers)


FAULT_SCHEME = "w8a8-tensor-static"


def drop_scale(model) -> str:
    replace_weight(model.model.layers[0].mlp.up_proj, scale=torch.tensor(1.0))
    return "model.layers.0.mlp.up_proj"


def swap_scales(model) -> str:
    mlp = model.model.layers[1].mlp
    gate, up = mlp.gate_proj.weight_scale, mlp.up_proj.weight_scale
    assert abs(float(gate / up) - 1) > 0.04
    replace_weight(mlp.gate_proj, scale=up)
    replace_weight(mlp.up_proj, scale=gate)
    return "model.layers.1.mlp.gate_proj"


def times_256(model) -> str:
    layer = model.model.layers[0].self_attn.v_proj
    replace_weight(layer, scale=layer.weight_scale * 256)
    return "model.layers.0.self_attn.v_proj"


def transpose_square(model) -> str:
    layer = model.model.layers[1].self_attn.o_proj
    replace_weight(layer, codes=layer.weight.view(torch.uint8).t().contiguous())
    return "model.layers.1.self_attn.o_proj"


def wrong_input_scale(model) -> str:
    layer = model.model.layers[0].mlp.down_proj
    q = QTensor(layer.weight, layer.weight_scale)
    layer.load(q, input_scale=layer.input_scale / 64)
    return "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize("fault", [drop_scale, swap_scales, times_256, transpose_square])
@pytest.mark.parametrize("emulate", [False, True])
def test_an_injected_fault_is_named_where_it_is(original, fault, emulate):
    model = copy.deepcopy(original)
    # gate and up get clearly different scales, as trained models have them
    model.model.layers[1].mlp.up_proj.weight.mul_(1.5)
    source = copy.deepcopy(model)
    convert(model, FAULT_SCHEME, calib=token_windows(4), request=Request(emulate=emulate))
    name = fault(model)
    suspects = [e.name for e in layer_errors(model, source, token_windows(1)) if e.suspect]
    assert suspects[0] == name
    allowed = {name, "model.layers.1.mlp.up_proj"} if fault is swap_scales else {name}
    assert set(suspects) == allowed


def test_a_wrong_activation_scale_is_named_where_activations_are_quantized(original):
    model = quantized(original, FAULT_SCHEME, emulate=True)
    name = wrong_input_scale(model)
    suspects = [e.name for e in layer_errors(model, original, token_windows(1)) if e.suspect]
    assert suspects == [name]


def test_a_fixed_bound_replaces_the_derived_one(original):
    model = quantized(original, "w8a16-channel")
    layers = layer_errors(model, original, token_windows(1), bound=0.001)
    assert all(layer.suspect for layer in layers)


def test_a_source_of_another_shape_is_refused(original):
    model = quantized(original, "w8a16-channel")
    other = copy.deepcopy(original)
    other.model.layers[0].mlp.up_proj = torch.nn.Linear(192, 64)
    with pytest.raises(InputError, match=r"does not match at model\.layers\.0\.mlp\.up_proj"):
        layer_errors(model, other, token_windows(1))
