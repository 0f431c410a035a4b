from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyfp8.checkpoint.rules import Rule, RuleSet, normalise
from anyfp8.errors import CheckpointError

ENTRIES = [
    "lm_head",
    "mlp.gate",
    "re:.*vision_tower.*",
    "model.language_model.layers.0.self_attn.q_proj",
    "linear_attn.in_proj_qkv",
    "gate_up_proj",
    "*.mlp.shared_expert_gate",
    "model.visual.blocks.0.attn.q_proj.linear",
]


@pytest.mark.parametrize(
    ("entry", "module"),
    [
        ("lm_head", "lm_head"),
        ("lm_head", "language_model.lm_head"),
        ("mlp.gate", "model.layers.0.mlp.gate"),
        ("re:.*vision_tower.*", "model.vision_tower.x"),
        (
            "model.language_model.layers.0.self_attn.q_proj",
            "model.layers.0.self_attn.q_proj",
        ),
        ("linear_attn.in_proj_qkv", "language_model.model.layers.3.linear_attn.in_proj_qkv"),
        ("gate_up_proj", "model.layers.4.mlp.gate_up_proj"),
        ("gate_up_proj", "model.layers.4.mlp.gate_proj"),
        ("gate_up_proj", "model.layers.4.mlp.up_proj"),
        ("*.mlp.shared_expert_gate", "model.layers.1.mlp.shared_expert_gate"),
        ("model.visual.blocks.0.attn.q_proj.linear", "model.visual.blocks.0.attn.q_proj"),
        ("model.vision_tower", "model.vision_tower.blocks.7.mlp.fc1"),
        ("model.layers.*.mlp.gate*", "language_model.model.layers.5.mlp.gate"),
        ("model.layers.0*", "model.layers.0.mlp.down_proj"),
        ("re:.*qkv_proj", "model.layers.0.self_attn.q_proj"),
        ("re:model\\.layers\\.1\\.", "model.language_model.layers.1.mlp.down_proj"),
    ],
)
def test_a_rule_matches_the_names_that_it_means(entry, module):
    assert Rule(entry).matches(module)
    assert entry in [rule.pattern for rule in RuleSet([*ENTRIES, entry]).matching(module)]


@pytest.mark.parametrize(
    ("entry", "module"),
    [
        ("mlp.gate", "model.layers.0.mlp.gate_proj"),
        ("mlp.gate", "model.layers.0.mlp.gate_up_proj"),
        ("lm_head", "model.lm_head_extra"),
        ("gate", "model.layers.0.mlp.gate_proj"),
        ("layers.1", "model.layers.11.mlp.down_proj"),
        ("*up_proj", "model.layers.0.mlp.gate_proj"),
        ("re:.*[^e]_up_proj$", "model.layers.0.mlp.gate_proj"),
        ("mlp", "model.layers.0.mlp.gate_proj"),
        ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"),
        ("re:tower", "model.vision_tower.x"),
    ],
)
def test_a_rule_leaves_names_that_only_look_alike(entry, module):
    assert not Rule(entry).matches(module)
    assert RuleSet([entry]).matching(module) == ()


def test_a_fused_module_is_ignored_when_all_its_parts_are():
    parts = [f"model.layers.0.self_attn.{p}_proj" for p in "qkv"]
    assert RuleSet(parts).ignored("model.layers.0.self_attn.qkv_proj")
    assert not RuleSet(parts).ignored("model.layers.1.self_attn.qkv_proj")


def test_a_fused_module_that_is_ignored_in_part_is_refused():
    with pytest.raises(CheckpointError, match="in part only"):
        RuleSet(["model.layers.0.mlp.up_proj"]).ignored("model.layers.0.mlp.gate_up_proj")


def test_a_broken_regular_expression_is_refused_by_its_text():
    with pytest.raises(CheckpointError, match=r"re:\(unclosed"):
        Rule("re:(unclosed").matches("x")


WORDS = "model language_model layers 0 1 mlp gate gate_proj up_proj gate_up_proj q_proj qkv_proj"
SEGMENT = st.sampled_from([*WORDS.split(), "self_attn", "lm_head", "linear", "vision"])
NAME = st.lists(SEGMENT, min_size=1, max_size=5).map(".".join)


@given(module=NAME, entry=NAME)
def test_a_set_of_rules_agrees_with_each_rule(module, entry):
    assert bool(RuleSet([entry]).matching(module)) == Rule(entry).matches(module)


@given(module=NAME)
def test_every_module_is_matched_by_its_own_name_and_by_wrapped_ones(module):
    assert Rule(module).matches(module)
    assert Rule(f"model.{normalise(module)}").matches(f"language_model.model.{module}")


@given(module=NAME, entry=NAME)
def test_a_plain_match_is_a_run_of_whole_segments(module, entry):
    """An independent statement: the entry's segments start or end the module's, fusing aside."""
    fused = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "q_proj": "qkv_proj"}
    names = [module, normalise(module)]
    head, _, leaf = normalise(module).rpartition(".")
    if leaf in fused:
        names.append(f"{head}.{fused[leaf]}" if head else fused[leaf])
    expected = any(
        (f".{name}.").startswith(f".{wanted}.") or f".{name}.".endswith(f".{wanted}.")
        for name in names
        for wanted in (entry, normalise(entry))
    )
    assert Rule(entry).matches(module) == expected
