"""Fused and padded quantizers in Triton's interpreter, where their bytes can be pinned down."""

import pytest
import torch

from anyfp8 import quantize, reference, testing
from anyfp8.quantize.launch import Target, use_target
from anyfp8.tools.quantize_inputs import norm_weight

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [576, 4096])
def test_a_norm_is_right_to_a_last_bit_and_its_codes_are_those_of_quantizing_it(dtype, k):
    x = testing.random_rows(9, k, dtype)
    residual = testing.random_rows(9, k, dtype, seed=1)
    weight, before = norm_weight(k, dtype), residual.clone()
    y = torch.empty_like(x)
    q = quantize.norm_per_group(x, weight, 64, residual=residual, out_norm=y)
    assert torch.equal(residual, reference.add(x, before))
    testing.assert_normed(y, residual, weight)
    testing.assert_matches(q, reference.quantize_per_group(y, 64))


def test_a_row_is_normalized_alike_in_any_batch():
    x, weight = testing.random_rows(17, 576), norm_weight(576, torch.bfloat16)
    whole = quantize.norm_per_token(x, weight)
    for row in (0, 5, 16):
        alone = quantize.norm_per_token(x[row : row + 1], weight)
        assert torch.equal(alone.codes, whole.codes[row : row + 1])
        assert torch.equal(alone.scale, whole.scale[row : row + 1])


def test_nan_and_infinity_spoil_their_row_only():
    x = testing.random_rows(4, 256)
    clean = quantize.norm_per_token(x, norm_weight(256, x.dtype))
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    q = quantize.norm_per_token(x, norm_weight(256, x.dtype))
    assert torch.equal(q.codes[[0, 3]], clean.codes[[0, 3]])
    assert (q.codes[1] & 0x7F == 0x7F).all()
    # inf / inf is NaN; every other value is 0
    assert (q.codes[2] & 0x7F == 0x7F).sum() == 1
    assert (q.codes[2] & 0x7F == 0).sum() == 255
    assert q.scale.isfinite().all()


@pytest.mark.parametrize("layout", reference.SCALE_LAYOUTS)
def test_only_valid_rows_of_each_expert_are_written(layout):
    x = testing.random_rows(4 * 5, 512, torch.float16).view(4, 5, 512)
    counts = torch.tensor([0, 2, 5, 9], dtype=torch.int32)
    data = torch.full((4, 5, 256), 0x55, dtype=torch.uint8)
    scale = reference.empty_scale((4, 5), 4, layout, "cpu").fill_(-1)
    quantize.per_group(
        x, 64, layout=layout, counts=counts, silu_mul=True, out=data, out_scale=scale
    )
    want = reference.quantize_per_group(reference.silu_mul(x), 64, layout == "packed")
    arranged = reference.arrange_scale(want.scale, layout)
    for expert, count in enumerate((0, 2, 5, 5)):
        assert torch.equal(data[expert, :count], want.codes[expert, :count])
        assert torch.equal(scale[expert, :count], arranged[expert, :count])
        assert (data[expert, count:] == 0x55).all()
        assert (scale[expert, count:] == -1).all()


def test_silu_in_bf16_rounds_after_each_step():
    x = testing.random_rows(17, 1024)
    got = quantize.per_token(x, silu_mul=True)
    # exp may differ in its last fp32 bit, which bf16 shows once in some 60,000 values
    testing.assert_matches(got, reference.quantize_per_token(reference.silu_mul(x)))


def test_masked_rows_are_counted_even_where_there_are_none():
    q, counts = quantize.mla_per_group(torch.empty(3, 0, 128, dtype=torch.bfloat16))
    assert counts.tolist() == [0, 0, 0]
    assert q.data.shape == (3, 0, 128)


@pytest.mark.parametrize(
    ("quantizer", "expected"),
    [
        (quantize.per_token, reference.quantize_per_token),
        (
            lambda x, **o: quantize.per_group(x, 64, **o),
            lambda x: reference.quantize_per_group(x, 64),
        ),
    ],
    ids=["token", "group"],
)
def test_rows_past_two_billion_elements_are_reached(quantizer, expected):
    # three rows, the last one 2.2 billion elements away: memory that nobody touches is never there
    rows, stride = testing.random_rows(3, 128), 1_100_000_000
    x = torch.empty(2 * stride + 128, dtype=torch.bfloat16).as_strided((3, 128), (stride, 1))
    out = torch.empty(2 * stride + 128, dtype=torch.uint8).as_strided((3, 128), (stride, 1))
    x.copy_(rows)
    testing.assert_matches(quantizer(x, out=out), expected(rows))


def stored_bytes(monkeypatch, call):
    """Addresses of every byte that the kernels inside `call` store, in order."""
    from triton.runtime import interpreter

    addresses = []
    store = interpreter.InterpreterBuilder.create_masked_store

    def logged(self, pointer, value, mask, *rest):
        size = value.data.dtype.itemsize
        found = pointer.data[mask.data].reshape(-1)
        addresses.extend(int(a) + byte for a in found for byte in range(size))
        return store(self, pointer, value, mask, *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_store", logged)
    call()
    monkeypatch.undo()
    return addresses


@pytest.mark.parametrize("m", [1, 5])
@pytest.mark.parametrize(
    "quantizer",
    [
        quantize.per_token,
        lambda x: quantize.per_group(x, 64),
        lambda x: quantize.per_group(x, 64, layout="tma"),
        lambda x: quantize.per_group(x, 64, layout="packed"),
        quantize.per_tensor,
        lambda x: quantize.per_block(x, (4, 64)),
        lambda x: quantize.cast(x, 0.5),
        lambda x: quantize.mla_per_tensor(x[None]),
        lambda x: quantize.mla_per_group(x[None], 64)[0],
        lambda x: quantize.norm_per_token(x, norm_weight(320, x.dtype)),
        lambda x: quantize.norm_per_group(x, norm_weight(320, x.dtype), 64, layout="packed"),
    ],
    ids=[
        *("token", "group", "group-tma", "group-packed", "tensor", "block", "cast"),
        *("mla-tensor", "mla-group", "norm-token", "norm-packed"),
    ],
)
def test_no_byte_is_stored_twice(quantizer, m, monkeypatch):
    # extra lanes that store to the address of another corrupt memory on some GPUs
    x = testing.random_rows(m, 320)
    made = []
    addresses = stored_bytes(monkeypatch, lambda: made.append(quantizer(x)))
    assert len(addresses) == len(set(addresses))
    assert len(addresses) >= m * 320


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_type_that_the_gpu_lacks_only_names_the_format(dtype):
    """Below SM89 the kernel is told float8e4b15, whose bytes differ, and stores e4m3fn's."""
    x = torch.tensor([[1.0, 0.5, 2.0, 100.0, 448.0, -300.0, 2**-9]], dtype=dtype)
    with use_target(Target((8, 0), interpreted=True)):
        q = quantize.per_tensor(x, torch.ones(()))
    assert q.codes[0].numpy().tobytes().hex(" ") == "38 30 40 6c 7e f9 01"
