"""The verbs as a person meets them: stdout, stderr, exit status, and nothing half-written."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from anyfp8.tools.quantize import quantize_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tiny, tmp_path_factory):
    out = tmp_path_factory.mktemp("verbs") / "fp8"
    windows = [torch.randint(1, 256, (1, 32)) for _ in range(2)]
    quantize_checkpoint(tiny, out, calib=windows)
    return out


def test_quantize_says_what_it_wrote_and_what_to_do_next(call, tiny, tmp_path):
    status, out, err = call(
        "quantize", tiny, tmp_path / "fp8", "--calib-windows", 2, "--calib-length", 64
    )
    assert status == 0
    assert out.startswith("14 linear layers in w8a8-tensor-static, ")
    assert "left in 16 bits: lm_head (excluded by 'lm_head')" in out
    assert "calibrating 14 layers on 2 x 64 tokens of pydoc_data.topics" in err
    assert f"next: anyfp8 run {tmp_path / 'fp8'} -p" in err
    assert (tmp_path / "fp8" / "hf_quant_config.json").is_file()
    assert [p.name for p in tmp_path.iterdir()] == ["fp8"]


def test_quantize_with_json_prints_one_document(call, hold_to_schema, tiny, tmp_path):
    status, out, _ = call("quantize", tiny, tmp_path / "x", "--scheme", "fp8-channel", "--json")
    assert status == 0
    found = json.loads(out)
    hold_to_schema("quantize", found)
    assert found["scheme"] == "w8a8-channel-token"
    assert len(found["layers"]) == 14


def test_quantize_warns_of_a_rule_that_matched_nothing(call, tiny, tmp_path):
    arguments = ("--scheme", "fp8-channel", "--exclude", "lm_head", "--exclude", "mlp.gate")
    status, _, err = call("quantize", tiny, tmp_path / "x", *arguments)
    assert status == 0
    assert "warning: --exclude mlp.gate matched no layer" in err


@pytest.mark.parametrize(
    ("arguments", "status", "part"),
    [
        (("--scheme", "w9a9"), 2, "not the name of a quantization scheme"),
        (("--scheme", "w8a16-tensor", "--format", "modelopt"), 2, "cannot hold w8a16-tensor"),
        (("--calib", "no-such-file.txt"), 2, "cannot read the text no-such-file.txt"),
        (("--device", "cuda:99"), 2, "there is no device cuda:99"),
        (("--exclude", "*"), 2, "exclude"),
        (("--calib-windows", "0"), 2, "not a number of windows"),
    ],
)
def test_wrong_usage_of_quantize_writes_nothing(call, tiny, tmp_path, arguments, status, part):
    found, out, err = call("quantize", tiny, tmp_path / "out", *arguments)
    assert (found, out) == (status, "")
    assert err.lstrip().splitlines()[-1]
    assert "error: " in err
    assert part in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_quantize_refuses_a_folder_that_holds_something(call, tiny, tmp_path):
    (tmp_path / "mine.txt").write_text("keep me")
    status, _, err = call("quantize", tiny, tmp_path, "--scheme", "fp8-channel")
    assert status == 1 or status == 2
    assert "error: " in err
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


def test_quantize_refuses_an_fp8_checkpoint(call, checkpoint, tmp_path):
    status, _, err = call("quantize", checkpoint, tmp_path / "out")
    assert status == 1
    assert "is quantized already" in err


def test_run_prints_text_and_names_the_kernels(call, hold_to_schema, checkpoint):
    status, _, err = call("run", checkpoint, "-p", "abc", "--max-tokens", 4)
    assert status == 0
    assert "14 layers w8a8-tensor-static: dequant (activations in 16 bits" in err
    assert "tokens/s on cpu" in err
    status, again, err = call(
        "run", checkpoint, "-p", "abc", "--max-tokens", 4, "--emulate", "w8a8", "--json"
    )
    assert status == 0
    found = json.loads(again)
    hold_to_schema("run", found)
    assert "activations quantized" in found["layers"][0]
    assert found["prompt_tokens"] == 3


def test_run_refuses_an_empty_prompt_and_a_forced_backend_that_cannot(call, checkpoint):
    status, _, err = call("run", checkpoint, "-p", "")
    assert status == 2
    assert "the prompt is empty" in err
    status, _, err = call("run", checkpoint, "-p", "a", "--backend", "nosuch")
    assert status == 2
    assert "no such backend" in err


def test_eval_compares_with_the_source(call, hold_to_schema, checkpoint, tiny, tmp_path):
    text = tmp_path / "t.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 20)
    options = ("--source", tiny, "--text", text, "--windows", 2, "--length", 64)
    status, out, _ = call("eval", checkpoint, *options)
    assert status == 0
    assert "KL divergence" in out
    assert "all 14 layers err as fresh FP8 rounding does" in out
    status, out, _ = call("eval", checkpoint, *options, "--bound", 0.001, "--json")
    assert status == 1
    found = json.loads(out)
    hold_to_schema("eval", found)
    assert found["first_suspect"] == "model.layers.0.self_attn.q_proj"
    assert found["tokens"] == 2 * 63


def test_inspect_lists_kinds_rules_and_the_account(call, checkpoint, tiny):
    status, out, _ = call("inspect", checkpoint)
    assert status == 0
    assert "modelopt FP8, written by anyfp8" in out
    assert "every one of 49 tensors is accounted for" in out
    assert "ignore rule 'lm_head' matched 1 module (lm_head)" in out
    status, out, _ = call("inspect", checkpoint, "--json")
    found = json.loads(out)
    assert len(found["layers"]) == 14
    assert found["unaccounted"] == []
    status, out, _ = call("inspect", tiny)
    assert status == 0
    assert "not quantized to FP8" in out


def test_inspect_exits_1_when_a_tensor_has_no_place(call, checkpoint, tmp_path):
    import shutil

    from safetensors.torch import load_file, save_file

    folder = tmp_path / "odd"
    shutil.copytree(checkpoint, folder)
    stored = load_file(folder / "model.safetensors")
    stored["model.layers.0.mlp.up_proj.weight_scales"] = torch.ones(1)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    status, out, err = call("inspect", folder)
    assert status == 1
    assert "weight_scales" in out + err


def test_an_absent_checkpoint_is_one_error_without_a_traceback(call):
    for verb in (("inspect", "nowhere"), ("run", "nowhere", "-p", "x"), ("eval", "nowhere")):
        status, out, err = call(*verb)
        assert status == 1
        assert out == ""
        assert err.startswith("error: no ")
        assert "Traceback" not in err


def test_wrong_commands_and_variables_exit_2(call, monkeypatch, checkpoint):
    assert call("nosuch")[0] == 2
    assert call("run", checkpoint)[0] == 2
    monkeypatch.setenv("ANYFP8_FORCE_FP8_MARLIN", "maybe")
    status, _, err = call("run", checkpoint, "-p", "x")
    assert status == 2
    assert "ANYFP8_FORCE_FP8_MARLIN" in err


def test_version_and_help_need_no_torch():
    code = (
        "import sys; sys.argv = ['anyfp8', '--help']\n"
        "import anyfp8.cli\n"
        "try:\n    anyfp8.cli.main()\n"
        "except SystemExit as stop:\n    assert not stop.code\n"
        "assert 'torch' not in sys.modules and 'triton' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "quantize" in done.stdout


STATIC = Path(__file__).parents[1] / "data" / "checkpoints" / "finegrained-static"
SCALE = "model.layers.0.self_attn.q_proj.activation_scale"


def test_unusable_static_scales_are_refused_by_name_unless_asked(call):
    status, _, err = call("inspect", STATIC)
    assert status == 1
    assert f"cannot use the scale {SCALE}" in err
    assert "--dynamic-fallback" in err
    status, out, err = call("inspect", STATIC, "--dynamic-fallback")
    assert status == 0
    assert "w8a8-tensor-dynamic" in out
    assert "activations quantized dynamically: model.layers.0.self_attn.q_proj" in err


def test_run_and_eval_fall_back_when_asked(call, checkpoint, tmp_path):
    folder = tmp_path / "unusable"
    shutil.copytree(checkpoint, folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.input_scale"
    save_file(tensors | {name: torch.zeros(())}, folder / "model.safetensors", {"format": "pt"})
    run = ("run", folder, "-p", "Hi", "--raw", "--max-tokens", 2)
    measure = ("eval", folder, "--windows", 1, "--length", 32)
    for verb in (run, measure):
        status, _, err = call(*verb)
        assert status == 1
        assert name in err
        status, _, err = call(*verb, "--dynamic-fallback")
        assert status == 0
        assert "1 layer w8a8-tensor-dynamic" in err


def test_eval_computes_as_an_official_runtime_does(call, checkpoint, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 20)
    given = ("eval", checkpoint, "--text", text, "--windows", 1, "--length", 64, "--json")
    found = {}
    for emulate in (None, "w8a8", "quark"):
        status, out, err = call(*given, *(("--emulate", emulate) if emulate else ()))
        assert status == 0, err
        found[emulate] = json.loads(out)
    assert len({document["perplexity"] for document in found.values()}) == 3
    assert found["quark"]["served"][0].startswith("14 layers as quark computes them")
    status, _, err = call(*given, "--emulate", "vllm")
    assert status == 2
    assert "w8a8, compressed-tensors, quark, modelopt" in err
