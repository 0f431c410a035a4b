"""Every quantizer's kernel, run by Triton's interpreter, gives the reference's bytes."""

import pytest
import torch

from anyfp8 import reference, testing
from anyfp8.tools.quantize_cases import cases

pytest.importorskip("triton")
# numpy, which the interpreter computes with, warns of the infinities and NaNs that the cases
# contain
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def forbid_reference(monkeypatch):
    """Make the PyTorch path raise, so that a result proves that a kernel ran."""

    def raise_(*args, **kwargs):
        raise AssertionError("the reference was called where a kernel was promised")

    for name in (
        "quantize_per_token",
        "quantize_per_group",
        "quantize_per_tensor",
        "quantize_block",
        "quantize_with",
    ):
        monkeypatch.setattr(reference, name, raise_)
    monkeypatch.setattr("anyfp8.fp8.encode", raise_)


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=c.name, marks=[pytest.mark.slow] if c.slow else []) for c in cases()],
)
def test_kernel_gives_the_bytes_of_the_reference(case, monkeypatch):
    x = case.x()
    before = x.clone()
    want = case.reference(x)
    forbid_reference(monkeypatch)
    got = case.kernel(x)
    testing.assert_matches(got, want)
    assert torch.equal(x.isnan(), before.isnan())
    assert torch.equal(x[~x.isnan()], before[~x.isnan()])
