"""Known values through the kernels: codes and scales by hand, not from the reference."""

import math

import pytest
import torch

from anyfp8 import fp8, quantize
from anyfp8.integrations.sglang import _FNUZ_224

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
INF, NAN = math.inf, math.nan
ONE = torch.ones(())
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def dynamic(x):
    """x through every quantizer that computes its scale: (values, scale broadcast to them)."""
    k = x.shape[-1]
    for q in (
        quantize.per_tensor(x),
        quantize.per_token(x),
        quantize.per_group(x, k),
        quantize.per_group(x, k, layout="tma"),
        quantize.mla_per_tensor(x[None]),
    ):
        yield fp8.decode(q.codes).reshape(x.shape), q.scale.reshape(-1, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_stay_zeros_with_a_positive_scale(dtype):
    for values, scale in dynamic(torch.zeros(2, 128, dtype=dtype)):
        assert not values.any()
        assert ((scale > 0) & scale.isfinite()).all()


def test_a_zero_row_and_a_nearly_zero_weight_lose_nothing():
    x = torch.full((3, 128), 2.0)
    x[1] = 0
    q = quantize.per_token(x)
    assert (fp8.decode(q.codes) * q.scale).tolist() == x.tolist()
    w = torch.zeros(256, 256)
    w[0, 0] = 1
    q = quantize.per_block(w)
    values = fp8.decode(q.codes)
    assert values[0, 0] == 448
    assert values.count_nonzero() == 1
    assert q.scale[0, 0].item() == pytest.approx(1 / 448)
    assert (q.scale > 0).all()


@pytest.mark.parametrize(
    ("fmt", "most"), [(fp8.E4M3FN, 448), (fp8.E4M3FNUZ, 240), (_FNUZ_224, 224)], ids=str
)
def test_a_static_scale_saturates(fmt, most):
    x = torch.tensor([1.0, 600.0, -900.0, 3.0, INF, -INF])
    q = quantize.per_tensor(x, ONE, fmt=fmt)
    assert fp8.decode(q.codes, fmt).tolist() == [1, most, -most, 3, most, -most]


def test_rounding_near_the_largest_value_saturates():
    q = quantize.per_tensor(torch.tensor([448.0, 463.9, 464.0, 464.1]), ONE)
    assert q.codes.tolist() == [0x7E] * 4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_infinity_saturates_and_a_nan_shows_while_their_neighbours_keep_their_values(dtype):
    x = torch.tensor([[1, 2, INF, 4], [1, 2, NAN, 4], [1, 2, -INF, NAN]], dtype=dtype)
    q = quantize.per_token(x)
    # 448 / 4 = 112 and 448 / 2 = 224
    assert q.scale.flatten().tolist() == [
        pytest.approx(4 / 448),
        pytest.approx(4 / 448),
        pytest.approx(2 / 448),
    ]
    codes = q.codes.tolist()
    assert codes[0] == [0x6E, 0x76, 0x7E, 0x7E]
    assert codes[1] == [0x6E, 0x76, 0x7F, 0x7E]
    assert codes[2] == [0x76, 0x7E, 0xFE, 0x7F]
    q = quantize.per_token(x, nan_to_zero=True)
    assert q.codes[1].tolist() == [0x6E, 0x76, 0, 0x7E]


@pytest.mark.parametrize("value", [1e-38, 9.2e-41, 1e-30, 1e-12])
def test_tiny_values_stay_tiny(value):
    for values, scale in dynamic(torch.full((2, 128), value)):
        assert values.isfinite().all()
        back = values * scale
        assert ((back == 0) | ((back - value).abs() <= value / 16)).all()


def test_one_tiny_value_among_ones_is_zero():
    x = torch.ones(1, 128)
    x[0, 7] = 1e-38
    for values, scale in dynamic(x):
        assert scale.item() == pytest.approx(1 / 448)
        assert values[0, 7] == 0
        assert (values[0, :7] == 448).all()


@pytest.mark.parametrize(("scale", "code"), [(2.0, 0x48), (0.5, 0x58)])
def test_a_scale_divides(scale, code):
    q = quantize.per_tensor(torch.tensor([8.0]), torch.tensor(scale))
    assert q.codes.tolist() == [code]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_that_the_interpreters_own_cast_gets_wrong_are_right(dtype):
    # its cast makes 64 of 126.24, 18 of 17 and 384 of NaN
    x = torch.tensor([126.24, 17, 460, -460, NAN, 2**-10, 3 * 2**-10, -(2**-9)], dtype=dtype)
    q = quantize.per_tensor(x, ONE)
    assert q.codes.tolist() == [0x70, 0x58, 0x7E, 0xFE, 0x7F, 0x00, 0x02, 0x81]
    assert quantize.cast(x).view(torch.uint8).tolist() == q.codes.tolist()


def test_ties_round_to_even():
    x = torch.tensor([1.0625, 1.0625001, 1.1875, 1.1875001])
    assert quantize.cast(x).view(torch.uint8).tolist() == [0x38, 0x39, 0x3A, 0x3A]
