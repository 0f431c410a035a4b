"""Triton's interpreter, in a process of its own: it must be chosen before Triton is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"


def run(*arguments):
    environment = dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    command = [sys.executable, "-m", "pytest", str(FOLDER), "-x", *arguments]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, cwd=FOLDER.parents[2]
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


def test_the_kernels_pass_in_the_interpreter():
    pytest.importorskip("triton")
    assert "passed" in run()


# 3, 30 and 15 minutes on a busy core
@pytest.mark.slow
@pytest.mark.parametrize("part", ["token", "group128", "not token and not group128"])
def test_the_kernels_pass_in_the_interpreter_at_large_sizes(part):
    pytest.importorskip("triton")
    assert "passed" in run("-m", "slow", "-k", part)
