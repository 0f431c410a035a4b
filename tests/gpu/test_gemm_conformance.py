"""Every willing backend on real models' shapes and odd ones, on the GPU at hand.

A test is a layer, a backend and an accumulate mode, and holds every M with and without a bias. Run
in parallel with `-n 16 --dist loadgroup`: one process then has all tests of a layer, and what they
share (operands, an exact product) is made once and dropped with the last of them; most of the time
goes into compiling kernels. One process has all of the largest layers, one after another.
"""

from dataclasses import replace
from functools import cached_property
from importlib.util import find_spec
from itertools import islice

import pytest
import torch

from anyfp8 import gemm, testing_gemm
from anyfp8.device import current_device
from anyfp8.problem import Scheme

pytestmark = pytest.mark.gpu

ROW = Scheme("channel", "token", True)
BLOCK = Scheme("block", "group", True, block=(128, 128), group=128)
SCHEMES = (
    ROW,
    Scheme("tensor", "tensor", False),
    Scheme("tensor", "tensor", True),
    Scheme("tensor", "token", True),
    Scheme("channel", "tensor", False),
    BLOCK,
    Scheme("block", "group", True, block=(64, 32), group=32),
    Scheme("channel", "group", True, group=128),
    Scheme("channel"),
)
QWEN3_8B = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288))
LLAMA3_70B = (
    *((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),
    *((1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584)),
)
DEEPSEEK_V3 = (
    *((2112, 7168), (24576, 1536), (32768, 512), (7168, 16384)),
    # the dense layers' two, an expert's two
    *((36864, 7168), (7168, 18432), (4096, 7168), (7168, 2048)),
)
ODD = (
    *((1, 1), (1, 33), (33, 1), (33, 33), (33, 80), (80, 320), (320, 576), (576, 1856)),
    *((1856, 2112), (2112, 8608), (8608, 320), (576, 7168), (512, 712), (33, 48), (4, 100)),
    *((256, 640), (128, 896)),  # whole blocks, 5 and 7 of them along K
)
MS = (0, 1, 2, 15, 16, 17, 63, 64, 65, 133, 512, 4097)
FIRST = (ROW, BLOCK, Scheme("channel"))  # the schemes of the large shapes
LARGE = 200_000_000  # weights that only one process at a time should hold
DTYPES = (torch.bfloat16, torch.float16)


def cases():
    for scheme in FIRST:
        for n, k in (*QWEN3_8B, *LLAMA3_70B, *DEEPSEEK_V3):
            yield from ((scheme, n, k, dtype) for dtype in DTYPES)
    for scheme in SCHEMES:
        for n, k in ODD:
            yield from ((scheme, n, k, dtype) for dtype in DTYPES)


def marked(case):
    scheme, n, k, dtype = case
    name = f"{scheme.name}-n{n}-k{k}-{testing_gemm.DTYPE_NAMES[dtype]}"
    group = "large" if n * k > LARGE else name
    marks = [pytest.mark.xdist_group(group)] if find_spec("xdist") else []
    return pytest.param(case, marks=marks, id=name)


class Operands:
    """A layer and its products, made when a test asks; one exact product [M, N] is held at most."""

    def __init__(self, case):
        self.case = self.scheme, self.n, self.k, self.dtype = case
        self.oracles = {}

    @cached_property
    def layer(self):
        scheme, n, k, dtype = self.case
        return testing_gemm.random_layer(scheme, max(MS), n, k, dtype, "cuda")

    def oracle(self, quantized, bias):
        if any(kind != quantized for kind, _ in self.oracles):
            self.oracles.clear()
        if (quantized, bias) not in self.oracles:
            other = self.oracles.get((quantized, not bias))
            self.oracles[quantized, bias] = testing_gemm.oracle(
                self.layer, quantized, bias, self.dtype, MS, other and other.product
            )
        return self.oracles[quantized, bias]

    def drop(self):
        # a failed test's traceback may hold this object, and must not hold its tensors
        self.__dict__.clear()


@pytest.fixture(scope="module")
def operands(request):
    made = Operands(request.param)
    yield made
    made.drop()
    torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def no_tf32():
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize("backend", gemm.backends(), ids=lambda b: b.name)
@pytest.mark.parametrize("accumulate", ["fast", "fp32_128"])
@pytest.mark.parametrize("operands", [marked(c) for c in cases()], indirect=True)
def test_product_errs_at_most_twice_as_much_as_torch(operands, accumulate, backend):
    scheme, n, k, dtype = operands.case
    device, name = current_device(), testing_gemm.DTYPE_NAMES[dtype]
    found = []
    for bias in (False, True):
        problem = testing_gemm.Problem("linear", scheme, 1, n, k, name, name, bias, accumulate)
        why = _refusal(backend, problem, device)
        if why:
            pytest.skip(f"{backend.name} {why}")
        layer, wanted = operands.layer, operands.oracle(backend.kind == "w8a8", bias)
        found += [testing_gemm.check(backend, layer, wanted, problem, device, rows=m) for m in MS]
    assert not any(found), "\n".join(filter(None, found))


def _refusal(backend, problem, device):
    if backend.kind == "w8a8" and problem.scheme.activation == "none":
        return "is for quantized activations"
    if problem.accumulate not in backend.accumulates:
        return f"has no mode {problem.accumulate}"
    if backend.kind == "weight_only" and problem.accumulate == "fast":
        return "accumulates in fp32 always"
    missing = backend.missing() or backend.why_not(problem, device)
    return missing or backend.probe(problem, device)


@pytest.mark.parametrize("scheme", [ROW, BLOCK, Scheme("channel")], ids=lambda s: s.name)
@pytest.mark.parametrize("name", ["triton_row", "triton_block", "triton_w8a16"])
def test_any_legal_configuration_gives_the_same_product(name, scheme):
    backend, device, dtype = gemm.backend(name), current_device(), torch.bfloat16
    n, k = 320, 1096
    layer = testing_gemm.random_layer(scheme, 133, n, k, dtype, "cuda")
    problem = testing_gemm.problem_of(layer, dtype, True, "fp32_128")
    why = _refusal(backend, problem, device)
    if why:
        pytest.skip(f"{backend.name} {why}")
    wanted = testing_gemm.oracle(layer, backend.kind == "w8a8", True, dtype)
    every = list(backend.configs(replace(problem, m=48), device))
    some = list(islice(every, 0, None, max(1, len(every) // 40)))
    # K tiles side by side are for fewer rows
    few = backend.configs(replace(problem, m=7), device)
    some += [config for config in few if getattr(config, "parts", 1) > 1][::5]
    complaints = [
        testing_gemm.check(backend, layer, wanted, problem, device, config, rows=m)
        for config in some
        for m in (5, 48)
    ]
    assert not [c for c in complaints if c], "\n".join(c for c in complaints if c)


@pytest.mark.parametrize("name", ["triton_row", "triton_block", "triton_w8a16", "dequant"])
def test_a_row_has_the_same_bits_in_any_batch_with_one_configuration(name):
    backend, device = gemm.backend(name), current_device()
    scheme = {"triton_block": BLOCK}.get(name, ROW)
    layer = testing_gemm.random_layer(scheme, 1024, 2112, 1536, device="cuda")
    problem = testing_gemm.problem_of(layer, torch.bfloat16, True)
    config = backend.default_config(replace(problem, m=64), device)
    if name == "dequant":
        config = replace(config, row_by_row=True)
    weight = testing_gemm.canonical_weight(layer.weight, scheme)
    seen = []
    for m in (1, 2, 17, 128, 1024):
        x = layer.x[:m]
        if backend.kind == "w8a8":
            x = testing_gemm.QTensor(layer.q.data[:m], layer.q.scale[:m], layer.q.block)
        y = backend.run(x, weight, replace(problem, m=m), config, layer.bias)
        seen.append(y[0].clone())
    assert all(torch.equal(row, seen[0]) for row in seen)


@pytest.mark.parametrize("name", ["triton_row", "triton_block", "torch_scaled_mm"])
@pytest.mark.parametrize("accumulate", ["fast", "fp32_128"])
def test_long_sums_of_one_sign_keep_the_precision_that_the_mode_promises(name, accumulate):
    backend, device = gemm.backend(name), current_device()
    k, n, m = 65536, 256, 64
    scheme = BLOCK if name == "triton_block" else Scheme("tensor", "tensor", True)
    ones = torch.full((n, k), 0x38, dtype=torch.uint8, device="cuda")
    w, x = ones.clone(), ones[:m].clone()
    w[:, 0], x[:, 0] = 0x7E, 0x7E
    one = torch.ones((), device="cuda")
    sw = one if scheme.block is None else torch.ones(n // 128, k // 128, device="cuda")
    sx = one if scheme.block is None else torch.ones(m, k // 128, device="cuda")
    weight = testing_gemm.canonical_weight(testing_gemm.QTensor(w, sw, scheme.block), scheme)
    q = testing_gemm.QTensor(x.view(torch.float8_e4m3fn), sx, scheme.block and (1, 128))
    problem = testing_gemm.Problem("gemm", scheme, m, n, k, "bf16", "fp32", False, accumulate)
    if _refusal(backend, problem, device):
        # cuBLASLt's product of block scales may give 16 bits only
        problem = replace(problem, out_dtype="bf16")
    why = _refusal(backend, problem, device)
    if why:
        pytest.skip(f"{name} {why}")
    y = backend.run(q, weight, problem, backend.default_config(problem, device))
    exact = 448.0 * 448.0 + k - 1
    error = ((y.double() - exact).abs().max() / exact).item()
    rounding = 2**-9 if problem.out_dtype == "bf16" else 0.0
    # "fast" may lose a unit of 2^-13 in each sum of 32
    assert error < rounding + (1e-3 if accumulate == "fp32_128" else k / 32 * 2**-13)


@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 5, 9, 17])
def test_torchs_block_scales_are_laid_out_right_for_any_number_of_blocks_along_k(blocks):
    backend, device = gemm.backend("torch_scaled_mm"), current_device()
    layer = testing_gemm.random_layer(BLOCK, 64, 256, 128 * blocks, device="cuda")
    problem = testing_gemm.problem_of(layer, torch.bfloat16, True)
    why = _refusal(backend, problem, device)
    if why:
        pytest.skip(f"torch_scaled_mm {why}")
    wanted = testing_gemm.oracle(layer, True, True, torch.bfloat16)
    found = [testing_gemm.check(backend, layer, wanted, problem, device, rows=m) for m in (2, 64)]
    assert found == [None, None]


def test_every_finite_code_is_decoded_exactly():
    backend, device = gemm.backend("triton_w8a16"), current_device()
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].view(-1, 1).repeat(1, 32).cuda()
    w = torch.zeros(254, 32, dtype=torch.uint8, device="cuda")
    w[:, 0] = codes[:, 0]
    scheme = Scheme("channel")
    scale = torch.ones(254, 1, device="cuda")
    weight = testing_gemm.canonical_weight(testing_gemm.QTensor(w, scale), scheme)
    want = testing_gemm.reference.dequantize(testing_gemm.QTensor(w, scale))[:, 0]
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        x = torch.zeros(3, 32, dtype=dtype, device="cuda")
        x[:, 0] = 1
        problem = testing_gemm.Problem("linear", scheme, 3, 254, 32, name, "fp32")
        for config in (
            backend.default_config(problem, device),
            type(backend).config_class("chunked"),
        ):
            y = backend.run(x, weight, problem, config)
            assert torch.equal(y, want.expand(3, -1))
