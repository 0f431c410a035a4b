"""What tests share: no leftover settings, a seed, the command line; GPU tests only where one is."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch

from anyfp8 import reference

HERE = Path(__file__).parent
SCHEMAS = HERE.parent / "docs" / "schemas"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in os.environ:
        if name.startswith(("ANYFP8_", "SGLANG_")) or name in ("NO_COLOR", "FORCE_COLOR"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


@pytest.fixture
def call(monkeypatch, capsys):
    """Run the command line; returns (exit status, stdout, stderr)."""
    from anyfp8 import cli

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["anyfp8", *map(str, arguments)])
        try:
            cli.main()
            status = 0
        except SystemExit as stop:
            status = stop.code or 0
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def hold_to_schema():
    """Check what a verb printed with `--json`, already parsed, against docs/schemas/NAME.json."""
    import jsonschema

    def hold(name, found):
        schema = json.loads((SCHEMAS / f"{name}.json").read_text())
        jsonschema.Draft202012Validator(schema).validate(found)

    return hold


def masked(text, tmp):
    """The wording alone."""
    text = text.replace(str(HERE / "data" / "checkpoints"), "CHECKPOINTS").replace(str(tmp), "TMP")
    text = text.replace(str(HERE.parent), "ROOT")
    # how far something was after so many seconds
    text = re.sub(r"(?m)^.+ \d+(/\d+)? \d+ s( .*)?\n", "", text)
    text = re.sub(r"\b(how|split_k|slices)=\w+ ?", "", text)
    text = re.sub(r"(?<![\w.])\d[\d,.]*(e[-+]\d+)?(x\d+)?\+?\w*", "#", text)
    text = re.sub(r"\b(block_m|block_n|block_k|group_m|num_warps|num_stages)=#", r"\1=#", text)
    text = re.sub(r"(?m)^estimates of .*$", "estimates of ...", text)
    # which other libraries are installed is this machine's affair
    text = re.sub(r"(?m)^.*needs (the package|Triton).*\n", "", text)
    # columns are as wide as the figures in them
    text = re.sub(r"(?<=\S) {2,}", "  ", re.sub(r"-{3,}", "---", text))
    text = re.sub(r"(?m)^ {2,}(?=#)", "  ", text)
    return "\n".join(line.rstrip() for line in text.splitlines())


@pytest.fixture
def hold_snapshot(tmp_path):
    """Compare a text, or what `call` returned for arguments, with tests/snapshots/NAME.txt."""

    def hold(name, shown, found=None):
        if found is not None:
            status, *streams = found
            lines = [f"$ anyfp8 {' '.join(map(str, shown))}", f"exit status {status}"]
            for title, text in zip(("stdout", "stderr"), streams, strict=True):
                if text:
                    lines += [f"--- {title}", masked(text, tmp_path)]
            shown = "\n".join(lines)
        path = HERE / "snapshots" / f"{name}.txt"
        if os.environ.get("UPDATE_SNAPSHOTS"):
            path.write_text(shown + "\n")
        assert path.is_file(), "run this test once with UPDATE_SNAPSHOTS=1"
        assert shown + "\n" == path.read_text(), "if it reads better now: UPDATE_SNAPSHOTS=1"

    return hold


@pytest.fixture
def forbid_reference(monkeypatch):
    """Call it to make the PyTorch quantizers raise, so that a result proves that a kernel ran."""

    def refuse(*args, **kwargs):
        raise AssertionError("the reference was called where a kernel was promised")

    def forbid():
        for name in ("per_token", "per_group", "per_tensor"):
            monkeypatch.setattr(reference, f"quantize_{name}", refuse)
        monkeypatch.setattr(reference, "quantize_block", refuse)
        monkeypatch.setattr(reference, "quantize_with", refuse)
        monkeypatch.setattr("anyfp8.fp8.encode", refuse)

    return forbid


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
