"""MLA shapes and fused norms: what is refused, and where things lie, on the CPU."""

import pytest
import torch

from anyfp8 import fp8, quantize, reference, testing
from anyfp8.errors import InputError

X = testing.random_rows(6, 256).view(2, 3, 256)
W = torch.ones(256)


def refused(call, match):
    with testing.recorded_launches("sm_90") as launches, pytest.raises(InputError) as error:
        call()
    e = error.value
    assert all((e.what, e.got, e.want, e.hint))
    assert match in str(e)
    assert not launches


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: quantize.mla_per_tensor(X[0]), "[heads, tokens, dim]"),
        (lambda: quantize.mla_per_tensor(X.int()), "int32"),
        (lambda: quantize.mla_per_tensor(X[..., :0]), "K >= 1"),
        (lambda: quantize.mla_per_tensor(X, out_scale=torch.ones(2)), "one element"),
        (lambda: quantize.mla_per_tensor(X, out_scale=torch.ones(1).half()), "torch.float32"),
        (lambda: quantize.mla_per_tensor(X, out_scale=torch.ones(1, device="meta")), "meta"),
        (lambda: quantize.mla_per_group(X[0]), "[batch, tokens, K]"),
        (lambda: quantize.mla_per_group(X.int()), "int32"),
        (lambda: quantize.mla_per_group(X[..., :0]), "K >= 1"),
        (lambda: quantize.mla_per_group(X, 96), "divides K"),
        (lambda: quantize.mla_per_group(X, pad_rows_to=0), "pad_rows_to"),
        (lambda: quantize.mla_per_group(X, eps=0.0), "eps"),
        (lambda: quantize.norm_per_token(X.int(), W), "int32"),
        (lambda: quantize.norm_per_token(X[..., :0], W[:0]), "K >= 1"),
        (lambda: quantize.norm_per_token(X, W[:255]), "[256]"),
        (lambda: quantize.norm_per_token(X, torch.ones(512)[::2]), "contiguous"),
        (lambda: quantize.norm_per_token(X, W.int()), "int32"),
        (lambda: quantize.norm_per_token(X, W.to("meta")), "meta"),
        (lambda: quantize.norm_per_token(X, W, residual=X.float()), "residual"),
        (lambda: quantize.norm_per_token(X, W, residual=X[0]), "residual"),
        (lambda: quantize.norm_per_token(X, W, residual=X[:1].expand(2, 3, 256)), "twice"),
        (lambda: quantize.norm_per_token(X, W, out_norm=X.half()), "out_norm"),
        (lambda: quantize.norm_per_token(X, W, out_scale=torch.ones(2, 3)), "out_scale"),
        (lambda: quantize.norm_per_token(X, W, norm_eps=-1.0), "norm_eps"),
        (lambda: quantize.norm_per_token(torch.ones(1, 40000), torch.ones(40000)), "32768"),
        (lambda: quantize.norm_per_group(X, W, 96), "divides K"),
        (lambda: quantize.norm_per_group(X, W, 0), "group=0"),
        (lambda: quantize.norm_per_group(X, W, layout="x"), "row, column"),
    ],
)
def test_unusable_arguments_are_refused_before_any_launch(call, match):
    refused(call, match)


def test_a_transposed_view_is_quantized_without_a_copy():
    x = testing.random_rows(5 * 4, 192).view(5, 4, 192)[..., :128].transpose(0, 1)
    with testing.recorded_launches("sm_90") as launches:
        quantize.mla_per_tensor(x)
        quantize.mla_per_group(x)
    assert [launch.kernel.__name__ for launch in launches] == [
        *("amax_kernel", "quantize_scaled_kernel", "quantize_group_kernel"),
    ]
    for launch in launches:
        assert launch.arguments["x_ptr"].data_ptr() == x.data_ptr()


def test_one_scale_covers_all_heads():
    x = torch.zeros(3, 2, 16, dtype=torch.bfloat16)
    x[1, 1, 7] = -224
    q = quantize.mla_per_tensor(x)
    assert q.scale.item() == 0.5
    assert q.codes[1, 1, 7] == 0xFE
    assert q.data.is_contiguous()


def test_rows_are_padded_to_whole_tiles_and_counted():
    q, masked_m = quantize.mla_per_group(X)
    assert q.data.shape == (2, 256, 256)
    assert q.scale.shape == (2, 256, 2)
    # rows are the fastest axis: [batch, groups, rows] in memory
    assert q.scale.stride() == (512, 1, 256)
    assert masked_m.dtype == torch.int32
    assert masked_m.tolist() == [3, 3]
    want = reference.quantize_per_group(X, 128)
    assert torch.equal(q.codes[:, :3], want.codes)
    assert torch.equal(q.scale[:, :3], want.scale)


def test_a_norm_divides_by_the_root_mean_square():
    # mean of squares 4, so y = x / 2 · w; amax 4 · 28 = 112 has the scale 1/4
    x = torch.tensor([[2.0, -2.0, 2.0, 2.0]])
    w = torch.tensor([1.0, 2.0, 112.0, 0.0])
    y = torch.empty_like(x)
    q = quantize.norm_per_token(x, w, norm_eps=0.0, out_norm=y)
    assert y.tolist() == [[1.0, -2.0, 112.0, 0.0]]
    assert q.scale.tolist() == [[0.25]]
    # 4, -8, 448, 0
    assert q.codes.tolist() == [[0x48, 0xD0, 0x7E, 0x00]]


def test_a_residual_is_added_stored_and_normalized():
    x = torch.tensor([[3.0, 1.0]])
    residual = torch.tensor([[1.0, -5.0]])
    y = torch.empty_like(x)
    quantize.norm_per_token(x, torch.ones(2), norm_eps=0.0, residual=residual, out_norm=y)
    assert residual.tolist() == [[4.0, -4.0]]
    assert y.tolist() == [[1.0, -1.0]]
    assert x.tolist() == [[3.0, 1.0]]


def test_a_norm_agrees_with_torchs():
    x, w = testing.random_rows(9, 576, torch.float32), torch.linspace(-2, 2, 576)
    q = quantize.norm_per_group(x, w, 64)
    y = torch.nn.functional.rms_norm(x, (576,), w, eps=1e-6)
    # half a step of e4m3 at the top of a group
    bound = q.scale.repeat_interleave(64, -1) * 16 * 1.001
    assert ((reference.dequantize(q) - y).abs() <= bound).all()


def test_zero_rows_stay_zero():
    x = torch.zeros(2, 3, 256, dtype=torch.bfloat16)
    made = [
        quantize.mla_per_tensor(x),
        quantize.mla_per_group(x)[0],
        quantize.norm_per_token(x, W),
        quantize.norm_per_group(x, W, 64),
    ]
    for q in made:
        scale, codes = (q.scale, q.codes) if q.scale.ndim < 3 else (q.scale[:, :3], q.codes[:, :3])
        assert not codes.any()
        assert ((scale > 0) & scale.isfinite()).all()


def test_other_formats_are_written():
    q = quantize.norm_per_token(torch.tensor([[1.0, 1.0]]), torch.ones(2), fmt=fp8.E5M2)
    assert q.data.dtype == torch.float8_e5m2
    assert q.codes.tolist() == [[0x7B, 0x7B]]
