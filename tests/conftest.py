"""What every test needs: no leftover settings, a fixed seed, and GPU tests only where a GPU is."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in os.environ:
        if name.startswith(("ANYFP8_", "SGLANG_")):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
