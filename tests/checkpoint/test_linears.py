from __future__ import annotations

import pytest

from anyfp8.checkpoint.linears import is_linear, not_linear


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.gate_proj.weight",
        "lm_head.weight",
        "h.3.attn.c_attn.weight",
        "model.layers.0.mlp.experts.7.w1.weight",
        "model.visual.blocks.0.attn.qkv.weight",
    ],
)
def test_two_dimensional_weights_are_linears(name):
    assert is_linear(name, (8, 8))


@pytest.mark.parametrize(
    ("name", "shape", "why"),
    [
        ("model.embed_tokens.weight", (8, 8), "embedding"),
        ("transformer.wte.weight", (8, 8), "embedding"),
        ("model.norm.weight", (8,), "1-D"),
        ("model.layers.0.mlp.gate.weight", (8, 8), "router"),
        ("model.visual.patch_embed.proj.weight", (8, 3, 4, 4), "4-D"),
        ("model.layers.0.self_attn.q_proj.bias", (8,), "not a weight"),
        ("model.layers.0.q_norm.weight", (8, 8), "norm"),
    ],
)
def test_other_tensors_are_told_apart_with_the_reason(name, shape, why):
    assert not_linear(name, shape) == why
