"""The reference quantizers, against torch formulas written here and tables by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anyfp8 import fp8, reference
from anyfp8.errors import InputError
from anyfp8.problem import QTensor, Scheme

INF, NAN = math.inf, math.nan
E4M3 = torch.float8_e4m3fn
FLOOR_SCALE = torch.tensor(1e-10, dtype=torch.float32) / torch.tensor(448.0)


def torch_quantize(x: torch.Tensor, dims: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale over `dims`, in torch's own words, for finite x."""
    scale = x.float().abs().amax(dims, keepdim=True).clamp(min=1e-10) / torch.tensor(448.0)
    q = (x.float() * (torch.tensor(1.0) / scale)).clamp(-448.0, 448.0).to(E4M3)
    return q, scale


def bits(t: torch.Tensor) -> torch.Tensor:
    t = t.contiguous()
    return (t if t.dim() else t.reshape(1)).view(torch.uint8)


def assert_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert got.stride() == want.stride()
    assert torch.equal(bits(got), bits(want))


def samples(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of very different size, so that a scale taken from the wrong row shows."""
    size = torch.tensor(10.0).pow(torch.linspace(-6, 4, rows)).unsqueeze(1)
    return (torch.randn(rows, columns) * size).to(dtype)


DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])


class TestAgainstTorch:
    @DTYPES
    def test_per_tensor(self, dtype):
        x = samples(7, 96, dtype)
        q = reference.quantize_per_tensor(x)
        data, scale = torch_quantize(x, (0, 1))
        assert_bits(q.data, data)
        assert_bits(q.scale, scale.reshape(()))

    @DTYPES
    def test_per_token(self, dtype):
        x = samples(33, 72, dtype)
        q = reference.quantize_per_token(x)
        data, scale = torch_quantize(x, (1,))
        assert_bits(q.data, data)
        assert_bits(q.scale, scale)
        assert q.block is None

    @DTYPES
    @pytest.mark.parametrize("group", [16, 32, 64, 128, 256])
    def test_per_group(self, dtype, group):
        x = samples(9, 512, dtype)
        q = reference.quantize_per_group(x, group)
        data, scale = torch_quantize(x.unflatten(-1, (-1, group)), (2,))
        assert_bits(q.data, data.flatten(1))
        assert_bits(q.scale, scale.squeeze(-1).contiguous())
        assert q.block == (1, group)

    @DTYPES
    def test_block(self, dtype):
        w = samples(256, 384, dtype)
        q = reference.quantize_block(w)
        tiles = w.unflatten(0, (2, 128)).unflatten(2, (3, 128))
        data, scale = torch_quantize(tiles, (1, 3))
        assert_bits(q.data, data.flatten(2).flatten(0, 1))
        assert_bits(q.scale, scale.reshape(2, 3))

    def test_edge_blocks_are_the_smaller_blocks_alone(self):
        w = samples(200, 300, torch.bfloat16)
        q = reference.quantize_block(w)
        assert q.scale.shape == (2, 3)
        assert q.data.shape == w.shape
        for i, rows in enumerate((slice(0, 128), slice(128, 200))):
            for j, columns in enumerate((slice(0, 128), slice(128, 256), slice(256, 300))):
                data, scale = torch_quantize(w[rows, columns], (0, 1))
                assert_bits(q.scale[i, j], scale.reshape(()))
                assert torch.equal(bits(q.data[rows, columns]), bits(data))

    def test_the_last_group_is_shorter(self):
        x = samples(3, 200, torch.bfloat16)
        q = reference.quantize_per_group(x, 128)
        data, scale = torch_quantize(x[:, 128:], (1,))
        assert_bits(q.scale[:, 1:].contiguous(), scale)
        assert torch.equal(bits(q.data[:, 128:]), bits(data))

    def test_more_dimensions(self):
        x = torch.randn(2, 3, 5, 64)
        q = reference.quantize_per_token(x)
        flat = reference.quantize_per_token(x.reshape(30, 64))
        assert torch.equal(bits(q.data).reshape(30, 64), bits(flat.data))
        assert q.scale.shape == (2, 3, 5, 1)
        grouped = reference.quantize_per_group(x, 32)
        assert grouped.scale.shape == (2, 3, 5, 2)
        experts = torch.randn(4, 130, 256)
        blocks = reference.quantize_block(experts)
        one = reference.quantize_block(experts[2])
        assert torch.equal(blocks.scale[2], one.scale)
        assert torch.equal(bits(blocks.data[2]), bits(one.data))

    def test_a_strided_input_gives_the_same_bytes(self):
        x = torch.randn(64, 48).t()
        assert not x.is_contiguous()
        q = reference.quantize_per_token(x)
        assert_bits(q.data, reference.quantize_per_token(x.contiguous()).data)

    def test_no_rows(self):
        x = torch.empty(0, 64, dtype=torch.bfloat16)
        assert reference.quantize_per_token(x).scale.shape == (0, 1)
        assert reference.quantize_per_group(x, 32).scale.shape == (0, 2)
        assert reference.quantize_per_tensor(x).scale.item() == FLOOR_SCALE
        w = reference.quantize_per_token(torch.ones(8, 64))
        assert reference.linear(x, w, Scheme("channel", "token", True)).shape == (0, 8)


@pytest.mark.gpu
@DTYPES
def test_the_gpu_gives_the_bytes_of_the_cpu(dtype):
    x = samples(200, 512, dtype)
    for quantize in (
        reference.quantize_per_tensor,
        reference.quantize_per_token,
        lambda t: reference.quantize_per_group(t, 128),
        lambda t: reference.quantize_per_group(t, 128, ue8m0=True),
        reference.quantize_block,
    ):
        here, there = quantize(x), quantize(x.cuda())
        assert_bits(there.data.cpu(), here.data)
        assert_bits(there.scale.cpu(), here.scale)


class TestByHand:
    @pytest.mark.parametrize(("scale", "code", "q"), [(2.0, 0x48, 4.0), (0.5, 0x58, 16.0)])
    def test_the_scale_divides_and_comes_back(self, scale, code, q):
        got = reference.quantize_per_tensor(torch.tensor([8.0]), torch.tensor(scale))
        assert got.codes.tolist() == [code]
        assert got.data.float().tolist() == [q]
        assert reference.dequantize(got).tolist() == [8.0]

    def test_the_largest_becomes_448(self):
        x = torch.tensor([[448.0, 224.0, 1.0, 0.0], [-0.875, 0.4375, 0.0, 0.25]])
        q = reference.quantize_per_token(x)
        assert q.scale.tolist() == [[1.0], [0.001953125]]
        assert q.data.float().tolist() == [[448, 224, 1, 0], [-448, 224, 0, 128]]

    def test_a_static_scale_saturates(self):
        x = torch.tensor([1.0, 600.0, -900.0, 3.0, 448.0, 464.0, 464.1])
        one = torch.tensor([1.0])
        q = reference.quantize_per_tensor(x, one)
        assert q.data.float().tolist() == [1, 448, -448, 3, 448, 448, 448]
        assert q.scale.shape == ()
        fnuz = reference.quantize_per_tensor(x, one, fp8.E4M3FNUZ)
        assert fnuz.data.float().tolist() == [1, 240, -240, 3, 240, 240, 240]

    def test_power_of_two_scales_round_up_before_the_data_are_quantized(self):
        # amax 3: 3/448 = 0.0067 rounds up to 2^-7; 3 / 2^-7 = 384, 1 / 2^-7 = 128
        x = torch.tensor([[3.0, 1.0, -0.5, 0.0] + [0.0] * 12])
        q = reference.quantize_per_group(x, 16, ue8m0=True)
        assert q.scale.tolist() == [[0.0078125]]
        assert q.data.float()[0, :4].tolist() == [384, 128, -64, 0]
        # amax 3.5 sits on a power of two already and is not doubled
        exact = reference.quantize_per_group(torch.full((1, 16), 3.5), 16, ue8m0=True)
        assert exact.scale.tolist() == [[0.0078125]]
        assert exact.data.float()[0, 0] == 448

    def test_packed_exponents_are_unpacked_lowest_byte_first(self):
        # 0x7F is 2^0, 0x80 2^1, 0x78 2^-7; the fourth byte and the last three are padding
        packed = torch.tensor([[0x0078807F, 0x00000081]], dtype=torch.int32)
        scale = reference.unpack_ue8m0(packed, 5)
        assert scale.tolist() == [[1.0, 2.0, 2.0**-7, 2.0**-127, 4.0]]
        assert reference.unpack_ue8m0(packed, 3).tolist() == [[1.0, 2.0, 2.0**-7]]

    def test_block_scales_may_be_powers_of_two_too(self):
        w = torch.zeros(128, 256)
        w[3, 5], w[7, 200] = 3.0, 448.0
        q = reference.quantize_block(w, ue8m0=True)
        assert q.scale.tolist() == [[0.0078125, 1.0]]

    def test_a_scale_that_is_rounded_up_takes_the_codes_along(self):
        w = torch.randn(128, 128, generator=torch.Generator().manual_seed(0)) * 0.7
        fine, again = reference.quantize_block(w), reference.quantize_block(w, ue8m0=True)
        up = torch.exp2(torch.ceil(torch.log2(w.abs().max() / 448)))
        assert again.scale == up

        def error(values):
            return ((values - w).norm() / w.norm()).item()

        assert error(reference.dequantize(again)) == pytest.approx(0.027, abs=0.002)
        assert error(reference.dequantize(fine)) == pytest.approx(0.027, abs=0.002)
        # the old codes under the new scale are all too large
        inflated = up / (w.abs().max() / 448) - 1
        assert error(fine.data.float() * up) == pytest.approx(inflated.item(), rel=0.05)
        assert inflated > 0.1


class TestZeros:
    @pytest.mark.parametrize("rows", [1, 2, 17])
    def test_zero_tensors_give_zero_codes_and_a_positive_scale(self, rows):
        x = torch.zeros(rows, 128, dtype=torch.bfloat16)
        for q in (
            reference.quantize_per_tensor(x),
            reference.quantize_per_token(x),
            reference.quantize_per_group(x, 128),
            reference.quantize_block(x),
        ):
            assert (q.scale == FLOOR_SCALE).all()
            assert not q.codes.any()
            assert not reference.dequantize(q).any()

    def test_zero_blocks_leave_ordinary_ones_alone(self):
        w = torch.zeros(256, 256)
        w[0, 0] = 1.0
        q = reference.quantize_block(w)
        assert torch.equal(reference.dequantize(q), w)
        assert q.scale[0, 0] == torch.tensor(1.0) / torch.tensor(448.0)
        assert q.scale.isfinite().all()

    def test_a_zero_row_in_a_matrix(self):
        x = torch.randn(5, 64)
        whole = reference.quantize_per_token(x)
        x[2] = 0
        q = reference.quantize_per_token(x)
        assert not q.codes[2].any()
        others = [0, 1, 3, 4]
        assert torch.equal(q.codes[others], whole.codes[others])

    def test_minus_zero_dequantizes_to_zero(self):
        q = reference.quantize_per_token(torch.tensor([[-0.0, 1.0]]))
        assert q.codes.tolist() == [[0x80, 0x7E]]
        assert reference.dequantize(q)[0, 0] == 0


class TestNonFinite:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_inf_saturates_nan_stays_and_neighbours_keep_their_values(self, dtype):
        x = torch.tensor([[1, 2, INF, 4], [1, 2, NAN, 4], [1, 2, -INF, NAN]], dtype=dtype)
        q = reference.quantize_per_token(x)
        by_448 = [torch.tensor(v) / torch.tensor(448.0) for v in (4.0, 4.0, 2.0)]
        assert q.scale.flatten().tolist() == [v.item() for v in by_448]
        # 1, 2, 4 of 4 are 112, 224, 448; of 2 they are 224, 448
        assert q.codes.tolist() == [
            [0x6E, 0x76, 0x7E, 0x7E],
            [0x6E, 0x76, 0x7F, 0x7E],
            [0x76, 0x7E, 0xFE, 0x7F],
        ]

    def test_a_row_without_a_finite_value(self):
        q = reference.quantize_per_token(torch.tensor([[INF, -INF, NAN, INF]]))
        assert q.scale.item() == FLOOR_SCALE
        assert q.codes.tolist() == [[0x7E, 0xFE, 0x7F, 0x7E]]

    def test_other_groups_and_blocks_do_not_notice(self):
        x = torch.randn(2, 64)
        clean = reference.quantize_per_group(x, 32)
        x[0, 3] = NAN
        x[1, 40] = INF
        q = reference.quantize_per_group(x, 32)
        assert torch.equal(q.codes[0, 32:], clean.codes[0, 32:])
        assert torch.equal(q.codes[1, :32], clean.codes[1, :32])
        assert torch.equal(q.scale[0, 1], clean.scale[0, 1])

    def test_nan_shows_in_the_product(self):
        x = torch.tensor([[1.0, NAN], [1.0, 1.0]])
        w = reference.quantize_per_token(torch.eye(2))
        y = reference.linear(x, w, Scheme("channel", "token", True))
        assert y[0].isnan().all()
        assert y[1].tolist() == [1.0, 1.0]


class TestTiny:
    @pytest.mark.parametrize("value", [1e-38, 9.2e-41, 1e-30, 1e-12, 1e-10, 1e-45])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_tiny_values_are_near_or_zero_and_finite(self, value, dtype):
        x = torch.full((2, 128), value, dtype=dtype)
        for q in (
            reference.quantize_per_tensor(x),
            reference.quantize_per_token(x),
            reference.quantize_per_group(x, 64),
            reference.quantize_per_group(x, 64, ue8m0=True),
            reference.quantize_block(x),
        ):
            back = reference.dequantize(q)
            assert back.isfinite().all()
            # half a step of the smallest code at the scale floor
            assert ((back - x.float()).abs() <= x.float().abs() / 16 + FLOOR_SCALE / 1024).all()

    def test_a_tiny_value_among_ones_is_zero(self):
        x = torch.ones(1, 128)
        x[0, 7] = 1e-38
        q = reference.quantize_per_token(x)
        assert q.codes[0, 7] == 0
        assert (q.codes[0, :7] == 0x7E).all()

    @pytest.mark.parametrize("largest", [3e38, 6e4, 448.0])
    def test_huge_values(self, largest):
        x = torch.tensor([[largest, -largest, largest / 2, 0.0]])
        q = reference.quantize_per_token(x)
        assert q.codes.tolist() == [[0x7E, 0xFE, 0x76, 0x00]]
        assert reference.dequantize(q)[0].tolist() == pytest.approx(x[0].tolist(), rel=1e-6)


@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=64),
    st.sampled_from([1, 3, 16, 64]),
)
@settings(max_examples=150, deadline=None)
def test_the_error_is_at_most_half_a_step(values, group):
    x = torch.tensor([values])
    q = reference.quantize_per_group(x, group)
    scale = reference.expand_scale(q.scale, (1, group), x.shape).double()
    error = (reference.dequantize(q).double() - x.double()).abs()
    # relative 2^-4 of a normal code, 2^-10 of the scale below; and fp32 rounding of x · (1/scale)
    bound = torch.maximum(x.double().abs() / 16, scale * 2.0**-10) * (1 + 1e-6)
    assert (error <= bound).all()


class TestQuantizers:
    @pytest.mark.parametrize(
        ("scheme", "shape", "block"),
        [
            ("w8a16-tensor", (), None),
            ("w8a8-channel-token", (130, 1), None),
            ("w8a8-block128x128-group128", (2, 3), (128, 128)),
            ("w8a8-block1x32-group32-ue8m0", (130, 9), (1, 32)),
        ],
    )
    def test_weights_as_a_scheme_says(self, scheme, shape, block):
        w = torch.randn(130, 260)
        q = reference.quantize_weight(w, Scheme.parse(scheme))
        assert q.scale.shape == shape == Scheme.parse(scheme).weight_scale_shape(130, 260)
        assert q.block == block
        if scheme.endswith("ue8m0"):
            assert (q.scale.frexp().mantissa == 0.5).all()
        assert ((reference.dequantize(q) - w).norm() / w.norm()).item() < 0.03

    def test_activations_as_a_scheme_says(self):
        x = torch.randn(5, 256)
        assert reference.quantize_activation(x, Scheme("tensor")) is None
        static = reference.quantize_activation(
            x, Scheme("tensor", "tensor"), input_scale=torch.tensor([0.25])
        )
        assert static.scale.item() == 0.25
        dynamic = Scheme("tensor", "tensor", dynamic=True)
        # a dynamic scheme has no use for a scale that the file happens to hold
        loose = reference.quantize_activation(x, dynamic, input_scale=torch.tensor(9.0))
        assert loose.scale == x.abs().max() / torch.tensor(448.0)
        group = Scheme.parse("w8a8-block128x128-group128")
        assert reference.quantize_activation(x, group).scale.shape == (5, 2)

    def test_a_static_scheme_without_its_scale_is_refused(self):
        with pytest.raises(InputError, match="input_scale"):
            reference.quantize_activation(torch.ones(1, 8), Scheme("tensor", "tensor"))


class TestDequantize:
    def test_rounds_once_to_the_output_type(self):
        # 1.125 · 1.0038 = 1.12928 is above the middle of bf16's 1.125 and 1.1328125; rounding the
        # scale first would make it 1.0
        q = QTensor(torch.tensor([1.125]).to(E4M3), torch.tensor(1.0038))
        assert reference.dequantize(q, torch.bfloat16).tolist() == [1.1328125]

    def test_packed_scales_are_refused(self):
        q = QTensor(torch.ones(1, 4).to(E4M3), torch.ones(1, 1), packed=True)
        with pytest.raises(InputError, match="UE8M0"):
            reference.dequantize(q)

    def test_codes_survive_16_bits(self):
        # bf16(q · s) / s rounds back to q for every code and awkward scales
        codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
        codes = codes[(codes & 0x7F) != 0x7F]
        for scale in (0.0123, 1 / 448, 3.7e-5, 1.9999999):
            q = QTensor(codes.view(E4M3), torch.tensor(scale))
            back = reference.dequantize(q, torch.bfloat16).float() / torch.tensor(scale)
            assert torch.equal(fp8.encode(back), codes)


class TestLinear:
    @pytest.mark.parametrize(
        "name", ["w8a8-tensor-static", "w8a8-tensor-dynamic", "w8a8-channel-token"]
    )
    def test_agrees_with_torchs_own_scaled_matmul(self, name):
        scheme = Scheme.parse(name)
        x = torch.randn(16, 64, dtype=torch.bfloat16)
        w = reference.quantize_weight(torch.randn(32, 64), scheme)
        static = torch.tensor(0.01)
        y = reference.linear(x, w, scheme, input_scale=static, out_dtype=torch.float32)
        a = reference.quantize_activation(x, scheme, static)
        assert a is not None
        rowwise = name.endswith("token")
        want = torch._scaled_mm(
            a.data,
            w.data.t(),
            scale_a=a.scale,
            scale_b=w.scale.t() if rowwise else w.scale,
            out_dtype=torch.bfloat16,
        )
        assert torch.allclose(y, want.float(), rtol=2**-7, atol=1e-3)

    def test_weight_only_multiplies_the_dequantized_weight(self):
        x = torch.randn(3, 2, 64, dtype=torch.bfloat16)
        bias = torch.randn(32)
        w = reference.quantize_weight(torch.randn(32, 64), Scheme("channel"))
        y = reference.linear(x, w, Scheme("channel"), bias=bias, out_dtype=torch.float32)
        dense = w.data.float() * w.scale
        want = torch.nn.functional.linear(x.double(), dense.double(), bias.double())
        assert torch.equal(y, want.float())
        assert y.shape == (3, 2, 32)

    def test_the_output_has_the_type_of_x(self):
        w = reference.quantize_weight(torch.ones(4, 8), Scheme())
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            assert reference.linear(torch.ones(2, 8, dtype=dtype), w, Scheme()).dtype == dtype

    def test_the_bias_is_added_before_the_one_rounding(self):
        # 256 + 0.75 + 0.5 = 257.25 rounds to 258 in bf16; rounding 256.75 first gives 256, then 256
        w = reference.quantize_per_tensor(torch.tensor([[1.0, 1.0]]), torch.tensor(1.0))
        x = torch.tensor([[256.0, 0.75]], dtype=torch.bfloat16)
        y = reference.linear(x, w, Scheme(), bias=torch.tensor([0.5]))
        assert y.item() == 258.0
