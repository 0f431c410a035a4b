"""These tests need Triton's interpreter, which is chosen before Triton is imported.

`tests/quantize/test_interpreter.py` runs this folder in a process of its own.
"""

import os

import pytest
import torch

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture(autouse=True)
def bf16_is_rounded(monkeypatch):
    """Round fp32 to bf16 as GPUs do: the interpreter truncates."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(values, source, target, mode):
        if source != tl.float32 or target != tl.bfloat16:
            return convert(values, source, target, mode)
        bits = torch.tensor(values).view(torch.float32).bfloat16().view(torch.int16)
        return bits.numpy().view("uint16")

    monkeypatch.setattr(interpreter, "_convert_float", rounded)
