"""Scheme and Problem: what is accepted, and that names read back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anyfp8.errors import InputError
from anyfp8.problem import ACCUMULATES, DTYPES, NUMERICS, Problem, QTensor, Scheme

NAMES = [
    (Scheme("tensor"), "w8a16-tensor"),
    (Scheme("channel"), "w8a16-channel"),
    (Scheme("block", block=(128, 128)), "w8a16-block128x128"),
    (Scheme("tensor", "tensor"), "w8a8-tensor-static"),
    (Scheme("tensor", "tensor", dynamic=True), "w8a8-tensor-dynamic"),
    (Scheme("channel", "tensor"), "w8a8-channel-static"),
    (Scheme("channel", "token", dynamic=True), "w8a8-channel-token"),
    (
        Scheme("block", "group", dynamic=True, block=(128, 128), group=128),
        "w8a8-block128x128-group128",
    ),
    (
        Scheme("block", "group", dynamic=True, block=(1, 32), group=32, scale_format="ue8m0"),
        "w8a8-block1x32-group32-ue8m0",
    ),
    (
        Scheme("block", block=(128, 128), scale_format="ue8m0"),
        "w8a16-block128x128-ue8m0",
    ),
]


@st.composite
def schemes(draw):
    weight = draw(st.sampled_from(["tensor", "channel", "block"]))
    activation = draw(st.sampled_from(["none", "tensor", "token", "group"]))
    size = st.integers(1, 4096)
    block = (draw(size), draw(size)) if weight == "block" else None
    group = draw(size) if activation == "group" else None
    dynamic = {"none": False, "tensor": draw(st.booleans())}.get(activation, True)
    fine = block is not None or group is not None
    scale_format = draw(st.sampled_from(["float32", "ue8m0"])) if fine else "float32"
    return Scheme(weight, activation, dynamic, block, group, scale_format)


@st.composite
def problems(draw):
    return Problem(
        draw(st.sampled_from(["linear", "gemm"])),
        draw(schemes()),
        draw(st.integers(0, 10**6)),
        draw(st.integers(1, 10**6)),
        draw(st.integers(1, 10**6)),
        draw(st.sampled_from(list(DTYPES))),
        draw(st.sampled_from(list(DTYPES))),
        draw(st.booleans()),
        draw(st.sampled_from(ACCUMULATES)),
        draw(st.sampled_from(NUMERICS)),
    )


class TestScheme:
    @pytest.mark.parametrize(("scheme", "name"), NAMES, ids=[n for _, n in NAMES])
    def test_canonical_names(self, scheme, name):
        assert scheme.name == name
        assert Scheme.parse(name) == scheme

    @given(schemes())
    def test_every_name_reads_back(self, scheme):
        assert Scheme.parse(scheme.name) == scheme
        assert hash(Scheme.parse(scheme.name)) == hash(scheme)

    @given(st.text(alphabet="w8a16-tensorchlbkgup0x dyic", max_size=30))
    def test_other_text_is_an_input_error_and_never_half_read(self, text):
        try:
            scheme = Scheme.parse(text)
        except InputError:
            return
        assert scheme.name == text

    @pytest.mark.parametrize(
        "text",
        [
            *["", "w8a8", "w8a8-tensor", "w8a16-tensor-static", "w4a16-tensor", "w8a8-row-token"],
            *["w8a8-block128-group128", "w8a8-block0x128-group128", "w8a8-block128x128-group"],
            *["w8a8-channel-token-ue8m0", "W8A8-channel-token", "w8a8-channel-token-", "ue8m0"],
        ],
    )
    def test_near_misses_are_refused(self, text):
        with pytest.raises(InputError, match="name of a quantization scheme"):
            Scheme.parse(text)

    @pytest.mark.parametrize(
        "arguments",
        [
            {"weight": "row"},
            {"activation": "row"},
            {"weight": "block"},
            {"block": (128, 128)},
            {"weight": "block", "block": (0, 128)},
            {"activation": "group", "dynamic": True},
            {"activation": "group", "dynamic": True, "group": 0},
            {"group": 128},
            {"activation": "token"},
            {"activation": "group", "group": 128},
            {"dynamic": True},
            {"scale_format": "fp16"},
            {"scale_format": "ue8m0"},
        ],
        ids=str,
    )
    def test_contradictions_are_refused_with_what_would_do(self, arguments):
        with pytest.raises(InputError) as caught:
            Scheme(**arguments)
        assert caught.value.want

    @given(schemes())
    def test_weight_only_keeps_the_weights(self, scheme):
        alone = scheme.weight_only
        assert (alone.weight, alone.block) == (scheme.weight, scheme.block)
        assert (alone.activation, alone.dynamic, alone.group) == ("none", False, None)

    @pytest.mark.parametrize(
        ("scheme", "shape", "odd_shape"),
        [
            (Scheme("tensor"), (), ()),
            (Scheme("channel"), (320, 1), (257, 1)),
            (Scheme("block", block=(128, 128)), (3, 5), (3, 6)),
            (Scheme("block", block=(1, 32)), (320, 20), (257, 21)),
        ],
    )
    def test_shape_of_the_weight_scale(self, scheme, shape, odd_shape):
        assert scheme.weight_scale_shape(320, 640) == shape
        assert scheme.weight_scale_shape(257, 641) == odd_shape


class TestProblem:
    def test_canonical_key(self):
        problem = Problem(
            "gemm", Scheme("channel", "token", dynamic=True), 16, 4096, 1024, bias=True
        )
        assert problem.key == "gemm|w8a8-channel-token|16x4096x1024|bf16>bf16|bias|auto|scheme"

    @given(problems())
    def test_every_key_reads_back(self, problem):
        assert Problem.from_key(problem.key) == problem

    @pytest.mark.parametrize(
        "key",
        [
            "",
            "gemm",
            "gemm|w8a8-channel-token|16x4096|bf16>bf16|bias|auto|scheme",
            "gemm|w8a8-channel-token|16x4096xK|bf16>bf16|bias|auto|scheme",
            "gemm|w8a8-channel-token|16x4096x1024|bf16|bias|auto|scheme",
            "gemm|w8a8-channel-token|16x4096x1024|bf16>bf16|maybe|auto|scheme",
            "gemm|w8a8-channel|16x4096x1024|bf16>bf16|bias|auto|scheme",
            "conv|w8a8-channel-token|16x4096x1024|bf16>bf16|bias|auto|scheme",
            "gemm|w8a8-channel-token|16x4096x1024|fp64>bf16|bias|auto|scheme",
            "gemm|w8a8-channel-token|16x4096x1024|bf16>bf16|bias|slow|scheme",
            "gemm|w8a8-channel-token|16x4096x1024|bf16>bf16|bias|auto|any",
        ],
    )
    def test_other_text_is_an_input_error(self, key):
        with pytest.raises(InputError):
            Problem.from_key(key)

    @pytest.mark.parametrize(("m", "n", "k"), [(-1, 8, 8), (1, 0, 8), (1, 8, 0), (1, -8, 8)])
    def test_impossible_shapes_are_refused(self, m, n, k):
        with pytest.raises(InputError, match=f"m={m}, n={n}, k={k}"):
            Problem("gemm", Scheme(), m, n, k)

    def test_no_rows_are_a_problem_too(self):
        assert Problem("linear", Scheme(), 0, 8, 8).m == 0


class TestQTensor:
    def test_codes_are_the_same_bytes_not_a_copy(self):
        data = torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn)
        q = QTensor(data, torch.tensor(1.0))
        assert q.codes.tolist() == [0x38, 0x40]
        assert q.codes.data_ptr() == data.data_ptr()
        assert QTensor(q.codes, q.scale).codes.data_ptr() == data.data_ptr()
