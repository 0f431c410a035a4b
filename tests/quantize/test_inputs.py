"""What the quantizers refuse, before any launch, and how outputs are laid out."""

from contextlib import contextmanager

import pytest
import torch

from anyfp8 import fp8, quantize, reference, testing
from anyfp8.errors import InputError
from anyfp8.problem import Scheme
from anyfp8.quantize.rows import fold

X = testing.random_rows(6, 256)


@contextmanager
def refused(match=None):
    """An InputError with all four parts, one of which matches."""
    with pytest.raises(InputError, match=match) as error:
        yield
    assert error.value.what
    assert error.value.got
    assert error.value.want
    assert error.value.hint


ALL = [quantize.per_token, quantize.per_group, quantize.per_tensor, quantize.per_block]


@pytest.mark.parametrize("quantizer", ALL)
@pytest.mark.parametrize(
    "x",
    [torch.ones(2, 8, dtype=torch.int32), torch.ones(2, 8, dtype=torch.float64), torch.ones(3, 0)],
    ids=["int32", "float64", "no-columns"],
)
def test_unusable_inputs_are_refused_with_four_parts(quantizer, x):
    with refused():
        quantizer(x)


@pytest.mark.parametrize(
    "out",
    [
        torch.empty(6, 255, dtype=torch.uint8),
        torch.empty(6, 256, dtype=torch.bfloat16),
        torch.empty(256, 6, dtype=torch.uint8).t(),
        torch.empty(1, 256, dtype=torch.uint8).expand(6, 256),
        torch.empty(6, 256, dtype=torch.uint8, device="meta"),
    ],
    ids=["shape", "dtype", "last-stride", "overlap", "device"],
)
@pytest.mark.parametrize("quantizer", ALL)
def test_an_out_that_does_not_fit_is_refused(quantizer, out):
    with refused("out"):
        quantizer(X, out=out)


@pytest.mark.parametrize(
    "scale",
    [
        torch.ones(2),
        torch.ones((), dtype=torch.float64),
        torch.ones((), dtype=torch.bfloat16),
        torch.ones((), device="meta"),
    ],
    ids=["two", "float64", "bf16", "device"],
)
def test_a_static_scale_is_one_fp32_element_beside_x(scale):
    with refused("scale"):
        quantize.per_tensor(X, scale)


def test_a_scale_cannot_be_given_and_asked_for():
    with refused("not both"):
        quantize.per_tensor(X, torch.ones(()), out_scale=torch.ones(()))


@pytest.mark.parametrize("eps", [0.0, -1.0, 1e-40, float("inf"), float("nan")])
@pytest.mark.parametrize("quantizer", [quantize.per_token, quantize.per_group, quantize.per_tensor])
def test_an_eps_without_a_finite_inverse_is_refused(quantizer, eps):
    with refused("eps"):
        quantizer(X, eps=eps)


@pytest.mark.parametrize("layout", ["tma", "packed"])
def test_layouts_of_whole_groups_refuse_a_shorter_last_one(layout):
    with refused("divides K"):
        quantize.per_group(X[:, :200].contiguous(), 128, layout=layout)


@pytest.mark.parametrize("group", [0, -128, 16384])
def test_a_group_size_out_of_range_is_refused(group):
    with refused("group"):
        quantize.per_group(X, group)


def test_an_unknown_layout_names_the_known_ones():
    with refused("row, column, tma, packed"):
        quantize.per_group(X, layout="transposed")


@pytest.mark.parametrize(
    "counts",
    [torch.ones(2, dtype=torch.int64), torch.ones(3, dtype=torch.int32)],
    ids=["int64", "three"],
)
def test_counts_are_one_int32_an_expert(counts):
    with refused("counts"):
        quantize.per_group(X.view(2, 3, 256), counts=counts)
    with refused("counts"):
        quantize.per_group(X, counts=counts)


def test_strided_counts_are_refused():
    counts = torch.ones(4, dtype=torch.int32)[::2]
    with refused("contiguous"):
        quantize.per_group(X.view(2, 3, 256), counts=counts)


def test_silu_mul_needs_two_halves():
    with refused("even number"):
        quantize.per_token(X[:, :255].contiguous(), silu_mul=True)


def test_a_number_for_the_scale_must_be_finite():
    with refused("inverse_scale"):
        quantize.cast(X, float("inf"))


@pytest.mark.parametrize("quantizer", ALL)
def test_no_rows_give_empty_data(quantizer):
    q = quantizer(torch.empty(0, 256, dtype=torch.bfloat16))
    assert q.data.shape == (0, 256)
    assert q.scale.numel() == (1 if quantizer is quantize.per_tensor else 0)


def test_no_rows_have_the_smallest_scale_per_tensor():
    q = quantize.per_tensor(torch.empty(0, 256))
    assert q.scale.item() == pytest.approx(1e-10 / 448)


def test_padded_rows_lie_behind_the_rows_of_x():
    q = quantize.per_token(X, pad_rows_to=64)
    assert q.data.shape == (6, 256)
    assert q.data.untyped_storage().nbytes() == 64 * 256
    assert q.scale.untyped_storage().nbytes() == 64 * 4
    testing.assert_matches(q, reference.quantize_per_token(X))


def test_outputs_are_written_where_they_were_given():
    data = torch.empty(6, 300, dtype=torch.float8_e4m3fn)[:, :256]
    scale = torch.full((6, 3), 7.0)[:, 1:2]
    q = quantize.per_token(X, out=data, out_scale=scale)
    assert q.data is data
    assert q.scale is scale
    assert torch.equal(q.codes, reference.quantize_per_token(X).codes)
    assert torch.equal(q.scale, reference.quantize_per_token(X).scale)


@pytest.mark.parametrize("name", ["w8a16-tensor", "w8a16-channel", "w8a16-block128x128"])
def test_weights_are_quantized_as_the_scheme_says(name):
    scheme = Scheme.parse(name)
    q = quantize.weight(X, scheme)
    assert tuple(q.scale.shape) == scheme.weight_scale_shape(6, 256)
    testing.assert_matches(q, reference.quantize_weight(X, scheme))


def test_only_valid_rows_of_each_expert_are_written():
    x = testing.random_rows(4 * 5, 256).view(4, 5, 256)
    counts = torch.tensor([0, 2, 5, 9], dtype=torch.int32)
    data = torch.full(x.shape, 0x55, dtype=torch.uint8)
    scale = torch.full((4, 5, 2), -1.0)
    quantize.per_group(x, 128, counts=counts, out=data, out_scale=scale)
    want = reference.quantize_per_group(x, 128)
    for expert, count in enumerate((0, 2, 5, 5)):
        assert torch.equal(data[expert, :count], want.codes[expert, :count])
        assert torch.equal(scale[expert, :count], want.scale[expert, :count])
        assert (data[expert, count:] == 0x55).all()
        assert (scale[expert, count:] == -1).all()


def test_scales_lie_as_their_layout_says():
    # strides as DeepGEMM and SGLang document them: rows fastest, padded to 16 bytes
    x = testing.random_rows(6, 640)
    assert quantize.per_group(x, 128, layout="row").scale.stride() == (5, 1)
    assert quantize.per_group(x, 128, layout="column").scale.stride() == (1, 6)
    assert quantize.per_group(x, 128, layout="tma").scale.stride() == (1, 8)
    packed = quantize.per_group(x, 128, layout="packed").scale
    assert packed.dtype == torch.int32
    assert packed.shape == (6, 2)
    assert packed.stride() == (1, 8)


def test_packed_exponents_stand_lowest_group_first():
    x = torch.ones(1, 80, dtype=torch.bfloat16)
    for group, exponent in enumerate((0, 3, -5, 10, 1)):
        x[0, 16 * group] = 448 * 2.0**exponent
    words = quantize.per_group(x, 16, layout="packed").scale[0].tolist()
    # scale 2^e has the exponent code 127 + e
    assert words[0] == 127 | 130 << 8 | 122 << 16 | 137 - 256 << 24
    assert words[1] == 128


def test_rows_fold_into_as_few_levels_as_their_strides_allow():
    x = torch.empty(4, 3, 5, 8)
    assert fold(x.shape[:-1], x.stride()[:-1]).inner == 60
    assert fold(x.shape[:-1], x.stride()[:-1]).outer == 1
    swapped = x.transpose(0, 1)
    assert fold(swapped.shape[:-1], swapped.stride()[:-1]) is None
    flat = x[:, :, 0].transpose(0, 1)
    rows = fold(flat.shape[:-1], flat.stride()[:-1])
    assert (rows.outer, rows.inner, rows.strides) == (3, 4, ((40, 120),))


def test_many_outer_rows_become_the_inner_level():
    rows = fold((70_000, 2), (10, 7))
    assert (rows.outer, rows.inner, rows.strides) == (2, 70_000, ((7, 10),))
    assert fold((70_000, 70_000), (70_001 * 3, 2)) is None


@pytest.mark.parametrize(
    ("values", "codes"),
    [
        ([1.0, 0.5, 2.0, 100.0, 448.0, -300.0, 2**-9], "38 30 40 6c 7e f9 01"),
        ([1, 600, -900, 3, 448, 464, 464.1], "38 7e fe 44 7e 7e 7e"),
        ([1.0625, 1.0625001, 1.1875, 1.1875001], "38 39 3a 3a"),
        ([float("inf"), float("-inf"), float("nan"), -0.0], "7e fe 7f 80"),
    ],
)
def test_bytes_of_well_known_values_with_scale_one(values, codes):
    q = quantize.per_tensor(torch.tensor(values, dtype=torch.float32), torch.ones(()))
    assert q.codes.numpy().tobytes().hex(" ") == codes


def test_a_scale_divides():
    # 8 with scale 2 is 4 (0x48), with scale 0.5 it is 16 (0x58)
    x = torch.tensor([8.0])
    assert quantize.per_tensor(x, torch.tensor(2.0)).codes.tolist() == [0x48]
    assert quantize.per_tensor(x, torch.tensor(0.5)).codes.tolist() == [0x58]


def test_zero_blocks_dequantize_to_zero():
    w = torch.zeros(256, 256)
    w[0, 0] = 1
    q = quantize.per_block(w)
    assert q.scale.isfinite().all()
    assert (q.scale > 0).all()
    assert torch.equal(reference.dequantize(q), w)


def test_fp8_e5m2_covers_its_range():
    q = quantize.cast(torch.tensor([1.0, 57344.0, 1e9, -1e9]), fmt=fp8.E5M2)
    assert q.float().tolist() == [1.0, 57344.0, 57344.0, -57344.0]
