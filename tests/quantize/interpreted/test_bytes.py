"""Every quantizer's kernel, run by Triton's interpreter, gives the reference's bytes."""

import pytest
import torch

from anyfp8 import testing
from anyfp8.tools.quantize_cases import cases

pytest.importorskip("triton")
# numpy, which the interpreter computes with, warns of the infinities and NaNs that the cases
# contain
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=c.name, marks=[pytest.mark.slow] if c.slow else []) for c in cases()],
)
def test_kernel_gives_the_bytes_of_the_reference(case, forbid_reference):
    x = case.x()
    before = x.clone()
    want = case.reference(x)
    forbid_reference()
    got = case.kernel(x)
    testing.assert_matches(got, want)
    assert torch.equal(x.isnan(), before.isnan())
    assert torch.equal(x[~x.isnan()], before[~x.isnan()])
