"""On a GPU: fused norms and activations, padded MLA groups, SGLang's names, two writers nowhere."""

import pytest
import torch

from anyfp8 import fp8, quantize, reference, testing
from anyfp8.integrations import sglang
from anyfp8.tools.quantize_inputs import norm_weight

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def architectures():
    if not torch.cuda.is_available():
        return ["native", "sm_80", "sm_89"]
    mine = torch.cuda.get_device_capability()
    return ["native"] + [a for a, c in (("sm_80", (8, 0)), ("sm_89", (8, 9))) if c <= mine]


@pytest.fixture(params=architectures())
def architecture(request):
    """Runs the test with this GPU's code, then with that of older architectures."""
    if request.param == "native":
        yield request.param
        return
    with testing.on_architecture(request.param) as launches:
        yield request.param
    assert launches


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [576, 4096, 12288])
def test_a_norm_is_right_to_a_last_bit_and_its_codes_are_those_of_quantizing_it(
    architecture, k, dtype
):
    x = testing.random_rows(257, k, dtype)
    residual = testing.random_rows(257, k, dtype, seed=1)
    weight = norm_weight(k, dtype)
    h, y = residual.cuda(), torch.empty_like(x, device="cuda")
    q = quantize.norm_per_group(x.cuda(), weight.cuda(), 64, residual=h, out_norm=y)
    assert torch.equal(h.cpu(), reference.add(x, residual))
    testing.assert_normed(y, h, weight)
    testing.assert_matches(q, reference.quantize_per_group(y.cpu(), 64))
    # another tile, and so another order of summation
    h = residual.cuda()
    q = quantize.norm_per_token(x.cuda(), weight.cuda(), residual=h, out_norm=y)
    assert torch.equal(h.cpu(), reference.add(x, residual))
    testing.assert_normed(y, h, weight)
    testing.assert_matches(q, reference.quantize_per_token(y.cpu()))


def test_a_row_is_normalized_alike_in_any_batch(architecture):
    x = testing.random_rows(257, 4096, device="cuda")
    weight = norm_weight(4096, x.dtype, "cuda")
    whole = quantize.norm_per_token(x, weight)
    for first, last in ((0, 1), (5, 8), (256, 257)):
        part = quantize.norm_per_token(x[first:last], weight)
        assert torch.equal(part.codes, whole.codes[first:last])
        assert torch.equal(part.scale, whole.scale[first:last])


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("k", [576, 4096])
def test_silu_differs_by_a_last_bit_in_few_values(architecture, k, dtype):
    """exp is the GPU's own: within 2 ulp of fp32, which 16 bits seldom show."""
    x = testing.random_rows(257, 2 * k, dtype)
    want = reference.quantize_per_group(reference.silu_mul(x), 64)
    q = quantize.per_group(x.cuda(), 64, silu_mul=True)
    same = q.scale.cpu() == want.scale
    assert same.float().mean() > 0.99
    s = want.scale.where(same, torch.nan).repeat_interleave(64, -1)[:, :k]
    known = s.isfinite()
    got, expected = fp8.decode(q.codes.cpu())[known], fp8.decode(want.codes)[known]
    assert (got != expected).float().mean() < 1e-3
    assert ((got - expected).abs() <= expected.abs().clamp(min=2**-6) / 8).all()


@pytest.mark.parametrize("layout", reference.SCALE_LAYOUTS)
def test_only_valid_rows_of_each_expert_are_written(architecture, layout):
    x = testing.random_rows(4 * 300, 512).view(4, 300, 512)
    counts = torch.tensor([0, 2, 300, 900], dtype=torch.int32)
    data = torch.full((4, 300, 512), 0x55, dtype=torch.uint8, device="cuda")
    scale = reference.empty_scale((4, 300), 8, layout, "cuda").fill_(-1)
    quantize.per_group(x.cuda(), 64, layout=layout, counts=counts.cuda(), out=data, out_scale=scale)
    want = reference.quantize_per_group(x, 64, layout == "packed")
    arranged = reference.arrange_scale(want.scale, layout)
    data, scale = data.cpu(), scale.cpu()
    for expert, count in enumerate((0, 2, 300, 300)):
        assert torch.equal(data[expert, :count], want.codes[expert, :count])
        assert torch.equal(scale[expert, :count], arranged[expert, :count])
        assert (data[expert, count:] == 0x55).all()
        assert (scale[expert, count:] == -1).all()


def test_mla_groups_of_a_transposed_projection(architecture):
    x = testing.random_rows(300 * 16, 576).view(300, 16, 576)[..., :512].transpose(0, 1)
    on_gpu = x.transpose(0, 1).contiguous().cuda().transpose(0, 1)
    q, s, masked_m, m, aligned = sglang.per_token_group_quant_mla_deep_gemm_masked_fp8(on_gpu)
    assert (m, aligned) == (300, 512)
    assert masked_m.tolist() == [300] * 16
    want = reference.quantize_per_group(x, 128)
    assert torch.equal(q[:, :m].view(torch.uint8).cpu(), want.codes)
    assert torch.equal(s[:, :m].cpu(), want.scale)
    scale = torch.full((1,), 9.0, device="cuda")
    q, _ = sglang.per_tensor_quant_mla_fp8(on_gpu, scale)
    want = reference.quantize_per_tensor(x, eps=1e-12)
    assert torch.equal(q.view(torch.uint8).cpu(), want.codes)
    assert scale.item() == want.scale.item()


@pytest.mark.parametrize("fmt", [fp8.E4M3FN, fp8.E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_every_16_bit_pattern_casts_to_the_references_byte(architecture, dtype, fmt):
    x = testing.every_16_bit_pattern(dtype).view(256, 256)
    q = sglang.fp8_quantize(x.cuda()[:, 64:192], fp8_dtype=fmt.dtype)
    assert torch.equal(q.view(torch.uint8).cpu(), fp8.encode(x[:, 64:192], fmt))


def test_ties_round_to_even_on_every_generation(architecture):
    # through fp16, as Triton's own cast goes on SM89, the second would become 0x38
    x = torch.tensor([1.0625, 1.0625001, 1.1875, 1.1875001], device="cuda")
    assert sglang.fp8_quantize(x).view(torch.uint8).tolist() == [0x38, 0x39, 0x3A, 0x3A]


def test_a_graph_replays_a_norm_and_its_residual():
    x = testing.random_rows(16, 4096, device="cuda")
    residual, weight = torch.zeros_like(x), norm_weight(4096, x.dtype, "cuda")
    quantize.norm_per_token(x, weight, residual=residual)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q = quantize.norm_per_token(x, weight, residual=residual)
    residual.copy_(testing.random_rows(16, 4096, seed=3))
    expected = residual.clone()
    want = quantize.norm_per_token(x, weight, residual=expected)
    graph.replay()
    assert torch.equal(residual, expected)
    testing.assert_matches(q, want)


@pytest.mark.parametrize(
    ("quantizer", "expected"),
    [
        (quantize.per_token, reference.quantize_per_token),
        (lambda x: quantize.per_group(x, 64), lambda x: reference.quantize_per_group(x, 64)),
        (quantize.per_tensor, reference.quantize_per_tensor),
    ],
    ids=["token", "group", "tensor"],
)
def test_a_call_in_a_known_form_quantizes_its_own_values(quantizer, expected):
    wide = testing.random_rows(5, 1100).cuda()
    forms = {
        "aligned": lambda seed: testing.random_rows(5, 512, seed=seed).cuda(),
        "fp16": lambda seed: testing.random_rows(5, 512, torch.float16, seed).cuda(),
        "unaligned": lambda seed: (wide * (seed + 1))[:, 1:513],
        "transposed": lambda seed: testing.random_rows(512, 5, seed=seed).cuda().t(),
        "three levels": lambda seed: (
            testing.random_rows(48, 512, seed=seed).cuda().view(4, 3, 4, 512)[::2, :, ::2]
        ),
    }
    kept = []
    for make in forms.values():
        for seed in range(3):
            x = make(seed)
            kept.append((quantizer(x), expected(x.cpu())))
    # compared at the end: no call may have written into what an earlier one returned
    for got, want in kept:
        testing.assert_matches(got, want)


def test_a_known_form_on_another_gpu_runs_there():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = testing.random_rows(16, 4096)
    want = reference.quantize_per_token(x)
    for device in ("cuda:0", "cuda:1", "cuda:0", "cuda:1"):
        testing.assert_matches(quantize.per_token(x.to(device)), want)
