"""SGLang's names give what SGLang's own functions gave; bad arguments are refused."""

import inspect
import json
from pathlib import Path

import numpy
import pytest
import torch

from anyfp8 import fp8, reference, testing
from anyfp8.errors import InputError
from anyfp8.integrations import sglang

FOLDER = Path(__file__).parents[1] / "data" / "quantize"
THEIRS = numpy.load(FOLDER / "sglang.npz")
FACTS = json.loads((FOLDER / "sglang.json").read_text())


def theirs(name, dtype=None):
    values = torch.from_numpy(THEIRS[name])
    return values if dtype is None else values.view(dtype)


def assert_lies_like(got, name):
    steps = [d for d, size in enumerate(got.shape) if size > 1]
    strides = FACTS["strides"][name]
    assert [got.stride(d) for d in steps] == [strides[d] for d in steps]


def assert_divided(codes, x, scale, group, want):
    """Codes of x / s as SGLang's division gives them; ours multiply by 1 / s, at most a step off.

    The two round differently only where x / s lies within an ulp of a tie.
    """
    s = scale.repeat_interleave(group, -1)
    assert torch.equal(fp8.encode(x.float() / s), want)
    assert torch.equal(fp8.encode(x.float() * (torch.ones(()) / s)), codes)
    assert (codes.int() - want.int()).abs().max() <= 1


def test_static_quantization():
    x, scale = theirs("static.x", torch.bfloat16), theirs("static.scale")
    q, s = sglang.static_quant_fp8(x, scale)
    assert s is scale
    assert q.dtype == torch.float8_e4m3fn
    assert torch.equal(q.view(torch.uint8), theirs("static.codes"))
    _, repeated = sglang.static_quant_fp8(x, scale, repeat_scale=True)
    assert torch.equal(repeated, theirs("static.repeated"))


def test_mla_per_tensor():
    x = theirs("mla_tensor.base", torch.bfloat16)[..., :64].transpose(0, 1)
    # SGLang's buffer must be zero; ours may hold anything
    scale = torch.full((1,), 9.0)
    q, s = sglang.per_tensor_quant_mla_fp8(x, scale)
    assert s is scale
    assert torch.equal(s, theirs("mla_tensor.scale"))
    assert torch.equal(q.view(torch.uint8), theirs("mla_tensor.codes"))
    assert_lies_like(q, "mla_tensor.codes")


def test_mla_groups_for_a_masked_gemm():
    x = theirs("mla_tensor.base", torch.bfloat16)[..., :64].transpose(0, 1)
    q, s, masked_m, m, aligned = sglang.per_token_group_quant_mla_deep_gemm_masked_fp8(x, 32)
    assert [m, aligned, *q.shape, *s.shape] == theirs("mla_group.sizes").tolist()
    assert list(s.stride()) == FACTS["strides"]["mla_group.full_scale"]
    assert list(q.stride()) == FACTS["strides"]["mla_group.full_codes"]
    assert torch.equal(masked_m, theirs("mla_group.masked_m"))
    assert masked_m.dtype == torch.int32
    assert torch.equal(s[:, :m], theirs("mla_group.scale"))
    codes = q[:, :m].view(torch.uint8)
    assert_divided(codes, x, s[:, :m], 32, theirs("mla_group.codes"))


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("row", {}),
        ("column", {"column_major_scales": True}),
        ("tma", {"column_major_scales": True, "scale_tma_aligned": True}),
    ],
)
def test_group_scales_lie_where_sglang_puts_them(name, flags):
    x = theirs("group.x", torch.bfloat16)
    q, s = sglang.per_token_group_quant_fp8(x, 64, **flags)
    assert torch.equal(s, theirs(f"group.{name}.scale"))
    assert_lies_like(s, f"group.{name}.scale")
    if name == "row":
        assert torch.equal(q.view(torch.uint8), theirs("group.row.codes"))
    else:
        assert_divided(q.view(torch.uint8), x, s, 64, theirs(f"group.{name}.codes"))


def test_realigned_scales_are_those_written_aligned():
    x = theirs("group.x", torch.bfloat16)
    flags = {"column_major_scales": True, "scale_tma_aligned": True}
    _, s = sglang.per_token_group_quant_fp8(x, 64, **flags)
    assert torch.equal(s, theirs("group.realigned.scale"))
    assert_lies_like(s, "group.realigned.scale")


def test_powers_of_two_and_their_packing():
    x = theirs("group.x", torch.bfloat16)
    q, s = sglang.per_token_group_quant_fp8(x, 64, scale_ue8m0=True)
    assert torch.equal(s, theirs("group.ue8m0.scale"))
    # by a power of two, dividing and multiplying by the inverse are the same
    assert torch.equal(q.view(torch.uint8), theirs("group.ue8m0.codes"))
    q, s = sglang.per_token_group_quant_fp8(
        x, 64, column_major_scales=True, scale_tma_aligned=True, scale_ue8m0=True
    )
    assert torch.equal(s, theirs("group.packed.scale"))
    assert_lies_like(s, "group.packed.scale")
    assert torch.equal(q.view(torch.uint8), theirs("group.ue8m0.codes"))


@pytest.mark.parametrize("kind", ["fp32", "ue8m0", "packed"])
def test_masked_silu(kind):
    x, masked_m = theirs("masked.x", torch.float16), theirs("masked.masked_m")
    packed = kind == "packed"
    out = torch.zeros(3, 5, 256, dtype=torch.uint8)
    scale = reference.empty_scale((3, 5), 4, "column" if not packed else "packed", "cpu").zero_()
    if not packed:
        scale = torch.zeros(3, 5, 4)
    q, s = sglang.per_token_group_quant_fp8(
        x,
        64,
        column_major_scales=packed,
        scale_tma_aligned=packed,
        scale_ue8m0=kind != "fp32",
        fuse_silu_and_mul=True,
        masked_m=masked_m,
        output_q=out,
        output_s=scale,
    )
    assert q is out
    # rows past masked_m were left at 0 on both sides
    assert torch.equal(s, theirs(f"masked.{kind}.scale"))
    assert torch.equal(q, theirs(f"masked.{kind}.codes"))


@pytest.mark.parametrize("name", ["e4m3fn", "e5m2"])
@pytest.mark.parametrize("scale_inv", [1.0, 0.37])
def test_a_cast_of_a_slice_by_a_number(name, scale_inv):
    x = theirs("cast.base", torch.bfloat16)[..., 32:]
    dtype = getattr(torch, f"float8_{name}")
    q = sglang.fp8_quantize(x, scale_inv, fp8_dtype=dtype)
    assert q.dtype == dtype
    assert torch.equal(q.view(torch.uint8), theirs(f"cast.{name}.{scale_inv}"))
    out = torch.empty(4, 3, 100, dtype=dtype)[..., :64]
    assert sglang.fp8_quantize(x, scale_inv, out=out, fp8_dtype=dtype) is out
    assert torch.equal(out.view(torch.uint8), q.view(torch.uint8))


@pytest.mark.parametrize("layout", FACTS["layouts"], ids=lambda f: f"{f['shape']}")
def test_scale_buffers_have_sglangs_shapes_and_strides(layout):
    x = testing.random_rows(1, 1).expand(layout["shape"]).contiguous()
    flags = ("column_major_scales", "scale_tma_aligned", "scale_ue8m0")
    _, s = sglang.per_token_group_quant_fp8(x, 128, **{flag: layout[flag] for flag in flags})
    assert str(s.dtype) == layout["dtype"]
    assert list(s.shape) == layout["scale_shape"]
    steps = [d for d, size in enumerate(s.shape) if size > 1]
    assert [s.stride(d) for d in steps] == [layout["scale_strides"][d] for d in steps]


@pytest.mark.parametrize("padding", [None, 3, 17])
def test_scaled_quantization_pads_rows(padding):
    x, rows = testing.random_rows(6, 80), max(6, padding or 0)
    want = reference.quantize_per_tensor(x)
    q, s = sglang.scaled_fp8_quant(x, num_token_padding=padding)
    assert q.shape == (rows, 80)
    assert s.shape == (1,)
    assert torch.equal(q[:6].view(torch.uint8), want.codes)
    assert s.item() == want.scale.item()
    q, s = sglang.scaled_fp8_quant(x, num_token_padding=padding, use_per_token_if_dynamic=True)
    want = reference.quantize_per_token(x)
    assert s.shape == (rows, 1)
    assert torch.equal(q[:6].view(torch.uint8), want.codes)
    assert torch.equal(s[:6], want.scale)
    given = torch.tensor([0.5])
    q, s = sglang.scaled_fp8_quant(x, given, padding)
    assert s is given
    want = reference.quantize_per_tensor(x, given)
    assert torch.equal(q[:6].view(torch.uint8), want.codes)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("static_quant_fp8", "x x_s repeat_scale=False"),
        ("per_tensor_quant_mla_fp8", "x x_s_out eps=1e-12"),
        (
            "per_token_group_quant_fp8",
            "x group_size eps=1e-10 column_major_scales=False scale_tma_aligned=False "
            "scale_ue8m0=False fuse_silu_and_mul=False masked_m=None output_q=None output_s=None",
        ),
        (
            "per_token_group_quant_mla_deep_gemm_masked_fp8",
            "x group_size=128 eps=1e-12 dtype=None",
        ),
        (
            "fp8_quantize",
            "x scale_inv=1.0 out=None fp8_dtype=torch.float8_e4m3fn enable_pdl=False",
        ),
        (
            "scaled_fp8_quant",
            "input scale=None num_token_padding=None use_per_token_if_dynamic=False",
        ),
        ("cuda_capability_uses_fp8_e4b15", "cuda_capability"),
        ("use_fp8_e4b15_for_e4m3fn", "device=None cuda_capability=None"),
        ("fp8_dtype_to_triton", "fp8_dtype device=None cuda_capability=None"),
    ],
)
def test_arguments_are_named_as_in_sglang(name, parameters):
    found = inspect.signature(getattr(sglang, name)).parameters.values()
    empty = inspect.Parameter.empty
    told = [p.name if p.default is empty else f"{p.name}={p.default}" for p in found]
    assert told == parameters.split()


@pytest.mark.parametrize(
    ("capability", "old"), [((7, 5), True), ((8, 6), True), ((8, 9), False), ((9, 0), False)]
)
def test_types_below_sm89(capability, old):
    tl = pytest.importorskip("triton.language")
    assert sglang.cuda_capability_uses_fp8_e4b15(capability) is old
    assert sglang.use_fp8_e4b15_for_e4m3fn(cuda_capability=capability) is old
    found = sglang.fp8_dtype_to_triton(torch.float8_e4m3fn, cuda_capability=capability)
    assert found == (tl.float8e4b15 if old else tl.float8e4nv)


X = testing.random_rows(6, 256)
ONE = torch.ones(1)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: sglang.static_quant_fp8(X.int(), ONE), "int32"),
        (lambda: sglang.static_quant_fp8(X, torch.ones(2)), "one element"),
        (lambda: sglang.static_quant_fp8(X, ONE.half()), "torch.float32"),
        (lambda: sglang.static_quant_fp8(X, ONE.to("meta")), "meta"),
        (lambda: sglang.per_tensor_quant_mla_fp8(X, ONE), "[heads, tokens, dim]"),
        (lambda: sglang.per_token_group_quant_fp8(X, 96), "divides K"),
        (lambda: sglang.per_token_group_quant_fp8(X, 0), "group_size=0"),
        (lambda: sglang.per_token_group_quant_fp8(X[:, :0], 64), "K >= 1"),
        (
            lambda: sglang.per_token_group_quant_fp8(
                X, 64, column_major_scales=True, scale_ue8m0=True
            ),
            "unaligned",
        ),
        (lambda: sglang.per_token_group_quant_mla_deep_gemm_masked_fp8(X[None], 96), "divides K"),
        (lambda: sglang.fp8_quantize(X, fp8_dtype=torch.int8), "torch.int8"),
        (lambda: sglang.fp8_quantize(X.long()), "int64"),
        (lambda: sglang.scaled_fp8_quant(X[None]), "[tokens, K]"),
        (lambda: sglang.scaled_fp8_quant(X, torch.ones(6, 1)), "one element"),
    ],
)
def test_unusable_arguments_are_refused_before_any_launch(call, match):
    with testing.recorded_launches("sm_90") as launches, pytest.raises(InputError) as error:
        call()
    e = error.value
    assert all((e.what, e.got, e.want))
    assert match in str(e)
    assert not launches
