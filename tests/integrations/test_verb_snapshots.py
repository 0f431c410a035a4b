"""Verbs that load a model, as a person reads them: snapshots as in tests/test_cli.py.

What a random model says is masked too.
"""

from __future__ import annotations

import re

import pytest
import torch

from anyfp8.tools import demo
from anyfp8.tools.quantize import quantize_checkpoint

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="of a machine without a GPU: other kernels serve there"
)


@pytest.fixture(scope="module")
def checkpoint(tiny, tmp_path_factory):
    out = tmp_path_factory.mktemp("snapshots") / "fp8"
    quantize_checkpoint(tiny, out, calib_windows=2, calib_length=64)
    return out


@pytest.fixture
def held(call, hold_snapshot, monkeypatch, tmp_path, tiny, checkpoint):
    """Run a verb plain and in colour, and compare both with the same snapshot."""

    def hold(name, arguments, said=False):
        words = [a.replace("TINY", str(tiny)).replace("FP8", str(checkpoint)) for a in arguments]
        shown = []
        for colour in ("", "1"):
            monkeypatch.setenv("FORCE_COLOR", colour)
            status, out, err = call(
                *(w.replace("TMP", str(tmp_path / f"x{colour}")) for w in words)
            )
            assert "\x1b" not in out
            assert not colour or "\x1b[" in err or not re.search("(?m)^(next|warning):", err)
            err = re.sub(r"\x1b\[[\d;]*m", "", err)
            # transformers' own progress, which layers err most, and how wide their figures are
            err = re.sub(r"(?m)^.*\d+%\|.*\n", "", err)
            out = re.sub(r"model\.layers\.\d\.[\w.]+", "LAYER", out)
            out = re.sub(r"(?<=\S) {2,}", "  ", out)
            out = "<what the model says>\n" if said else out
            texts = [
                t.replace(str(tmp_path / "x1"), "TMP")
                .replace(str(tmp_path / "x"), "TMP")
                .replace(str(tiny), "TINY")
                .replace(str(checkpoint), "FP8")
                for t in (out, err)
            ]
            shown.append((status, *texts))
        hold_snapshot(name, arguments, shown[0])
        hold_snapshot(name, arguments, shown[1])

    return hold


def test_quantize_reads_as_before(held):
    options = ["--calib-windows", "2", "--calib-length", "64"]
    held("quantize", ["quantize", "TINY", "TMP", *options])
    held("quantize-no-such-scheme", ["quantize", "TINY", "TMP/x", "--scheme", "w9a9"])


def test_run_reads_as_before(held):
    held("run", ["run", "FP8", "-p", "Hello", "--max-tokens", "2"], said=True)
    held("run-no-such-backend", ["run", "FP8", "-p", "Hello", "--backend", "nosuch"])


def test_eval_reads_as_before(held):
    options = ["--source", "TINY", "--windows", "1", "--length", "64"]
    held("eval", ["eval", "FP8", *options])
    held("eval-suspect", ["eval", "FP8", *options, "--bound", "0.001"])


def test_demo_reads_as_before(held, monkeypatch):
    # the whole demo, on a model and a text that take no time
    monkeypatch.setattr(demo, "WINDOWS", 1)
    monkeypatch.setattr(demo, "LENGTH", 64)
    monkeypatch.setattr(demo, "generate", lambda *_: ([65, 66], 1.0))
    held("demo", ["demo", "--model", "TINY", "--out", "TMP"])
