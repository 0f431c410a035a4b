"""Calls of layers ask Triton for nothing that `anyfp8 warm` did not compile, under equal keys."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from anyfp8.device import find_device
from anyfp8.problem import Scheme
from anyfp8.tools import warm
from anyfp8.tools.shapes import Layer, Model

CHILD = Path(__file__).with_name("keys_of_calls.py")
SCHEMES = (
    *("w8a8-channel-token", "w8a8-tensor-token", "w8a8-tensor-static", "w8a8-tensor-dynamic"),
    *("w8a8-block128x128-group128", "w8a8-block128x128-group128-ue8m0"),
    *("w8a16-tensor", "w8a16-channel", "w8a16-block128x128"),
)
LAYERS = [
    *((name, 4096, 4096, bias) for name in SCHEMES for bias in (False, True)),
    # tiles that are not full; many columns an SM
    *((name, 1000, 1040, False) for name in SCHEMES[::4]),
    *((name, 24576, 4096, False) for name in SCHEMES[::4]),
]


def keys(*arguments):
    done = subprocess.run([sys.executable, CHILD, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def forms(monkeypatch, tmp_path):
    """The forms that `warm` gives its compiling processes for the layers."""
    found = []

    def keep(target, forms, *rest):
        found.extend(forms)
        return {}

    monkeypatch.setattr(warm, "_compile", keep)
    layers = [Layer(name, Scheme.parse(name), n, k, bias) for name, n, k, bias in LAYERS]
    warm.warm(Model("layers", tuple(layers)), find_device("h200"), tmp_path / "cache")
    return found


def test_calls_ask_for_nothing_that_was_not_warmed(forms, tmp_path):
    path = tmp_path / "forms"
    # last first: the key of a kernel is no matter of what comes before it
    path.write_bytes(pickle.dumps(forms[::-1]))
    warmed, asked = keys("forms", str(path)), keys("calls", json.dumps(LAYERS))
    assert len(warmed) > 100
    assert len(asked) > 100
    missed = {key: name for key, name in asked.items() if key not in warmed}
    assert not missed, sorted(missed.values())
