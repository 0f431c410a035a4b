"""The errors: four parts, one tree, and they survive pickling (worker processes raise them)."""

from __future__ import annotations

import copy
import pickle

import pytest

from anyfp8 import errors
from anyfp8.errors import AnyFp8Error

TREE = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, AnyFp8Error)]
PARTS = {"got": "2 shards", "want": "3 shards", "hint": "download it again"}


@pytest.mark.parametrize("cls", TREE)
def test_the_four_parts_are_told_in_order(cls):
    error = cls("cannot read model.safetensors", **PARTS)
    assert str(error).splitlines() == [
        "cannot read model.safetensors",
        "  got: 2 shards",
        "  want: 3 shards",
        "  hint: download it again",
    ]


@pytest.mark.parametrize("cls", TREE)
def test_parts_that_are_missing_leave_no_line(cls):
    assert str(cls("it failed")) == "it failed"
    assert str(cls("it failed", hint="try again")) == "it failed\n  hint: try again"


@pytest.mark.parametrize("again", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy])
@pytest.mark.parametrize("cls", TREE)
def test_pickling_keeps_the_class_and_the_parts(cls, again):
    error = again(cls("it failed", **PARTS))
    assert type(error) is cls
    assert (error.what, error.got, error.want, error.hint) == ("it failed", *PARTS.values())
    assert str(error) == str(cls("it failed", **PARTS))


def test_pickling_keeps_the_reasons_of_no_backend():
    reasons = {"cutlass": "the package is not installed", "triton_row": "there is no GPU"}
    error = errors.NoBackend("no kernel for w8a8-tensor-static", reasons=reasons)
    assert pickle.loads(pickle.dumps(error)).reasons == reasons
    reasons.clear()
    assert error.reasons


def test_python_callers_can_catch_the_builtin_kinds():
    assert issubclass(errors.InputError, ValueError)
    assert issubclass(errors.EnvError, ValueError)
    assert issubclass(errors.MissingPackage, ImportError)
    assert {c.__name__ for c in TREE} >= {
        *["AnyFp8Error", "InputError", "EnvError", "CheckpointError", "CalibrationError"],
        *["NoBackend", "TableError", "DeviceError", "MissingPackage"],
    }
