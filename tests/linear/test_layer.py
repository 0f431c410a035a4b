"""Fp8Linear: applying, storing, moving, reloading."""

import copy
import pickle

import pytest
import torch

from anyfp8.errors import InputError
from anyfp8.linear import Fp8Linear
from anyfp8.problem import QTensor, Scheme
from anyfp8.select import Request

SCHEMES = [
    "w8a8-tensor-static",
    "w8a8-tensor-dynamic",
    "w8a8-channel-token",
    "w8a8-block128x128-group128",
    "w8a16-tensor",
    "w8a16-channel",
    "w8a16-block128x128",
]
N, K = 160, 320


def torch_quantized(w: torch.Tensor, scheme: Scheme) -> tuple[QTensor, torch.Tensor]:
    """A weight quantized with plain torch, and the fp32 values that it stands for."""
    f = w.float()
    if scheme.weight == "tensor":
        scale = f.abs().amax() / 448
        full = scale
    elif scheme.weight == "channel":
        full = scale = f.abs().amax(1, keepdim=True) / 448
    else:
        rows, columns = -(-w.shape[0] // 128), -(-w.shape[1] // 128)
        scale = torch.empty(rows, columns)
        full = torch.empty_like(f)
        for i in range(rows):
            for j in range(columns):
                tile = (slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1)))
                scale[i, j] = f[tile].abs().amax() / 448
                full[tile] = scale[i, j]
    data = (f / full).clamp(-448, 448).to(torch.float8_e4m3fn)
    return QTensor(data, scale, scheme.block), data.float() * full


def make(name: str, *, bias: bool = True, **options) -> tuple[Fp8Linear, torch.Tensor]:
    scheme = Scheme.parse(name)
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(N, K, generator=generator)
    w *= torch.exp(torch.randn(N, 1, generator=generator))
    q, values = torch_quantized(w, scheme)
    layer = Fp8Linear(K, N, scheme, bias=bias, device="meta", **options)
    static = torch.tensor(0.01) if name.endswith("static") else None
    b = torch.randn(N, generator=generator).bfloat16() if bias else None
    layer.load(q, input_scale=static, bias=b)
    return layer, values


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("shape", [(K,), (0, K), (3, K), (2, 0, K), (2, 3, K), (2, 1, 3, K)])
def test_weight_only_equals_a_dense_layer_of_the_dequantized_weight(name, shape):
    layer, values = make(name)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    want = torch.nn.functional.linear(x, values.bfloat16(), layer.bias)
    y = layer(x)
    assert y.dtype == torch.bfloat16
    assert y.shape == want.shape
    assert torch.equal(y, want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_activations_of_another_dtype_than_the_layer_get_their_own_plan(dtype):
    layer, values = make("w8a16-channel", bias=False)
    x = torch.randn(4, K).to(dtype)
    y = layer(x)
    assert y.dtype == dtype
    want = x.double() @ values.double().T
    # the CPU holds the weight in bf16: one rounding of 2^-9 per product
    assert ((y - want).norm() / want.norm()) < 3e-3


@pytest.mark.parametrize("name", SCHEMES[:4])
def test_emulation_quantizes_activations_as_the_scheme_says(name):
    layer, values = make(name, bias=False, request=Request(emulate=True))
    x = torch.randn(5, K, generator=torch.Generator().manual_seed(2)).bfloat16()
    f = x.float()
    if name.endswith("static"):
        scale = torch.tensor(0.01).expand(5, K)
    elif name.endswith("dynamic"):
        scale = (f.abs().amax() / 448).expand(5, K)
    elif name.endswith("token"):
        scale = (f.abs().amax(1, keepdim=True) / 448).expand(5, K)
    else:
        groups = [f[:, i : i + 128].abs().amax(1, keepdim=True) / 448 for i in range(0, K, 128)]
        scale = torch.cat([g.expand(5, 128) for g in groups], 1)[:, :K]
    xq = (f * (1 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    want = xq.double() @ values.double().T
    y = layer(x).double()
    assert ((y - want).norm() / want.norm()) < 3e-3
    # and it is not what weight-only gives
    plain = x.double() @ values.double().T
    assert ((y - plain).norm() / plain.norm()) > 1e-2


@pytest.mark.parametrize("view", ["slice", "transposed", "stepped", "expanded", "offset"])
def test_activations_that_are_not_contiguous(view):
    layer, values = make("w8a16-channel", bias=False)
    big = torch.randn(6, 4 * K).bfloat16()
    x = {
        "slice": big[:, K : 2 * K],
        "transposed": torch.randn(K, 6).bfloat16().t(),
        "stepped": big[::2, :K],
        "expanded": big[:1, :K].expand(6, K),
        "offset": big[:, 3 : K + 3],
    }[view]
    want = torch.nn.functional.linear(x.contiguous(), values.bfloat16())
    assert torch.equal(layer(x), want)


@pytest.mark.parametrize("name", SCHEMES)
def test_state_dict_gives_the_codes_back_bit_for_bit(name):
    layer, _ = make(name)
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    layer(torch.randn(2, K).bfloat16())
    after = layer.state_dict()
    assert before.keys() == after.keys()
    assert after["weight"].dtype == torch.float8_e4m3fn
    for key, value in before.items():
        assert after[key].dtype == value.dtype
        same = after[key].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)
        assert torch.equal(*same), key


@pytest.mark.parametrize("name", ["w8a8-tensor-static", "w8a16-block128x128"])
def test_new_weights_replace_prepared_ones(name):
    first, _ = make(name)
    x = torch.randn(3, K).bfloat16()
    old = first(x)
    second = copy.deepcopy(first)
    q = QTensor(first.weight, first.weight_scale * 2, first.scheme.block)
    second.load(q, input_scale=second.input_scale, bias=2 * first.bias)
    assert torch.equal(second(x), 2 * old)
    first.load_state_dict(second.state_dict())
    assert torch.equal(first(x), 2 * old)


def test_a_failed_load_leaves_the_old_weights():
    layer, _ = make("w8a8-channel-token")
    x = torch.randn(3, K).bfloat16()
    before = layer(x)
    bad = layer.state_dict()
    bad["weight_scale"] = torch.zeros(N, 1)
    with pytest.raises(RuntimeError, match="no scale"):
        layer.load_state_dict(bad)
    with pytest.raises(InputError, match="does not fit"):
        layer.load(QTensor(torch.zeros(N, K - 1, dtype=torch.uint8), torch.ones(N, 1)))
    assert torch.equal(layer(x), before)


def test_a_16_bit_state_dict_is_refused_by_name():
    layer, _ = make("w8a16-channel", bias=False)
    with pytest.raises(RuntimeError, match=r"weight is torch\.bfloat16, not FP8"):
        layer.load_state_dict(
            {"weight": torch.zeros(N, K).bfloat16(), "weight_scale": torch.ones(N, 1)}
        )


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("prepared", [False, True])
def test_copies_compute_the_same(copied, prepared):
    layer, _ = make("w8a8-channel-token")
    x = torch.randn(2, K).bfloat16()
    if prepared:
        layer.prepare()
    assert torch.equal(copied(layer)(x), layer(x))


def test_casting_a_module_never_casts_the_codes():
    layer, values = make("w8a16-channel")
    layer.prepare()
    layer.half()
    assert layer.weight.dtype == torch.float8_e4m3fn
    assert layer.weight_scale.dtype == torch.float32
    assert layer.bias.dtype == torch.float16
    x = torch.randn(2, K).half()
    want = torch.nn.functional.linear(x, values.half(), layer.bias)
    assert torch.equal(layer(x), want)


def test_weight_scales_of_any_stored_shape_load():
    layer, _ = make("w8a16-channel", bias=False)
    state = layer.state_dict()
    want = layer(torch.ones(1, K).bfloat16())
    state["weight_scale"] = state["weight_scale"].reshape(N)
    layer.load_state_dict(state)
    assert torch.equal(layer(torch.ones(1, K).bfloat16()), want)
    assert layer.weight_scale.shape == (N, 1)


@pytest.mark.parametrize(
    ("x", "part"),
    [
        (torch.zeros(2, K + 1).bfloat16(), f"[..., {K}]"),
        (torch.zeros(2, K, dtype=torch.int32), "bf16, fp16, fp32"),
        (torch.zeros(2, K, dtype=torch.bfloat16, device="meta"), "x on meta, weight on cpu"),
    ],
)
def test_bad_activations_are_refused_with_both_sides_named(x, part):
    layer, _ = make("w8a16-channel")
    with pytest.raises(InputError) as caught:
        layer(x)
    assert part in str(caught.value)


def test_a_layer_without_a_weight_says_so():
    layer = Fp8Linear(K, N, Scheme.parse("w8a16-channel"), device="meta")
    with pytest.raises(InputError, match="no weight yet"):
        layer.prepare()


def test_kv_scales_are_kept_for_saving():
    layer, _ = make("w8a8-tensor-static")
    q = QTensor(layer.weight, layer.weight_scale)
    layer.load(
        q, input_scale=layer.input_scale, bias=layer.bias, extras={"k_scale": torch.tensor(0.5)}
    )
    assert layer.state_dict()["k_scale"] == 0.5


@pytest.mark.parametrize(("n", "k"), [(128, 128), (128, 256), (256, 128)])
def test_the_layout_is_declared_not_guessed_from_the_shape(n, k):
    w = torch.randn(n, k)
    q, values = torch_quantized(w, Scheme("tensor"))
    layer = Fp8Linear(k, n, Scheme("tensor"), device="meta")
    layer.load(q)
    x = torch.randn(3, k).bfloat16()
    assert torch.equal(layer(x), torch.nn.functional.linear(x, values.bfloat16()))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale_of_any_shape_and_an_unused_input_scale(shape):
    q, values = torch_quantized(torch.randn(256, 128), Scheme("tensor"))
    layer = Fp8Linear(128, 256, Scheme.parse("w8a8-tensor-static"), device="meta")
    layer.load(
        QTensor(q.data, q.scale.reshape(shape)), input_scale=torch.tensor(0.01).reshape(shape)
    )
    x = torch.randn(3, 128).bfloat16()
    assert torch.equal(layer(x), torch.nn.functional.linear(x, values.bfloat16()))
    # weight-only leaves it alone but keeps it for saving and for whoever asks
    assert layer.input_scale == torch.tensor(0.01)
    assert layer.state_dict()["input_scale"].shape == ()
