from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anyfp8.checkpoint.scales import canonical_scale, fit_scale
from anyfp8.problem import Scheme

BLOCK = Scheme("block", block=(128, 128))


def test_e8m0_scales_are_powers_of_two():
    codes = torch.tensor([[120, 127], [130, 1]], dtype=torch.uint8)
    scale = canonical_scale(codes.view(torch.float8_e8m0fnu), BLOCK, 256, 256)
    assert scale.tolist() == [[2.0**-7, 1.0], [8.0, 2.0**-126]]
    assert torch.equal(canonical_scale(codes, BLOCK, 256, 256), scale)


@pytest.mark.parametrize(
    ("shape", "n", "k", "declared", "weight"),
    [
        ((1, 1), 100, 100, BLOCK, "block"),
        ((1, 1), 100, 100, Scheme(), "tensor"),
        ((1,), 1, 64, Scheme(), "tensor"),
        ((1,), 1, 64, Scheme("channel"), "channel"),
        ((2, 1), 2, 64, BLOCK, "channel"),
        ((2, 1), 200, 64, Scheme("channel"), "block"),
    ],
)
def test_the_config_decides_only_between_readings_that_fit(shape, n, k, declared, weight):
    found = fit_scale(shape, n, k, declared)
    assert found is not None
    assert found.weight == weight


@given(
    n=st.integers(1, 700),
    k=st.integers(1, 700),
    kind=st.sampled_from(["tensor", "channel", "block"]),
)
def test_every_stored_form_of_a_granularity_fits_it(n, k, kind):
    scheme = BLOCK if kind == "block" else Scheme(kind)
    rows, columns = -(-n // 128), -(-k // 128)
    forms = {
        "tensor": [(), (1,), (1, 1)],
        "channel": [(n,), (n, 1)],
        "block": [(rows, columns), (rows, 1, columns, 1)],
    }[kind]
    for shape in forms:
        assert fit_scale(shape, n, k, scheme) == scheme
    assert fit_scale((n + 1, k + 1), n, k, scheme) is None or (n + 1, k + 1) in (
        (rows, columns),
        (n, 1),
    )
