"""On a GPU: the reference's bytes, natively and from the PTX of older architectures."""

import functools
from importlib.util import find_spec

import pytest
import torch

from anyfp8 import fp8, quantize, reference, testing
from anyfp8.tools.quantize_cases import cases
from anyfp8.tools.quantize_inputs import move, odd_rows

triton = pytest.importorskip("triton")
tl = triton.language

from anyfp8.kernels.encode import scales_of  # noqa: E402 - it imports Triton

pytestmark = pytest.mark.gpu


@triton.jit
def scales_kernel(amax_ptr, scale_ptr, inverse_ptr, FP8_MAX: tl.constexpr):
    at = tl.program_id(0) * 4096 + tl.arange(0, 4096)
    scale, inverse = scales_of(tl.load(amax_ptr + at), 1e-30, FP8_MAX, False, True)
    tl.store(scale_ptr + at, scale)
    tl.store(inverse_ptr + at, inverse)


def architectures():
    if not torch.cuda.is_available():
        return ["native", "sm_80", "sm_89"]
    mine = torch.cuda.get_device_capability()
    return ["native"] + [a for a, c in (("sm_80", (8, 0)), ("sm_89", (8, 9))) if c <= mine]


# one process has what takes gigabytes, here and among the GEMM tests
large = pytest.mark.xdist_group("large") if find_spec("xdist") else lambda test: test


def parameter(case):
    # with --dist loadgroup a case's architectures share a process, and so their reference
    group = [pytest.mark.xdist_group(case.name)] if find_spec("xdist") else []
    return pytest.param(case, id=case.name, marks=group)


@functools.lru_cache(maxsize=1)
def known(case):
    """(x, what the reference makes of it), once for a case's architectures, which follow it."""
    x = case.x()
    return x, case.reference(x)


@pytest.mark.parametrize("architecture", architectures())
@pytest.mark.parametrize("case", [parameter(case) for case in cases()])
def test_kernel_gives_the_bytes_of_the_reference(case, architecture, forbid_reference):
    x, want = known(case)
    forbid_reference()
    on_gpu = move(x, "cuda")
    if architecture == "native":
        got = case.kernel(on_gpu)
    else:
        with testing.on_architecture(architecture) as launches:
            got = case.kernel(on_gpu)
        assert launches or x.numel() == 0
    testing.assert_matches(got, want)


@large
def test_rows_past_two_gigabytes_are_reached():
    # 28,672 columns: row 74,899 lies past 2**31 elements
    m, k = 75_000, 28_672
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 7 << 30:
        pytest.skip("needs 7 GiB that no other process holds")
    x = torch.zeros(m, k, dtype=torch.bfloat16, device="cuda")
    x[-3:] = testing.random_rows(3, k, device="cuda")
    tail = x[-3:].cpu()
    per_token, per_group = quantize.per_token, lambda x: quantize.per_group(x, 128)
    wanted = reference.quantize_per_token(tail), reference.quantize_per_group(tail, 128)
    for kernel, want in zip((per_token, per_group), wanted, strict=True):
        quantized = kernel(x)
        assert torch.equal(quantized.codes[-3:].cpu(), want.codes)
        assert torch.equal(quantized.scale[-3:].cpu(), want.scale)
        assert not quantized.codes[:1000].any()
        del quantized  # 2 GiB, before the next two


def test_padding_and_neighbours_are_not_touched():
    x = odd_rows(torch.bfloat16, 512).cuda()
    storage = torch.full((20, 640), 0xAB, dtype=torch.uint8, device="cuda")
    scale = torch.full((20, 3), -7.0, device="cuda")
    quantize.per_token(x, out=storage[2:18, 64:576], out_scale=scale[2:18, 1:2])
    want = reference.quantize_per_token(x.cpu())
    assert torch.equal(storage[2:18, 64:576].cpu(), want.codes)
    assert torch.equal(scale[2:18, 1:2].cpu(), want.scale)
    storage[2:18, 64:576] = 0xAB
    scale[2:18, 1] = -7.0
    assert (storage == 0xAB).all()
    assert (scale == -7.0).all()


def test_a_graph_replays_to_the_same_bytes():
    x = testing.random_rows(16, 4096, device="cuda")
    quantize.per_token(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q = quantize.per_token(x)
    fresh = testing.random_rows(16, 4096, seed=5, device="cuda")
    x.copy_(fresh)
    graph.replay()
    testing.assert_matches(q, reference.quantize_per_token(fresh.cpu()))


def test_dependent_launches_read_what_the_previous_kernel_wrote():
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs programmatic dependent launch (SM90)")
    x = testing.random_rows(64, 4096, device="cuda")
    for seed in range(20):
        x.copy_(testing.random_rows(64, 4096, seed=seed, device="cuda"))
        want = reference.quantize_per_token(x.cpu())
        x.neg_().neg_()
        testing.assert_matches(quantize.per_token(x, pdl=True), want)
        want = reference.quantize_per_group(x.cpu(), 128)
        testing.assert_matches(quantize.per_group(x, 128, pdl=True), want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_tensor_of_another_gpu_is_quantized_there():
    x = testing.random_rows(4, 256).to("cuda:1")
    with torch.cuda.device(0):
        q = quantize.per_token(x)
    assert q.data.device == x.device
    testing.assert_matches(q, reference.quantize_per_token(x.cpu()))


def test_every_scale_and_inverse_is_correctly_rounded():
    # all mantissas; the exponents of the smallest floor, of 1 and of the largest fp32 number
    mantissas = torch.arange(1 << 23, dtype=torch.int32)
    for exponent in (28, 127, 254):
        amax = (mantissas + (exponent << 23)).view(torch.float32)
        for fmt in (fp8.E4M3FN, fp8.E5M2, fp8.E4M3FNUZ):
            scale = amax / torch.tensor(fmt.max)
            inverse = 1.0 / scale
            got = torch.empty(2, len(amax), device="cuda")
            scales_kernel[(len(amax) // 4096,)](amax.cuda(), *got, fmt.max, num_warps=4)
            assert torch.equal(got[0].cpu(), scale)
            assert torch.equal(got[1].cpu(), inverse)
