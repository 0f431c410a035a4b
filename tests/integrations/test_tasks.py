"""eval --tasks: the loaded FP8 model goes to lm-eval, its scores come back; a stand-in for lm-eval.

The stand-in follows lm-eval 0.4.13's interface, which ran here once with a task of its own (see
docs/log.md); the package is no dependency of the tests.
"""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from anyfp8.linear import Fp8Linear


class FakeLM:
    def __init__(self, pretrained, tokenizer, batch_size):
        self.model, self.tokenizer, self.batch_size = pretrained, tokenizer, batch_size


class FakeTasks:
    def match_tasks(self, names):
        return [name for name in names if name == "gsm8k"]


@pytest.fixture
def lm_eval(monkeypatch):
    """Scores a model by how likely it finds "a" after "b", whatever the task."""
    seen = []

    def simple_evaluate(lm, tasks, limit, log_samples, task_manager):
        ids = torch.tensor([lm.tokenizer("b")["input_ids"]])
        with torch.inference_mode():
            p = lm.model(ids).logits[0, -1].float().softmax(0)[lm.tokenizer("a")["input_ids"][0]]
        seen.append(SimpleNamespace(lm=lm, tasks=tasks, limit=limit, p=float(p)))
        entry = {
            "alias": "gsm8k",
            "sample_len": 7,
            "exact_match,strict-match": float(p),
            "exact_match_stderr,strict-match": 0.25,
            "perplexity,none": 3.0,
            "perplexity_stderr,none": "N/A",
        }
        return {"results": dict.fromkeys(tasks, entry)}

    names = {
        "lm_eval": {"simple_evaluate": simple_evaluate},
        "lm_eval.tasks": {"TaskManager": FakeTasks},
        "lm_eval.models": {},
        "lm_eval.models.huggingface": {"HFLM": FakeLM},
    }
    for name, contents in names.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    return seen


def test_the_loaded_model_is_scored_beside_its_source(call, hold_to_schema, lm_eval, tiny):
    options = ("--scheme", "fp8-channel", "--source", tiny, "--tasks", "gsm8k", "--limit", 5)
    status, out, _ = call("eval", tiny, *options, "--json")
    assert status == 0
    ours, source = lm_eval
    assert any(isinstance(m, Fp8Linear) for m in ours.lm.model.modules())
    assert not any(isinstance(m, Fp8Linear) for m in source.lm.model.modules())
    assert (ours.tasks, ours.limit) == (["gsm8k"], 5)
    found = json.loads(out)
    hold_to_schema("eval", found)
    first, second = found["scores"]
    assert first == {
        "task": "gsm8k",
        "metric": "exact_match (strict-match)",
        "value": ours.p,
        "error": 0.25,
        "source_value": source.p,
    }
    assert ours.p != source.p
    assert (second["metric"], second["error"]) == ("perplexity", None)
    status, out, err = call("eval", tiny, *options)
    assert status == 0
    assert out.splitlines()[0].split() == ["task", "metric", "FP8", "±", "16", "bits"]
    assert f"{ours.p:.4f}  0.2500   {source.p:.4f}" in out
    assert "layers w8a8-channel-token" in err


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("--tasks", "gsm9k"), "lm-eval has no such task"),
        (("--tasks", ""), "nothing to score"),
        (("--tasks", "gsm8k", "--limit", "0"), "nothing to score"),
    ],
)
def test_what_cannot_be_scored_is_wrong_usage(call, lm_eval, tiny, options, part):
    status, out, err = call("eval", tiny, *options)
    assert (status, out) == (2, "")
    assert f"error: {part}" in err


def test_without_lm_eval_nothing_is_loaded_and_the_package_is_named(call, monkeypatch, tiny):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    status, out, err = call("eval", tiny, "--tasks", "gsm8k")
    assert (status, out) == (1, "")
    assert "error: tasks are scored by lm-eval" in err
    assert "hint: pip install 'anyfp8[eval]'" in err
    assert "loading" not in err
