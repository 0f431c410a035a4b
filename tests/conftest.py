"""What tests share: no leftover settings, a seed, the command line; GPU tests only where one is."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from anyfp8 import reference

SCHEMAS = Path(__file__).parents[1] / "docs" / "schemas"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in os.environ:
        if name.startswith(("ANYFP8_", "SGLANG_")):
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
