"""The weight-only kernels without a GPU: interpreted products, code for every architecture."""

import os
import re
import subprocess
import sys
from itertools import islice

import pytest
import torch

from anyfp8.device import ARCHES, CATALOGUE, CPU, find_device, generic_device
from anyfp8.errors import InputError
from anyfp8.gemm.base import CanonicalWeight
from anyfp8.gemm.compile import compile_for
from anyfp8.gemm.launch import use_target
from anyfp8.gemm.triton_w8a16 import BACKEND, W8A16Config
from anyfp8.gemm.w8a16_chunks import SCRATCH_BYTES, chunk_rows, lanes_for
from anyfp8.gemm.w8a16_run import registers_of
from anyfp8.problem import Problem, Scheme

pytest.importorskip("triton")

BLOCK = Scheme("block", block=(128, 128))
ARCH_NAMES = (
    *("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"),
    *("gfx90a", "gfx942", "gfx1100", "gfx1201"),
)
KERNELS = {
    "gemv": W8A16Config("gemv", 1, 8, 1024, 1, 1, 4, 4),
    "gemv4": W8A16Config("gemv", 4, 8, 512, 1, 1, 4, 4),
    "sliced": W8A16Config("fused", 16, 32, 64, 1, 4, 4, 3),
    "eight": W8A16Config("fused", 8, 32, 128, 1, 4, 4, 4),
    "plain": W8A16Config("fused", 64, 64, 64, 2, 1, 4, 3),
    "wide": W8A16Config("wide", 64, 128, 64, 1, 1, 4, 4),
    "paired": W8A16Config("paired", 32, 64, 128, 1, 1, 4, 4),
}

PRODUCTS = """
import sys
from itertools import product
import torch
from anyfp8 import testing_gemm
from anyfp8.device import CPU
from anyfp8.gemm.triton_w8a16 import BACKEND, W8A16Config
from anyfp8.problem import Scheme

dtype = getattr(torch, sys.argv[1])
scheme = Scheme.parse(sys.argv[2])
step = min(64, scheme.block[1] if scheme.block else 64) // 32 * 32
configs = [
    W8A16Config("gemv", 1, 32, step, 1, 1, 4),
    W8A16Config("gemv", 2, 32, step, 1, 1, 4),
    W8A16Config("gemv", 4, 16, step, 3, 1, 4),
    W8A16Config("fused", 16, 32, 32, 1, 4, 4),
    W8A16Config("fused", 16, 64, 32, 2, 2, 2),
    W8A16Config("fused", 32, 64, step, 1, 1, 4),
    W8A16Config("fused", 8, 32, 32, 1, 2, 2),
    W8A16Config("wide", 64, 32, step, 1, 1, 4),
    W8A16Config("fused", 16, 32, step, 3, 1, 4),
    W8A16Config("chunked"),
]
complaints = []
for text in sys.argv[3:]:
    n, k = map(int, text.split("x"))
    layer = testing_gemm.random_layer(scheme, 5, n, k, dtype)
    # the interpreter cuts off what a GPU rounds to bf16
    out = torch.float32 if dtype == torch.bfloat16 else dtype
    for bias in (False, True):
        problem = testing_gemm.problem_of(layer, out, bias)
        wanted = testing_gemm.oracle(layer, False, bias, out)
        some = configs if n * k < 50_000 else configs[2 + bias :: 2]
        if k % 16 == 0:
            some = [*some, W8A16Config("paired", 32, 64, step, 2, 1, 4)]
        for config in some:
            found = testing_gemm.check(BACKEND, layer, wanted, problem, CPU, config)
            if found:
                complaints.append(f"{n}x{k} bias={bias} {found}")
print("\\n".join(complaints))
sys.exit(bool(complaints))
"""

CODES = """
import torch
from anyfp8 import reference, testing_gemm
from anyfp8.gemm.triton_w8a16 import BACKEND, W8A16Config
from anyfp8.problem import Problem, QTensor, Scheme

codes = torch.arange(256, dtype=torch.uint8)
codes = codes[(codes & 0x7F) != 0x7F]
w = torch.zeros(254, 32, dtype=torch.uint8)
w[:, 0] = codes
q = QTensor(w, torch.ones(254, 1))
scheme = Scheme("channel")
weight = testing_gemm.canonical_weight(q, scheme)
want = reference.dequantize(q)[:, 0]
for name in ("fp16", "bf16"):
    x = torch.zeros(2, 32, dtype=testing_gemm.DTYPES[name])
    x[:, 0] = 1
    problem = Problem("linear", scheme, 2, 254, 32, name, "fp32")
    for config in (
        W8A16Config("gemv", 2, 64, 32),
        W8A16Config("fused", 16, 64, 32, 1, 4, 4),
        W8A16Config("fused", 16, 64, 32),
        W8A16Config("wide", 64, 64, 32),
        W8A16Config("paired", 16, 64, 32),
        W8A16Config("chunked"),
    ):
        y = BACKEND.run(x, weight, problem, config)
        assert torch.equal(y, want.expand(2, -1)), (name, config)

# the decoding to 16 bits that AMD runs, which products in fp32 leave out
import triton
import triton.language as tl
from anyfp8.kernels.w8a16_codes import decode_to

@triton.jit
def decode(q_ptr, y_ptr, DTYPE: tl.constexpr):
    at = tl.arange(0, 256)
    tl.store(y_ptr + at, decode_to(tl.load(q_ptr + at), DTYPE, "bits"))

every = torch.arange(256, dtype=torch.uint8)
finite = (every & 0x7F) != 0x7F
values = every.view(torch.float8_e4m3fn).float()
for dtype, name, factor in ((tl.bfloat16, torch.bfloat16, 1), (tl.float16, torch.float16, 256)):
    y = torch.empty(256, dtype=name)
    decode[(1,)](every, y, dtype)
    assert torch.equal(y.float()[finite] * factor, values[finite]), name
"""


CHUNKS = """
import sys
import torch
from anyfp8 import testing_gemm
from anyfp8.device import CPU
from anyfp8.gemm import w8a16_chunks
from anyfp8.gemm.triton_w8a16 import BACKEND, W8A16Config
from anyfp8.problem import Scheme

# 64 rows of 96 columns, or 32 for each of two
w8a16_chunks.SCRATCH_BYTES = 2 * 64 * 96
scheme, dtype = Scheme.parse(sys.argv[1]), getattr(torch, sys.argv[2])
layer = testing_gemm.random_layer(scheme, 5, 330, 96, dtype)
problem = testing_gemm.problem_of(layer, dtype, True)
wanted = testing_gemm.oracle(layer, False, True, dtype)
for lanes, want in ((1, 64), (2, 32)):
    w8a16_chunks.lanes_for = lambda *_, lanes=lanes: lanes
    assert w8a16_chunks.chunk_rows(layer.x.shape[0], 330, 96, lanes) == want
    found = testing_gemm.check(BACKEND, layer, wanted, problem, CPU, W8A16Config("chunked"))
    assert not found, (lanes, found)
"""


def interpreted(program, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        timeout=3600,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "scheme", ["w8a16-tensor", "w8a16-channel", "w8a16-block128x128", "w8a16-block48x32"]
)
def test_products_of_odd_shapes_match_the_oracle_in_the_interpreter(scheme, dtype):
    interpreted(PRODUCTS, dtype, scheme, "1x33", "80x96")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "scheme", ["w8a16-tensor", "w8a16-channel", "w8a16-block128x128", "w8a16-block48x32"]
)
def test_products_of_padded_shapes_match_the_oracle_in_the_interpreter(scheme, dtype):
    small = [f"{n}x{k}" for n in (1, 33, 80, 320) for k in (33, 96, 320)]
    interpreted(PRODUCTS, dtype, scheme, *small, "1856x33", "33x2688", "1856x320", "8608x96")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("scheme", ["w8a16-channel", "w8a16-block48x32"])
def test_many_small_chunks_make_one_product_in_the_interpreter(scheme, dtype):
    interpreted(CHUNKS, scheme, dtype)


def test_every_finite_code_is_decoded_exactly_in_the_interpreter():
    interpreted(CODES)


@pytest.mark.parametrize("arch", ARCH_NAMES)
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("scheme", [Scheme("channel"), BLOCK], ids=lambda s: s.name)
def test_each_kernel_compiles_fits_and_uses_the_units_there_are(arch, name, scheme):
    device, config = generic_device(ARCHES[arch]), KERNELS[name]
    capability = device.capability
    for dtype in ("fp16", "bf16"):
        problem = Problem("linear", scheme, config.block_m, 4096, 4096, dtype, dtype, True)
        if BACKEND.why_not(problem, device):
            assert (arch, dtype) == ("sm_75", "bf16")
            continue
        legal = BACKEND.lowered(config, problem, device)
        if legal is None:
            assert name == "eight"
            continue
        built = compile_for(BACKEND.source(problem, legal, device), ARCHES[arch])
        assert built.metadata.shared <= legal.smem_bytes(device) <= device.shared_memory
        assert "f8E4M3" not in built.asm["ttir"] or capability >= (8, 9)
        if capability is None:
            continue
        ptx = built.asm["ptx"]
        converted = config.how == "gemv" or (dtype == "fp16" and config.how != "paired")
        hardware = capability >= (8, 9) and converted
        assert ("e4m3" in ptx) == hardware
        if capability >= (8, 0):
            assert ("mma" in ptx) == (config.how != "gemv")
            assert "cp.async" in ptx
        if name in ("sliced", "eight"):
            assert "wgmma" not in ptx
        if name == "paired" and arch == "sm_90":
            # the weight by whole matrices, even and odd tokens through shared memory
            assert "wgmma" in ptx
            assert "ldmatrix" in ptx


def test_two_codes_are_decoded_by_four_instructions_on_an_a100():
    problem = Problem("linear", Scheme("channel"), 16, 4096, 4096)
    device = generic_device(ARCHES["sm_80"])
    built = compile_for(BACKEND.source(problem, KERNELS["sliced"], device), ARCHES["sm_80"])
    ptx = built.asm["ptx"]
    # 32 rows by 64 columns a warp, 64 codes a lane; more where Triton decodes the first step before
    # the loop
    for instruction in ("prmt.b32", "shl.b32", "and.b32", "fma.rn.bf16x2"):
        assert len(re.findall(rf"\b{re.escape(instruction)}\b", ptx)) >= 32
    assert "ldmatrix" in ptx


@pytest.mark.parametrize(
    ("arch", "name", "want"),
    [
        ("sm_80", "gemv", None),
        ("sm_80", "eight", 168),
        ("sm_80", "sliced", None),
        ("sm_90", "eight", 168),
        ("sm_90", "paired", None),
        ("gfx942", "gemv", None),
    ],
)
def test_launch_and_source_give_few_tokens_the_same_registers(arch, name, want):
    device, config = generic_device(ARCHES[arch]), KERNELS[name]
    problem = Problem("linear", Scheme("channel"), config.block_m, 256, 4096)
    source = BACKEND.source(problem, config, device)
    x = torch.empty(config.block_m, 4096, dtype=torch.bfloat16, device="meta")
    codes = torch.empty(256, 4096, dtype=torch.uint8, device="meta")
    weight = CanonicalWeight(codes, torch.empty(256, 1, device="meta"), problem.scheme)
    found = []
    with use_target(device, found.append):
        BACKEND.run(x, weight, problem, config)
    assert found[0].options.get("maxnreg") == source.registers == want
    if arch != "gfx942":
        ptx = compile_for(source, ARCHES[arch]).asm["ptx"]
        assert re.findall(r"\.maxnreg (\d+)", ptx) == ([str(want)] if want else [])


def test_one_token_may_take_all_registers():
    config = W8A16Config("gemv", 1, 8, 512, 1, 1, 2, 4)
    assert registers_of(config, find_device("NVIDIA H200")) == 255
    assert registers_of(config, generic_device(ARCHES["gfx942"])) is None


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCH_NAMES)
def test_no_configuration_takes_more_shared_memory_than_modelled(arch):
    device = generic_device(ARCHES[arch])
    dtype = "fp16" if arch == "sm_75" else "bf16"
    for m in (1, 4, 16, 64):
        for scheme in (Scheme("channel"), BLOCK):
            problem = Problem("linear", scheme, m, 4096, 4096, dtype, dtype, True)
            every = [c for c in BACKEND.configs(problem, device) if c.how != "chunked"]
            for config in islice(every, 0, None, max(1, len(every) // 6)):
                built = compile_for(BACKEND.source(problem, config, device), ARCHES[arch])
                assert built.metadata.shared <= config.smem_bytes(device), config


@pytest.mark.parametrize("device", CATALOGUE.values(), ids=lambda d: d.name.replace(" ", "_"))
def test_the_default_is_legal_for_every_shape_and_scale_on_every_known_gpu(device):
    for scheme in (Scheme("channel"), BLOCK, Scheme("block", block=(48, 32))):
        for n, k in ((1, 33), (80, 320), (1856, 2688), (8608, 96), (24576, 4096)):
            for m in (0, 1, 2, 3, 4, 5, 16, 17, 33, 64, 65, 128, 129, 8192):
                problem = Problem("linear", scheme, m, n, k, "fp16", "fp16")
                if BACKEND.why_not(problem, device) is None:
                    config = BACKEND.default_config(problem, device)
                    assert BACKEND.illegal(config, problem, device) is None


def test_one_search_space_holds_only_legal_configurations_and_the_default():
    device = generic_device(ARCHES["sm_86"])
    for m in (1, 16, 64, 128, 512):
        problem = Problem("linear", Scheme("channel"), m, 4096, 4096)
        every = list(BACKEND.configs(problem, device))
        assert len(every) == len(set(every))
        assert all(BACKEND.illegal(c, problem, device) is None for c in every)
        assert BACKEND.default_config(problem, device) in every


@pytest.mark.parametrize(
    ("config", "want"),
    [
        (W8A16Config("gemv", 8, 8, 128), "one, two or four rows"),
        (W8A16Config("gemv", 4, 64, 1024), "does not fit"),
        (W8A16Config("fused", 16, 32, 64, 1, 4, 8), "over 4 warps"),
        (W8A16Config("fused", 128, 128, 64, 1, 4, 4), "does not fit"),
        (W8A16Config("fused", 64, 64, 256, 1, 4, 4, 6), "B of shared memory"),
        (W8A16Config("fused", 4, 32, 64), "8x16x16"),
        (W8A16Config("wide", 8, 64, 64), "tall side"),
        (W8A16Config("paired", 16, 32, 64, 1, 4, 4), "fused kernel only"),
        (W8A16Config("paired", 16, 64, 16), "16 of each"),
    ],
)
def test_what_a_kernel_cannot_do_is_refused_with_the_reason(config, want):
    problem = Problem("linear", Scheme("channel"), 16, 4096, 4096)
    assert want in BACKEND.illegal(config, problem, generic_device(ARCHES["sm_80"]))


@pytest.mark.parametrize(
    ("n", "k", "whole", "halves", "many"),
    [
        (6144, 4096, 6144, 3072, 1024),
        (4096, 4096, 4096, 2048, 1024),
        (4096, 12288, 2048, 1024, 1024),
        (24576, 4096, 8192, 4096, 4096),
        (8192, 28672, 1024, 512, 512),
        (300, 4096, 300, 256, 256),
        (7, 3, 7, 256, 256),
    ],
)
def test_the_scratch_of_many_tokens_is_bounded_and_its_chunks_are_one_size(
    n, k, whole, halves, many
):
    for m, lanes, rows in ((2048, 1, whole), (2048, 2, halves), (8192, 2, many)):
        assert chunk_rows(m, n, k, lanes) == rows
        assert 2 * lanes * rows * k <= SCRATCH_BYTES == 64 << 20


def test_a_second_stream_is_for_long_products_of_nvidias_gpus():
    a100, h200 = find_device("NVIDIA A100-SXM4-80GB"), find_device("NVIDIA H200")
    for n, k in ((4096, 4096), (24576, 4096)):
        assert [lanes_for(m, n, k, h200) for m in (64, 8192)] == [1, 2]
        assert lanes_for(8192, n, k, a100) == 2
        assert lanes_for(8192, n, k, generic_device(ARCHES["gfx942"])) == 1
        assert lanes_for(8192, n, k, CPU) == 1


def test_a_configuration_of_no_kernel_is_an_error():
    with pytest.raises(InputError, match="gemv"):
        W8A16Config("other")
    with pytest.raises(InputError, match="tile"):
        W8A16Config(slices=3)
