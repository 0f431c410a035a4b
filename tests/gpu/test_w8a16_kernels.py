"""The weight-only kernels on the GPU at hand: natively, and as the code of an A100 and a 3090."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from anyfp8 import reference, testing, testing_gemm
from anyfp8.device import ARCHES, current_device, generic_device
from anyfp8.gemm.launch import use_target
from anyfp8.gemm.triton_w8a16 import BACKEND, W8A16Config
from anyfp8.gemm.w8a16_chunks import SCRATCH_BYTES
from anyfp8.linear import Fp8Linear
from anyfp8.problem import Problem, QTensor, Scheme
from anyfp8.select import Request

pytestmark = pytest.mark.gpu

BLOCK = Scheme("block", block=(128, 128))
KERNELS = (
    W8A16Config("gemv", 1, 8, 128, 1, 1, 2, 3),
    W8A16Config("gemv", 4, 8, 128, 2, 1, 2, 3),
    W8A16Config("fused", 16, 32, 32, 1, 4, 4, 3),
    W8A16Config("fused", 64, 32, 32, 2, 2, 2, 3),
    W8A16Config("fused", 8, 32, 64, 1, 4, 4, 4),
    W8A16Config("fused", 64, 128, 64, 2, 1, 4, 3),
)
# Hopper's own
NATIVE = (
    W8A16Config("wide", 64, 128, 64, 1, 1, 4, 4),
    W8A16Config("wide", 128, 64, 64, 2, 1, 4, 3),
)


def name_of(value):
    if not isinstance(value, W8A16Config):
        return getattr(value, "name", None) or str(value).removeprefix("torch.")
    return f"{value.how}-{value.block_m}-slices{value.slices}-split{value.split_k}"


def as_code_of(arch):
    if arch is None:
        return nullcontext()
    device = generic_device(ARCHES[arch])
    return use_target(device, lambda launch: testing.run_launch(launch, arch))


def device_of(arch):
    return current_device() if arch is None else generic_device(ARCHES[arch])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
@pytest.mark.parametrize("scheme", [Scheme("channel"), BLOCK], ids=name_of)
@pytest.mark.parametrize(
    ("arch", "config"),
    [
        *((None, config) for config in (*KERNELS, *NATIVE)),
        *(("sm_80", config) for config in KERNELS),
        *(("sm_86", config) for config in KERNELS[2:]),
    ],
    ids=name_of,
)
def test_each_kernel_errs_at_most_twice_as_much_as_torch(arch, config, scheme, dtype):
    complaints = []
    for n, k in ((33, 96), (1856, 2688)):
        layer = testing_gemm.random_layer(scheme, 17, n, k, dtype, "cuda")
        problem = testing_gemm.problem_of(layer, dtype, True, "fp32_128")
        wanted = testing_gemm.oracle(layer, False, True, dtype)
        with as_code_of(arch):
            found = testing_gemm.check(BACKEND, layer, wanted, problem, device_of(arch), config)
        complaints += [found] if found else []
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize("scheme", [Scheme("channel"), Scheme("tensor"), BLOCK], ids=str)
def test_the_default_of_each_m_is_right_on_real_and_odd_shapes(scheme):
    complaints = []
    for n, k in ((1, 33), (80, 320), (1856, 96), (4096, 4096)):
        layer = testing_gemm.random_layer(scheme, 300, n, k, device="cuda")
        problem = testing_gemm.problem_of(layer, torch.bfloat16, True, "fp32_128")
        wanted = testing_gemm.oracle(layer, False, True, torch.bfloat16)
        for m in (1, 2, 4, 9, 16, 33, 65, 129, 300):
            found = testing_gemm.check(BACKEND, layer, wanted, problem, current_device(), rows=m)
            complaints += [found] if found else []
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize("shape", [(1, 33), (320, 320), (80, 2688), (8608, 96)], ids=str)
@pytest.mark.parametrize("scheme", [Scheme("channel"), BLOCK], ids=name_of)
@pytest.mark.parametrize("arch", ["sm_80", "sm_86"])
def test_the_defaults_of_older_gpus_are_right_on_shapes_that_no_tile_divides(arch, scheme, shape):
    layer = testing_gemm.random_layer(scheme, 130, *shape, device="cuda")
    problem = testing_gemm.problem_of(layer, torch.bfloat16, True, "fp32_128")
    wanted = testing_gemm.oracle(layer, False, True, torch.bfloat16)
    complaints = []
    with as_code_of(arch):
        for m in (1, 5, 17, 64, 130):
            found = testing_gemm.check(BACKEND, layer, wanted, problem, device_of(arch), rows=m)
            complaints += [found] if found else []
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("arch", "config"),
    [
        *((None, config) for config in (*KERNELS, *NATIVE, W8A16Config("chunked"))),
        *(("sm_80", config) for config in (*KERNELS, W8A16Config("chunked"))),
    ],
    ids=name_of,
)
def test_every_finite_code_is_decoded_exactly(arch, config, name):
    codes = torch.arange(256, dtype=torch.uint8, device="cuda")
    codes = codes[(codes & 0x7F) != 0x7F]
    # each code at each place of a register of four
    w = torch.zeros(254 * 4, 32, dtype=torch.uint8, device="cuda")
    rows = torch.arange(254 * 4, device="cuda")
    w[rows, rows % 4] = codes.repeat_interleave(4)
    q = QTensor(w, torch.ones(254 * 4, 1, device="cuda"))
    x = torch.zeros(3, 32, dtype=testing_gemm.DTYPES[name], device="cuda")
    x[:, :4] = 1
    problem = Problem("linear", Scheme("channel"), 3, 254 * 4, 32, name, "fp32")
    weight = testing_gemm.canonical_weight(q, problem.scheme)
    with as_code_of(arch):
        y = BACKEND.run(x, weight, problem, replace(config, block_k=32))
    assert torch.equal(y, reference.dequantize(q).sum(1).expand(3, -1))


@pytest.mark.parametrize("config", [*KERNELS, *NATIVE], ids=name_of)
def test_two_runs_give_the_same_bits(config):
    layer = testing_gemm.random_layer(Scheme("channel"), 16, 4096, 4096, device="cuda")
    problem = testing_gemm.problem_of(layer, torch.bfloat16, True)
    weight = testing_gemm.canonical_weight(layer.weight, layer.scheme)
    first = BACKEND.run(layer.x, weight, problem, config, layer.bias)
    for _ in range(10):
        assert torch.equal(BACKEND.run(layer.x, weight, problem, config, layer.bias), first)


@pytest.mark.parametrize("scheme", [Scheme("tensor", "tensor"), BLOCK], ids=lambda s: s.name)
def test_a_forced_layer_keeps_one_byte_a_weight_and_a_bounded_scratch(scheme):
    n, k = 24576, 4096
    layer = Fp8Linear(k, n, scheme, device="cuda", request=Request(force_weight_only=True))
    q = reference.quantize_weight(torch.randn(n, k, device="cuda"), scheme)
    static = torch.ones((), device="cuda") if scheme.activation == "tensor" else None
    layer.load(q, input_scale=static)
    layer.prepare()
    del q
    assert layer.nbytes <= 0.55 * 2 * n * k
    for m, scratch in ((1, 0.05 * n * k), (16, 0.05 * n * k), (4096, 1.1 * SCRATCH_BYTES)):
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        layer(x)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = layer(x)
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - before <= scratch + 2 * y.numel()


def test_a_stack_of_forced_layers_equals_dequantized_bf16_ones_within_rounding():
    scheme, sizes = Scheme("tensor", "tensor"), (576, 1536, 576, 960, 49152)
    ours, theirs = torch.nn.Sequential(), torch.nn.Sequential()
    for k, n in pairwise(sizes):
        q = reference.quantize_weight(torch.randn(n, k, device="cuda") / k**0.5, scheme)
        layer = Fp8Linear(k, n, scheme, device="cuda", request=Request(force_weight_only=True))
        layer.load(q, input_scale=torch.full((), 0.01, device="cuda"))
        plain = torch.nn.Linear(k, n, bias=False, dtype=torch.bfloat16, device="cuda")
        plain.weight.data = reference.dequantize(q, torch.bfloat16)
        ours.append(layer).append(torch.nn.SiLU())
        theirs.append(plain).append(torch.nn.SiLU())
    for m in (1, 3, 16, 64, 128, 300):
        x = torch.randn(m, 576, device="cuda", dtype=torch.bfloat16)
        got, want = ours(x).double(), theirs(x).double()
        assert (got - want).norm() / want.norm() < 2**-7
        assert {c.backend for _, c in ours[0].plan().choices} <= {"marlin", "triton_w8a16"}


class Block(torch.nn.Module):
    """A layer of Qwen3-8B without its attention: what it multiplies, in its order."""

    def __init__(self, linear):
        super().__init__()
        self.qkv, self.o = linear(6144, 4096), linear(4096, 4096)
        self.gate_up, self.down = linear(24576, 4096), linear(4096, 12288)

    def forward(self, h):
        q, v = self.qkv(norm(h)).split((4096, 2048), -1)
        h = h + self.o(q * torch.sigmoid(v.repeat(1, 2)))
        gate, up = self.gate_up(norm(h)).chunk(2, -1)
        return h + self.down(torch.nn.functional.silu(gate) * up)


def norm(h):
    return torch.nn.functional.rms_norm(h, h.shape[-1:])


@pytest.mark.parametrize("scheme", [Scheme("tensor", "tensor"), BLOCK], ids=name_of)
def test_forced_layers_of_qwen3_8b_give_the_logits_of_dequantized_ones_in_half_the_memory(scheme):
    ours, theirs = torch.nn.Sequential(), torch.nn.Sequential()
    for _ in range(3):
        weights = []

        def forced(n, k, weights=weights):
            q = reference.quantize_weight(torch.randn(n, k, device="cuda") / k**0.5, scheme)
            layer = Fp8Linear(k, n, scheme, device="cuda", request=Request(force_weight_only=True))
            static = torch.full((), 0.01, device="cuda")
            layer.load(q, input_scale=static if scheme.activation == "tensor" else None)
            weights.append(reference.dequantize(q, torch.bfloat16))
            return layer

        def plain(n, k, weights=weights):
            layer = torch.nn.Linear(k, n, bias=False, device="meta")
            layer.weight = torch.nn.Parameter(weights.pop(0), requires_grad=False)
            return layer

        ours.append(Block(forced))
        theirs.append(Block(plain))
    head = torch.randn(32000, 4096, device="cuda", dtype=torch.bfloat16) / 64
    linears = [layer for layer in ours.modules() if isinstance(layer, Fp8Linear)]
    for m in (1, 2, 5, 16, 32, 64, 100, 512):
        x = torch.randn(m, 4096, device="cuda", dtype=torch.bfloat16)
        with torch.inference_mode():
            got, want = (norm(model(x)) @ head.T for model in (ours, theirs))
        assert (got.double() - want.double()).norm() / want.double().norm() < 2**-6
        # two of 32,000 random logits may lie closer than rounding, and either may be chosen then:
        # rms errors are held to 2^-6 above, the largest is 4 times that, and two logits err
        lost = want.amax(-1) - want.gather(-1, got.argmax(-1, keepdim=True))[:, 0]
        assert (lost.float() <= 2**-3 * want.float().square().mean(-1).sqrt()).all()
    dense = sum(2 * layer.in_features * layer.out_features for layer in linears)
    assert sum(layer.nbytes for layer in linears) <= 0.55 * dense
    assert {c.backend for layer in linears for _, c in layer.plan().choices} <= {
        "marlin",
        "triton_w8a16",
    }
