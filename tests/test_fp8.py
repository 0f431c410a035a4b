"""The FP8 formats, against torch's own casts and tables written by hand."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anyfp8 import fp8
from anyfp8.errors import InputError, MissingPackage

FORMATS = [fp8.E4M3FN, fp8.E4M3FNUZ, fp8.E5M2]
INF, NAN = math.inf, math.nan
CODES = torch.arange(256, dtype=torch.int32).to(torch.uint8)

# every finite magnitude of e4m3fn: 8 subnormals, then 16 - 1 binades of 8 (the last lacks 480)
E4M3FN_MAGNITUDES = [
    *[0, 0.001953125, 0.00390625, 0.005859375, 0.0078125, 0.009765625, 0.01171875, 0.013671875],
    *[0.015625, 0.017578125, 0.01953125, 0.021484375],
    *[0.0234375, 0.025390625, 0.02734375, 0.029296875],
    *[0.03125, 0.03515625, 0.0390625, 0.04296875, 0.046875, 0.05078125, 0.0546875, 0.05859375],
    *[0.0625, 0.0703125, 0.078125, 0.0859375, 0.09375, 0.1015625, 0.109375, 0.1171875],
    *[0.125, 0.140625, 0.15625, 0.171875, 0.1875, 0.203125, 0.21875, 0.234375],
    *[0.25, 0.28125, 0.3125, 0.34375, 0.375, 0.40625, 0.4375, 0.46875],
    *[0.5, 0.5625, 0.625, 0.6875, 0.75, 0.8125, 0.875, 0.9375],
    *[1, 1.125, 1.25, 1.375, 1.5, 1.625, 1.75, 1.875],
    *[2, 2.25, 2.5, 2.75, 3, 3.25, 3.5, 3.75],
    *[4, 4.5, 5, 5.5, 6, 6.5, 7, 7.5],
    *[8, 9, 10, 11, 12, 13, 14, 15],
    *[16, 18, 20, 22, 24, 26, 28, 30],
    *[32, 36, 40, 44, 48, 52, 56, 60],
    *[64, 72, 80, 88, 96, 104, 112, 120],
    *[128, 144, 160, 176, 192, 208, 224, 240],
    *[256, 288, 320, 352, 384, 416, 448],
]


def torch_encode(x: torch.Tensor, fmt: fp8.Format) -> torch.Tensor:
    """clamp, torch's cast, canonical NaN: the definition, in torch's own words."""
    f = x.float()
    codes = f.clamp(-fmt.max, fmt.max).to(fmt.dtype).view(torch.uint8)
    return torch.where(f.isnan(), torch.tensor(fmt.nan_code, dtype=torch.uint8), codes)


def all_patterns(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)


def assert_same_codes(got: torch.Tensor, want: torch.Tensor, x: torch.Tensor) -> None:
    wrong = (got != want).nonzero().flatten()[:5]
    assert not wrong.numel(), [(x.flatten()[i].item(), hex(got[i]), hex(want[i])) for i in wrong]


class TestDecode:
    @pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
    def test_every_code_means_what_torch_says(self, fmt):
        want = CODES.view(fmt.dtype).float()
        got = fp8.decode(CODES, fmt)
        assert got.equal(want) or torch.equal(
            got.nan_to_num(nan=12345.0), want.nan_to_num(nan=12345.0)
        )
        assert torch.equal(got.signbit()[~got.isnan()], want.signbit()[~want.isnan()])

    def test_e4m3fn_is_the_hand_written_table(self):
        assert len(E4M3FN_MAGNITUDES) == 127
        got = fp8.decode(CODES).tolist()
        assert got[:127] == E4M3FN_MAGNITUDES
        assert got[128:255] == [-v for v in E4M3FN_MAGNITUDES]
        assert math.isnan(got[127])
        assert math.isnan(got[255])

    def test_e4m3fnuz_is_half_of_e4m3fn_with_one_nan(self):
        got = fp8.decode(CODES, fp8.E4M3FNUZ).tolist()
        assert got[:127] == [v / 2 for v in E4M3FN_MAGNITUDES]
        assert got[0x7F] == 240.0
        assert got[0xFF] == -240.0
        assert got[129:255] == [-v / 2 for v in E4M3FN_MAGNITUDES[1:]]
        assert [c for c, v in enumerate(got) if math.isnan(v)] == [0x80]

    def test_e5m2_landmarks(self):
        landmarks = {0x01: 2**-16, 0x04: 2**-14, 0x3C: 1.0, 0x3D: 1.25, 0x7B: 57344.0, 0xC0: -2.0}
        got = fp8.decode(CODES, fp8.E5M2).tolist()
        assert {c: got[c] for c in landmarks} == landmarks
        assert (got[0x7C], got[0xFC]) == (INF, -INF)
        assert all(math.isnan(got[c]) for c in (0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
    def test_sixteen_bit_results_are_exact(self, fmt, dtype):
        got = fp8.decode(CODES, fmt, dtype)
        assert got.dtype == dtype
        exact = fp8.decode_table(fmt).nan_to_num(nan=1.0, posinf=2.0, neginf=-2.0)
        assert torch.equal(got.float().nan_to_num(nan=1.0, posinf=2.0, neginf=-2.0), exact)

    def test_the_exponent_is_rebiased_in_both_sixteen_bit_types(self):
        codes = torch.tensor([0x38, 0x40, 0x7E, 0x01, 0x08], dtype=torch.uint8)
        for dtype in (torch.float16, torch.bfloat16):
            assert fp8.decode(codes, dtype=dtype).tolist() == [1, 2, 448, 2**-9, 2**-6]

    @pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
    def test_the_table_and_torch_dtypes_decode_alike(self, fmt):
        table = fp8.decode_table(fmt)
        got = fp8.decode(CODES.view(fmt.dtype), fmt)
        assert torch.equal(table.nan_to_num(nan=7.7), got.nan_to_num(nan=7.7))


class TestEncode:
    @pytest.mark.parametrize("encoder", [fp8.encode, fp8.encode_bits])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
    def test_all_16_bit_patterns_agree_with_torch(self, fmt, dtype, encoder):
        x = all_patterns(dtype)
        assert_same_codes(encoder(x, fmt), torch_encode(x, fmt), x)

    @pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
    def test_ties_of_every_pair_of_neighbours_go_to_the_even_code(self, fmt):
        codes = torch.arange(fmt.max_code, dtype=torch.int32)
        low = fp8.decode_table(fmt)[codes]
        high = fp8.decode_table(fmt)[codes + 1]
        middle = (low + high) / 2
        even = codes + (codes & 1)
        for encoder in (fp8.encode, fp8.encode_bits):
            assert torch.equal(encoder(middle, fmt).int(), even)
            just_over = torch.nextafter(middle, high)
            just_under = torch.nextafter(middle, low)
            assert torch.equal(encoder(just_over, fmt).int(), codes + 1)
            assert torch.equal(encoder(just_under, fmt).int(), codes)
            assert torch.equal(encoder(-just_over, fmt).int(), (codes + 1) | 0x80)

    @pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
    def test_random_fp32_patterns_agree_with_torch(self, fmt):
        bits = torch.randint(-(2**31), 2**31, (400_000,), dtype=torch.int64).to(torch.int32)
        x = bits.view(torch.float32)
        near = torch.randn(100_000) * torch.tensor(2.0).pow(torch.randint(-14, 10, (100_000,)))
        for values in (x, near):
            assert_same_codes(fp8.encode(values, fmt), torch_encode(values, fmt), values)
            assert_same_codes(fp8.encode_bits(values, fmt), torch_encode(values, fmt), values)

    @pytest.mark.slow
    @pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
    def test_every_fp32_magnitude_agrees_with_torch(self, fmt):
        step = 1 << 24
        for start in range(0, 2**31, step):
            bits = torch.arange(start, start + step, dtype=torch.int64).to(torch.int32)
            x = bits.view(torch.float32)
            assert_same_codes(fp8.encode_bits(x, fmt), torch_encode(x, fmt), x)

    @pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
    def test_every_code_survives_a_round_trip(self, fmt):
        kept = ~fp8.decode(CODES, fmt).isnan() & ~fp8.decode(CODES, fmt).isinf()
        codes = CODES[kept]
        assert torch.equal(fp8.encode(fp8.decode(codes, fmt), fmt), codes)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("encoder", [fp8.encode, fp8.encode_bits])
    def test_bytes_are_e4m3fn_and_not_tritons_e4b15(self, encoder, dtype):
        x = torch.tensor([1.0, 0.5, 2.0, 100.0, 448.0, -300.0, 2**-9], dtype=dtype)
        # 100 ties between 96 and 104, -300 rounds to -288
        want = [0x38, 0x30, 0x40, 0x6C, 0x7E, 0xF9, 0x01]
        assert encoder(x).tolist() == want

    @pytest.mark.parametrize("encoder", [fp8.encode, fp8.encode_bits])
    def test_values_past_the_largest_saturate(self, encoder):
        x = torch.tensor([1.0, 600.0, -900.0, 3.0, 448.0, 464.0, 464.1, INF, -INF])
        got = fp8.decode(encoder(x)).tolist()
        assert got == [1, 448, -448, 3, 448, 448, 448, 448, -448]
        fnuz = fp8.decode(encoder(x, fp8.E4M3FNUZ), fp8.E4M3FNUZ).tolist()
        assert fnuz == [1, 240, -240, 3, 240, 240, 240, 240, -240]
        wide = encoder(torch.tensor([57344.0, 61440.0, 1e30, -INF]), fp8.E5M2)
        assert wide.tolist() == [0x7B, 0x7B, 0x7B, 0xFB]

    @pytest.mark.parametrize("encoder", [fp8.encode, fp8.encode_bits])
    def test_every_nan_becomes_the_canonical_code(self, encoder):
        patterns = [0x7FC00000, 0x7F800001, 0x7FFFFFFF, -0x400000, -0x7FFFFF, -1]
        nans = torch.tensor(patterns, dtype=torch.int32).view(torch.float32)
        assert nans.isnan().all()
        assert encoder(nans).tolist() == [0x7F] * 6
        assert encoder(nans, fp8.E4M3FNUZ).tolist() == [0x80] * 6
        assert encoder(nans, fp8.E5M2).tolist() == [0x7F] * 6

    @pytest.mark.parametrize("encoder", [fp8.encode, fp8.encode_bits])
    def test_minus_zero_keeps_its_sign_only_where_the_format_has_one(self, encoder):
        x = torch.tensor([-0.0, -1e-30, 1e-30])
        assert encoder(x).tolist() == [0x80, 0x80, 0x00]
        assert encoder(x, fp8.E5M2).tolist() == [0x80, 0x80, 0x00]
        assert encoder(x, fp8.E4M3FNUZ).tolist() == [0x00, 0x00, 0x00]

    @pytest.mark.parametrize("encoder", [fp8.encode, fp8.encode_bits])
    def test_any_strides_and_shapes(self, encoder):
        x = torch.randn(6, 10).t()
        got = encoder(x)
        assert got.shape == x.shape
        assert got.is_contiguous()
        assert torch.equal(got, torch_encode(x.contiguous(), fp8.E4M3FN))
        assert encoder(torch.empty(0, 4)).shape == (0, 4)
        assert encoder(torch.tensor(1.0)).item() == 0x38

    @pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn])
    def test_other_dtypes_are_refused_by_name(self, dtype):
        with pytest.raises(InputError, match=str(dtype)):
            fp8.encode(torch.zeros(2, dtype=torch.float32).to(dtype))

    @pytest.mark.gpu
    @pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
    def test_the_gpu_encodes_and_decodes_as_the_cpu_does(self, fmt):
        for dtype in (torch.bfloat16, torch.float16):
            x = all_patterns(dtype)
            for encoder in (fp8.encode, fp8.encode_bits):
                assert_same_codes(encoder(x.cuda(), fmt).cpu(), torch_encode(x, fmt), x)
        got = fp8.decode(CODES.cuda(), fmt).cpu()
        assert torch.equal(got.nan_to_num(nan=7.7), fp8.decode_table(fmt).nan_to_num(nan=7.7))

    @given(st.floats(width=32, allow_nan=False), st.floats(width=32, allow_nan=False))
    @settings(max_examples=200, deadline=None)
    def test_encoding_keeps_order(self, a, b):
        low, high = sorted((a, b))
        values = fp8.decode(fp8.encode_bits(torch.tensor([low, high])))
        assert values[0] <= values[1]


class TestUe8m0:
    @pytest.mark.parametrize(
        ("scale", "code"),
        [
            (1.0, 127),
            (1.0000001, 128),
            (1.5, 128),
            (2.0, 128),
            (2.0000002, 129),
            (0.5, 126),
            (0.50000006, 127),
            (0.4999999701976776, 126),
            (448.0, 136),
            (1e-10 / 448, 85),
            (2.0**-126, 1),
            (2.0**-127, 0),
            (2.0**-127 * 1.0000005, 1),
            (2.0**-149, 0),
            (0.0, 0),
            (2.0**127, 254),
            (3e38, 255),
            (INF, 255),
            (NAN, 255),
        ],
    )
    def test_scales_round_up(self, scale, code):
        assert fp8.encode_ue8m0(torch.tensor([scale])).tolist() == [code]

    def test_every_code_decodes_to_its_power(self):
        got = fp8.decode_ue8m0(CODES).tolist()
        assert got[:255] == [2.0 ** (code - 127) for code in range(255)]
        assert math.isnan(got[255])

    def test_torch_decodes_the_same(self):
        want = CODES.view(torch.float8_e8m0fnu).float()
        assert torch.equal(fp8.decode_ue8m0(CODES)[:255], want[:255])
        typed = fp8.decode_ue8m0(CODES.view(torch.float8_e8m0fnu))
        assert torch.equal(typed[:255], want[:255])

    @given(st.floats(min_value=2.0**-127, max_value=2.0**127, width=32))
    @settings(max_examples=200, deadline=None)
    def test_the_result_is_the_least_power_of_two_not_below(self, scale):
        power = fp8.decode_ue8m0(fp8.encode_ue8m0(torch.tensor([scale]))).item()
        assert power >= scale
        assert power / 2 < scale


class TestFnToFnuz:
    def test_same_values_with_twice_the_scale(self):
        finite = CODES[~fp8.decode(CODES).isnan()]
        codes, scale = fp8.fn_to_fnuz(finite, torch.tensor(0.25))
        assert scale.item() == 0.5
        values = codes.view(torch.float8_e4m3fnuz).float() * scale
        assert torch.equal(values, finite.view(torch.float8_e4m3fn).float() * 0.25)

    def test_minus_zero_does_not_become_nan(self):
        codes, _ = fp8.fn_to_fnuz(torch.tensor([0x80], dtype=torch.uint8), torch.tensor(1.0))
        assert codes.tolist() == [0]


CAPABILITIES = [
    ((7, 0), True),
    ((7, 5), True),
    ((8, 0), True),
    ((8, 6), True),
    ((8, 7), True),
    ((8, 8), True),
    ((8, 9), False),
    ((9, 0), False),
    ((10, 0), False),
    ((10, 3), False),
    ((11, 0), False),
    ((12, 0), False),
    ((12, 1), False),
    ((13, 0), False),
]


@pytest.fixture
def cuda(monkeypatch):
    """A CUDA machine whose capability the test sets."""
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    state = {"capability": (9, 0)}
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device=None: state["capability"]
    )
    return state


class TestTritonTypes:
    @pytest.mark.parametrize(("capability", "old"), CAPABILITIES)
    def test_e4b15_is_strictly_below_sm89(self, cuda, capability, old):
        assert fp8.cuda_capability_uses_fp8_e4b15(capability) is old
        want = "float8e4b15" if old else "float8e4nv"
        e4m3 = torch.float8_e4m3fn
        assert fp8.triton_type_name(e4m3, cuda_capability=capability) == want
        cuda["capability"] = capability
        assert fp8.triton_type_name(e4m3) == want
        assert fp8.triton_type_name(e4m3, device="cuda:0") == want
        assert fp8.use_fp8_e4b15_for_e4m3fn() is old

    @pytest.mark.parametrize("capability", [c for c, _ in CAPABILITIES])
    def test_the_other_formats_do_not_depend_on_the_capability(self, cuda, capability):
        cuda["capability"] = capability
        assert fp8.triton_type_name(torch.float8_e4m3fnuz) == "float8e4b8"
        assert fp8.triton_type_name(torch.float8_e5m2) == "float8e5"

    @pytest.mark.parametrize("capability", [None, (7, 5), (8, 0), (9, 0)])
    def test_hip_never_gets_e4b15(self, monkeypatch, capability):
        monkeypatch.setattr(torch.version, "hip", "6.4")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        # gfx90a reports (9, 0), gfx1100 (11, 0); an old card may report less
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
        name = fp8.triton_type_name(torch.float8_e4m3fn, cuda_capability=capability)
        assert name == "float8e4nv"
        assert fp8.triton_type_name(torch.float8_e4m3fnuz) == "float8e4b8"

    @pytest.mark.parametrize("capability", [None, (7, 5), (8, 0), (9, 0)])
    def test_musa_never_gets_e4b15(self, monkeypatch, capability):
        monkeypatch.setattr(torch.version, "musa", "4.0", raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        name = fp8.triton_type_name(torch.float8_e4m3fn, cuda_capability=capability)
        assert name == "float8e4nv"

    def test_a_machine_without_cuda_never_gets_e4b15(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

        def refuse(device=None):
            raise AssertionError("asked CUDA")

        monkeypatch.setattr(torch.cuda, "get_device_capability", refuse)
        assert fp8.triton_type_name(torch.float8_e4m3fn) == "float8e4nv"
        assert fp8.triton_type_name(torch.float8_e4m3fn, device="cpu") == "float8e4nv"
        assert fp8.use_fp8_e4b15_for_e4m3fn() is False

    def test_a_cpu_device_on_an_old_gpu_machine_never_gets_e4b15(self, cuda):
        cuda["capability"] = (8, 0)
        assert fp8.triton_type_name(torch.float8_e4m3fn, device="cpu") == "float8e4nv"

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e8m0fnu, torch.uint8])
    def test_other_dtypes_are_a_value_error_naming_them(self, dtype):
        with pytest.raises(ValueError, match=str(dtype)):
            fp8.fp8_dtype_to_triton(dtype)

    def test_the_answers_are_tritons_own_types(self):
        tl = pytest.importorskip("triton.language")
        e4m3 = torch.float8_e4m3fn
        assert fp8.fp8_dtype_to_triton(e4m3, cuda_capability=(8, 0)) is tl.float8e4b15
        assert fp8.fp8_dtype_to_triton(e4m3, cuda_capability=(8, 9)) is tl.float8e4nv
        assert fp8.fp8_dtype_to_triton(torch.float8_e4m3fnuz) is tl.float8e4b8
        assert fp8.fp8_dtype_to_triton(torch.float8_e5m2) is tl.float8e5

    def test_arguments_are_keyword_only(self):
        with pytest.raises(TypeError):
            fp8.fp8_dtype_to_triton(torch.float8_e4m3fn, "cuda")

    def test_without_triton_the_error_says_what_to_install(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "triton", None)
        monkeypatch.setitem(sys.modules, "triton.language", None)
        with pytest.raises(MissingPackage, match="pip install"):
            fp8.fp8_dtype_to_triton(torch.float8_e5m2)


class TestEncodingFor:
    @pytest.mark.parametrize(
        ("capability", "how"),
        [
            (None, "integer"),
            ((7, 5), "integer"),
            ((8, 0), "integer"),
            ((8, 6), "integer"),
            ((8, 9), "ptx"),
            ((9, 0), "hardware"),
            ((10, 0), "hardware"),
            ((12, 1), "hardware"),
            ((13, 0), "hardware"),
        ],
    )
    def test_e4m3fn(self, capability, how):
        encoding = fp8.encoding_for(fp8.E4M3FN, cuda_capability=capability)
        assert encoding.how == how
        assert encoding.reason
        old = capability is not None and capability < (8, 9)
        assert encoding.triton_type == ("float8e4b15" if old else "float8e4nv")

    def test_the_interpreter_always_encodes_by_integers(self):
        encoding = fp8.encoding_for(fp8.E4M3FN, cuda_capability=(9, 0), interpreted=True)
        assert encoding.how == "integer"

    def test_fnuz_is_never_the_hardware_conversion_of_a_cuda_gpu(self):
        encoding = fp8.encoding_for(fp8.E4M3FNUZ, cuda_capability=(9, 0))
        assert (encoding.how, encoding.triton_type) == ("integer", "float8e4b8")


OLD_TORCH = """
import torch
for name in ("float8_e8m0fnu", "float8_e4m3fnuz"):
    delattr(torch, name)
from anyfp8 import fp8, problem, reference
from anyfp8.errors import InputError
x = torch.tensor([1.0, -0.0, 300.0, float("nan")])
assert fp8.encode(x, fp8.E4M3FNUZ).tolist() == [0x40, 0x00, 0x7F, 0x80]
assert fp8.decode(torch.tensor([0x40], dtype=torch.uint8), fp8.E4M3FNUZ).item() == 1.0
assert fp8.decode_ue8m0(torch.tensor([127], dtype=torch.uint8)).item() == 1.0
q = reference.quantize_per_token(torch.ones(2, 8), fp8.E4M3FNUZ)
assert q.data.dtype == torch.uint8 and reference.dequantize(q).eq(1).all()
try:
    fp8.E4M3FNUZ.dtype
except InputError as error:
    assert torch.__version__ in str(error) and "torch >=" in str(error), error
else:
    raise SystemExit("no error")
"""


def test_a_torch_without_the_newer_dtypes_is_enough():
    done = subprocess.run([sys.executable, "-c", OLD_TORCH], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
