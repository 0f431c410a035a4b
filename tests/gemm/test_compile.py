"""Every kernel compiled for GPUs that are not here: it fits, it promotes, nothing overflows."""

import re
from itertools import islice

import pytest

from anyfp8 import gemm
from anyfp8.device import ARCHES, find_device, generic_device
from anyfp8.gemm.compile import compile_for
from anyfp8.gemm.tiles import TileConfig
from anyfp8.gemm.triton_w8a16 import W8A16Config
from anyfp8.problem import Problem, Scheme
from anyfp8.tools import tables

pytest.importorskip("triton")

ROW = Scheme("channel", "token", True)
BLOCK = Scheme("block", "group", True, block=(128, 128), group=128)
FP8_ARCHES = [name for name, arch in ARCHES.items() if arch.fp8]
GPU_ARCHES = [name for name, arch in ARCHES.items() if arch.vendor != "cpu"]
TILE = TileConfig(64, 128, 128, 8, 4, 3)


def compiled(backend, problem, config, arch):
    device = generic_device(ARCHES[arch])
    return compile_for(backend.source(problem, config, device), ARCHES[arch])


def fp32_adds(ptx):
    """Additions of accumulators; a packed one counts twice."""
    single = len(re.findall(r"\badd(?:\.rn)?(?:\.ftz)?\.f32\s", ptx))
    fused = len(re.findall(r"\bfma\.rn(?:\.ftz)?\.f32\s", ptx))
    packed = len(re.findall(r"\b(?:add|fma)(?:\.rn)?(?:\.ftz)?\.f32x2\s", ptx))
    return single + fused + 2 * packed


@pytest.mark.parametrize("arch", ["sm_89", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("tile", [(128, 128, 128, 8), (64, 64, 128, 4), (16, 64, 64, 4)])
def test_promotion_adds_every_accumulator_once_a_tile_and_fast_never_does(arch, tile):
    backend = gemm.backend("triton_row")
    config = TileConfig(*tile[:3], 8, tile[3], 3)
    accumulators = config.block_m * config.block_n // (32 * config.num_warps)
    for accumulate in ("fp32_128", "fast"):
        problem = Problem("gemm", ROW, 128, 4096, 4096, accumulate=accumulate)
        ptx = compiled(backend, problem, config, arch).asm["ptx"]
        assert "e4m3" in ptx or "tcgen05" in ptx
        # a multiple where the loop over K is unrolled
        promotions, rest = divmod(fp32_adds(ptx), accumulators)
        assert rest == 0
        assert (promotions > 0) == (accumulate == "fp32_128")


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("tile", [(16, 64, 128, 8), (32, 128, 128, 4)])
@pytest.mark.parametrize("scheme", [ROW, BLOCK], ids=["row", "block"])
def test_with_the_weight_first_few_rows_multiply_fp8(arch, tile, scheme):
    backend = gemm.backend("triton_row" if scheme == ROW else "triton_block")
    device = generic_device(ARCHES[arch])
    config = TileConfig(*tile[:3], 8, 4, tile[3], swap=True)
    for accumulate in ("fast", "fp32_128"):
        problem = Problem("gemm", scheme, 9, 4096, 4096, bias=True, accumulate=accumulate)
        assert backend.illegal(config, problem, device) is None
        built = compiled(backend, problem, config, arch)
        assert built.metadata.shared <= backend.smem_bytes(config, problem, device)
        ptx = built.asm["ptx"]
        assert "tcgen05.mma" in ptx or f"wgmma.mma_async.sync.aligned.m64n{tile[0]}k32" in ptx


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize(
    "config",
    [
        TileConfig(8, 16, 128, 8, 4, 4, swap=True, parts=8),
        TileConfig(16, 64, 128, 8, 4, 3, swap=True, parts=2),
        TileConfig(16, 16, 128, 8, 4, 4, parts=4),
        TileConfig(64, 32, 128, 8, 4, 4, parts=2),
    ],
    ids=str,
)
def test_k_tiles_side_by_side_are_one_product(arch, config):
    backend, device = gemm.backend("triton_block"), generic_device(ARCHES[arch])
    for k in (4096, 1000):
        problem = Problem("gemm", BLOCK, 9, 4096, k, bias=True)
        assert backend.illegal(config, problem, device) is None
        built = compiled(backend, problem, config, arch)
        assert built.metadata.shared <= backend.smem_bytes(config, problem, device)
        columns = config.parts * (config.block_m if config.swap else config.block_n)
        ptx = built.asm["ptx"]
        assert "tcgen05.mma" in ptx or f"wgmma.mma_async.sync.aligned.m64n{columns}k32" in ptx


def test_k_tiles_side_by_side_need_warp_groups_block_scales_and_whole_groups():
    config = TileConfig(16, 16, 128, 8, 4, 4, parts=4)
    hopper, ada = (generic_device(ARCHES[arch]) for arch in ("sm_90", "sm_89"))
    wide = Scheme("block", "token", True, block=(128, 1024))
    for name, scheme, device, complaint in (
        ("triton_row", ROW, hopper, "side by side"),
        ("triton_block", BLOCK, ada, "side by side"),
        ("triton_block", wide, hopper, "scales change after"),
    ):
        backend, problem = gemm.backend(name), Problem("gemm", scheme, 9, 4096, 4096)
        assert complaint in backend.illegal(config, problem, device)
        low = backend.lowered(config, problem, device)
        assert low.parts == 1
        assert backend.illegal(low, problem, device) is None
        assert not any(c.parts > 1 for c in backend.configs(problem, device)) or scheme == wide


@pytest.mark.parametrize("arch", ["sm_89", "sm_120", "gfx942"])
def test_elsewhere_a_row_with_the_weight_first_is_read_without(arch):
    backend, device = gemm.backend("triton_row"), generic_device(ARCHES[arch])
    config = TileConfig(16, 64, 512, 8, 4, 5, swap=True)
    problem = Problem("gemm", ROW, 9, 4096, 4096)
    assert "weight first" in backend.illegal(config, problem, device)
    low = backend.lowered(config, problem, device)
    assert not low.swap
    assert backend.illegal(low, problem, device) is None
    assert not any(c.swap for c in backend.configs(problem, device))


@pytest.mark.parametrize("arch", ["sm_89", "sm_90", "sm_100", "sm_120"])
def test_block_scales_leave_the_accumulator_after_each_tile(arch):
    problem = Problem("gemm", BLOCK, 128, 4096, 4096, accumulate="fp32_128")
    config = TileConfig(128, 128, 128, 8, 8, 2)
    ptx = compiled(gemm.backend("triton_block"), problem, config, arch).asm["ptx"]
    assert fp32_adds(ptx) >= 128 * 128 // 256


@pytest.mark.parametrize("arch", ["sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950"])
@pytest.mark.parametrize("scheme", [ROW, BLOCK], ids=["row", "block"])
def test_the_default_tile_compiles_and_fits(arch, scheme):
    check_fit(arch, scheme, "bf16", largest=False)


@pytest.mark.slow
@pytest.mark.parametrize("arch", FP8_ARCHES)
@pytest.mark.parametrize("scheme", [ROW, BLOCK], ids=["row", "block"])
@pytest.mark.parametrize("out", ["bf16", "fp16", "fp32"])
def test_the_largest_tile_compiles_and_fits(arch, scheme, out):
    check_fit(arch, scheme, out, largest=True)


def check_fit(arch, scheme, out, largest):
    backend = gemm.backend("triton_row" if scheme == ROW else "triton_block")
    device = generic_device(ARCHES[arch])
    for k in (4096, 1000):
        problem = Problem("gemm", scheme, 128, 4096, k, "bf16", out, True, "fp32_128")
        config = backend.default_config(problem, device)
        if largest:
            every = backend.configs(problem, device)
            config = max(every, key=lambda c: backend.smem_bytes(c, problem, device))
        need = compiled(backend, problem, config, arch).metadata.shared
        assert need <= backend.smem_bytes(config, problem, device) <= device.shared_memory


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "gfx90a", "gfx1100"])
@pytest.mark.parametrize("x_dtype", ["fp16", "bf16"])
def test_weight_only_kernel_compiles_and_uses_the_units_there_are(arch, x_dtype):
    check_weight_only(arch, x_dtype, BLOCK.weight_only)


@pytest.mark.slow
@pytest.mark.parametrize("arch", GPU_ARCHES)
@pytest.mark.parametrize("x_dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("scheme", [Scheme("channel"), BLOCK.weight_only], ids=["channel", "block"])
def test_weight_only_kernel_compiles_for_every_gpu(arch, x_dtype, scheme):
    check_weight_only(arch, x_dtype, scheme)


def check_weight_only(arch, x_dtype, scheme):
    backend, device = gemm.backend("triton_w8a16"), generic_device(ARCHES[arch])
    problem = Problem("linear", scheme, 16, 4096, 4096, x_dtype, x_dtype, True)
    if backend.why_not(problem, device):
        assert (arch, x_dtype) == ("sm_75", "bf16")
        return
    for config in (backend.default_config(problem, device), W8A16Config(num_stages=2, split_k=2)):
        built = compiled(backend, problem, config, arch)
        assert built.metadata.shared <= config.smem_bytes(device)
        assert built.metadata.shared <= device.shared_memory
        if "ptx" in built.asm and device.capability >= (8, 0):
            assert "mma" in built.asm["ptx"]
            # below SM89 there is no such conversion; above it the integer form may still be faster
            assert device.capability >= (8, 9) or "e4m3" not in built.asm["ptx"]


@pytest.mark.parametrize("name", ["triton_row", "triton_block", "triton_w8a16"])
@pytest.mark.parametrize("m", [9, 128])
def test_rows_are_multiplied_by_their_stride_in_64_bits(name, m):
    scheme = {"triton_row": ROW, "triton_block": BLOCK}.get(name, Scheme("channel"))
    backend = gemm.backend(name)
    problem = Problem("linear", scheme, m, 4096, 4096, accumulate="fp32_128")
    config = backend.default_config(problem, generic_device(ARCHES["sm_90"]))
    ttir = compiled(backend, problem, config, "sm_90").asm["ttir"]
    strides = set(re.findall(r"%(stride_[xwy]\w+)(?=[:,])", ttir))
    assert strides == {"stride_xm", "stride_wn", "stride_ym"}
    narrow = [
        line
        for line in ttir.splitlines()
        if "arith.muli" in line
        and re.search(r"i32", line)
        and re.search(r"stride_(xm|wn|ym)", line)
    ]
    assert narrow == []


def test_all_published_l40s_rows_compile_for_it_and_fit():
    table = tables.open_table("NVIDIA L40S")
    assert sum(row.config is not None for row in table.rows) == 65
    assert list(tables.check(table)) == []
    assert find_device("NVIDIA L40S").shared_memory == 101_376


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_89", "sm_90", "sm_100", "sm_120", "gfx942"])
def test_no_configuration_takes_more_shared_memory_than_modelled(arch):
    device = generic_device(ARCHES[arch])
    for name, scheme in (("triton_row", ROW), ("triton_block", BLOCK), ("triton_w8a16", ROW)):
        backend = gemm.backend(name)
        problem = Problem("linear", scheme, 256, 4096, 4096, accumulate="fp32_128")
        every = list(backend.configs(problem, device))
        for config in islice(every, 0, None, max(1, len(every) // 40)):
            if getattr(config, "how", "fused") == "fused":
                need = compiled(backend, problem, config, arch).metadata.shared
                model = getattr(backend, "smem_bytes", None)
                modelled = model(config, problem, device) if model else config.smem_bytes(device)
                assert need <= modelled, config
