from __future__ import annotations

import json

import pytest
import torch

from anyfp8.checkpoint import open_checkpoint


def quantized(call, tiny, out, *arguments):
    status, _, err = call("quantize", tiny, out, *arguments)
    assert status == 0, err
    return err


@pytest.mark.parametrize(
    ("scheme", "format", "written"),
    [
        ("fp8-channel", None, "modelopt"),
        ("fp8-channel", "compressed-tensors", "compressed-tensors"),
        ("w8a8-block128x128-group128", "finegrained", "fp8"),
        ("w8a16-channel", None, "compressed-tensors"),
    ],
)
def test_quantize_writes_the_format_asked_for_or_the_first_that_can(
    call, tiny, tmp_path, scheme, format, written
):
    asked = ("--format", format) if format else ()
    err = quantized(call, tiny, tmp_path / "out", "--scheme", scheme, *asked)
    assert open_checkpoint(tmp_path / "out").plan.format == written
    said = "layout compressed-tensors: ModelOpt's has no algorithm for w8a16-channel" in err
    assert said == (format is None and written != "modelopt")


def test_from_fp8_copies_codes_and_says_so(call, tiny, tmp_path):
    quantized(call, tiny, tmp_path / "mo", "--scheme", "fp8-channel")
    arguments = ("--from-fp8", "--format", "compressed-tensors")
    status, out, _ = call("quantize", tmp_path / "mo", tmp_path / "ct", *arguments)
    assert status == 0
    assert "layers with every code as it was" in out
    before, after = open_checkpoint(tmp_path / "mo"), open_checkpoint(tmp_path / "ct")
    for layer in before.layers():
        assert torch.equal(after.layer(layer.name).weight.codes, layer.weight.codes)


def test_from_fp8_refuses_what_loses_until_it_is_allowed(call, tiny, tmp_path):
    quantized(call, tiny, tmp_path / "mo", "--scheme", "fp8-block")
    arguments = ("quantize", tmp_path / "mo", tmp_path / "out", "--from-fp8")
    arguments = (*arguments, "--scheme", "fp8-channel")
    status, _, err = call(*arguments)
    assert status == 2
    assert "--requantize" in err
    status, out, _ = call(*arguments, "--requantize", "--json")
    assert status == 0
    report = json.loads(out)
    assert report["exact"] == 0
    assert 0 < report["relative_error"] < 0.03


@pytest.mark.parametrize("arguments", [("--from-fp8",), ("--requantize",)])
def test_options_of_conversion_are_refused_for_a_16_bit_model(call, tiny, tmp_path, arguments):
    status, _, err = call("quantize", tiny, tmp_path / "out", *arguments)
    assert status == 2
    assert "--from-fp8" in err
    assert not (tmp_path / "out").exists()
