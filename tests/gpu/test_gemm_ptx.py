"""The weight-only kernels as the code of older GPUs: their PTX, executed on the GPU at hand."""

from dataclasses import replace

import pytest
import torch

from anyfp8 import gemm, testing, testing_gemm
from anyfp8.device import ARCHES, generic_device
from anyfp8.gemm.launch import use_target
from anyfp8.gemm.triton_w8a16 import W8A16Config
from anyfp8.problem import Scheme

pytestmark = pytest.mark.gpu

SCHEMES = (
    Scheme("channel"),
    Scheme("tensor"),
    Scheme("block", block=(128, 128)),
    Scheme("block", block=(48, 32)),
)
SHAPES = (
    *((1, 33), (33, 33), (80, 96), (33, 320), (1856, 2688), (8608, 320), (80, 2688)),
    *((512, 512), (576, 7168), (4096, 4096)),
)
# the two differ in nothing but the name that Triton writes: the second is spared half of it
CASES = [
    *(("sm_80", dtype, shape) for dtype in (torch.bfloat16, torch.float16) for shape in SHAPES),
    *(("sm_86", torch.bfloat16, shape) for shape in SHAPES[:6]),
    *(("sm_86", torch.float16, shape) for shape in SHAPES[6:9]),
]


def name_of(case):
    arch, dtype, (n, k) = case
    return f"{arch}-{str(dtype)[6:]}-n{n}-k{k}"


def as_code_of(arch, seen):
    def run(launch):
        seen.append(launch.kernel.__name__)
        testing.run_launch(launch, arch)

    return use_target(generic_device(ARCHES[arch]), run)


@pytest.mark.parametrize("case", CASES, ids=name_of)
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
def test_product_errs_at_most_twice_as_much_as_torch(case, scheme):
    arch, dtype, shape = case
    backend, device = gemm.backend("triton_w8a16"), generic_device(ARCHES[arch])
    layer = testing_gemm.random_layer(scheme, 133, *shape, dtype, "cuda")
    problem = testing_gemm.problem_of(layer, dtype, True, "fp32_128")
    wanted = testing_gemm.oracle(layer, False, True, dtype)
    seen, complaints = [], []
    with as_code_of(arch, seen):
        split = backend.lowered(W8A16Config("fused", 64, 128, 64, 3), problem, device)
        tiles = [(m, backend.default_config(replace(problem, m=m), device)) for m in (1, 7, 33)]
        for m, config in (*tiles, (61, split), (133, W8A16Config("chunked"))):
            found = testing_gemm.check(backend, layer, wanted, problem, device, config, m)
            complaints += [found] if found else []
    assert {"w8a16_plain", "sum_parts", "dequantize"} <= set(seen)
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86"])
@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize("how", ["fused", "chunked"])
def test_every_finite_code_is_decoded_exactly(arch, name, how):
    backend = gemm.backend("triton_w8a16")
    codes = torch.arange(256, dtype=torch.uint8, device="cuda")
    codes = codes[(codes & 0x7F) != 0x7F]
    w = torch.zeros(254, 32, dtype=torch.uint8, device="cuda")
    w[:, 0] = codes
    q = testing_gemm.QTensor(w, torch.ones(254, 1, device="cuda"))
    scheme = Scheme("channel")
    weight = testing_gemm.canonical_weight(q, scheme)
    x = torch.zeros(3, 32, dtype=testing_gemm.DTYPES[name], device="cuda")
    x[:, 0] = 1
    problem = testing_gemm.Problem("linear", scheme, 3, 254, 32, name, "fp32")
    with as_code_of(arch, []):
        y = backend.run(x, weight, problem, W8A16Config(how, block_k=32))
    assert torch.equal(y, testing_gemm.reference.dequantize(q)[:, 0].expand(3, -1))


@pytest.mark.parametrize("arch", ["sm_80", None])
def test_two_runs_give_the_same_bits_with_split_k(arch):
    backend = gemm.backend("triton_w8a16")
    layer = testing_gemm.random_layer(Scheme("channel"), 16, 576, 7168, device="cuda")
    problem = testing_gemm.problem_of(layer, torch.bfloat16, True, "fp32_128")
    weight = testing_gemm.canonical_weight(layer.weight, layer.scheme)
    config = W8A16Config(split_k=8)

    def once():
        if arch is None:
            return backend.run(layer.x, weight, problem, config, layer.bias)
        with as_code_of(arch, []):
            return backend.run(layer.x, weight, problem, config, layer.bias)

    first = once()
    assert all(torch.equal(once(), first) for _ in range(5))
