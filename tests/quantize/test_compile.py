"""Every kernel compiles for every architecture, without a GPU, and what the compiler made of it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from anyfp8 import fp8, quantize, testing
from anyfp8.device import ARCHES, generic_device
from anyfp8.gemm import triton_row
from anyfp8.gemm.tiles import TileConfig
from anyfp8.problem import Problem, Scheme
from anyfp8.quantize.per_token import TokenConfig
from anyfp8.tools.compile_matrix import ARCHITECTURES, check, check_product, kernels, products

pytest.importorskip("triton")

FAST = ("sm_80", "sm_89", "sm_90")


@pytest.mark.parametrize("architecture", FAST)
def test_kernels_compile_and_keep_the_rules(architecture):
    for name, launch in kernels(architecture, torch.bfloat16):
        report = check(launch, architecture)
        assert not report.faults, f"{name} on {architecture}: {report.faults}"


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_all_kernels_compile_for_all_architectures(architecture, dtype):
    for name, launch in kernels(architecture, dtype):
        report = check(launch, architecture)
        assert not report.faults, f"{name} on {architecture}: {report.faults}"


@pytest.mark.parametrize("architecture", FAST)
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_tiles_narrower_than_four_values_compile(architecture, k):
    x, weight = torch.empty(1, k, dtype=torch.bfloat16), torch.ones(k)
    with testing.recorded_launches(architecture) as launches:
        for nan_to_zero in (False, True):
            quantize.per_token(x, nan_to_zero=nan_to_zero)
            quantize.per_tensor(x, nan_to_zero=nan_to_zero)
            for group in {1, k}:
                quantize.per_group(x, group, nan_to_zero=nan_to_zero)
        quantize.per_token(x, config=TokenConfig(1, 1, 1))
        quantize.per_tensor(x, torch.ones(()))
        quantize.cast(x, fmt=fp8.E5M2)
        quantize.per_block(x, (1, 1))
        quantize.norm_per_token(x, weight)
        quantize.norm_per_group(x, weight, 1)
        quantize.mla_per_group(x[None], 1)
    assert len(launches) >= 14
    for launch in launches:
        faults = check(launch, architecture).faults
        assert not faults, f"{launch.kernel.__name__} {dict(launch.constants)}: {faults}"


def ptx(architecture, name):
    launch = dict(kernels(architecture, torch.bfloat16))[name]
    return testing.compile_launch(launch, architecture).asm["ptx"]


def test_the_a100_code_has_no_fp8_conversion():
    assert not re.search(r"cvt\S*e4m3", ptx("sm_80", "token"))


@pytest.mark.parametrize("architecture", ["sm_89", "sm_90"])
def test_fp8_hardware_converts_straight_from_fp32(architecture):
    code = ptx(architecture, "token")
    assert "cvt.rn.satfinite.e4m3x2.f32" in code
    assert "cvt.rz.f16" not in code


def test_rows_are_moved_sixteen_bytes_at_a_time():
    code = ptx("sm_90", "token")
    assert set(re.findall(r"ld\.global\S*", code)) == {"ld.global.v4.b32"}
    assert "st.global.v4.b32" in code


@pytest.mark.parametrize("name", ["group one row", "group row", "group tma"])
def test_warps_that_quantize_groups_do_not_wait_for_each_other(name):
    # maxima stay within a warp, and scales are stored by the lanes that have them
    assert not re.search(r"bar\.sync|\.shared", ptx("sm_90", name))


def instructions(code):
    return sorted(re.findall(r"^\t+(?:@\S+ )?([a-z]\S*)[ \t;]", code, re.MULTILINE))


@pytest.mark.parametrize("name", ["token", "token tail"])
def test_threads_reduce_what_they_hold_before_they_talk(name):
    code = instructions(ptx("sm_90", name))
    assert code.count("redux.sync.max.s32") == 1
    assert code.count("bar.sync") <= 2


def test_replacing_nan_costs_rows_without_it_a_branch():
    common, *ways = re.split(r"\n\$L__BB0_\d+:|\bbra\s[^;]*;", ptx("sm_90", "token nan_to_zero"))
    # a second reduction is for rows with inf or NaN
    (way,) = (way for way in ways if "cvt.rn.satfinite" in way and "redux" not in way)
    code = instructions(common) + instructions(way)
    assert len(code) <= len(instructions(ptx("sm_90", "token")))


@pytest.mark.parametrize(("group", "direct"), [(128, True), (16, False)])
def test_a_scale_has_one_writer(group, direct):
    # lanes without a value of their own repeat another's, which tl.store masks
    with testing.recorded_launches("sm_90") as launches:
        quantize.per_group(torch.empty(1, group, dtype=torch.bfloat16), group)
    code = testing.compile_launch(launches[0], "sm_90").asm["ptx"]
    stores = re.findall(r"setp\.ne\.b32 inside, (\S+), 0;", code)
    assert bool(stores) == direct
    # of a thread's four values the first can be the row's first
    never = set(re.findall(r"mov\S*\s+(\S+), 0;", code))
    assert [register in never for register in stores] == [False, True, True, True] * direct


def test_magnitudes_are_put_in_order_by_an_addition_that_ptxas_gets_right():
    # ptxas 12.8 split one add.s16x2 of groups of 256 in two and lost its constant: one value in 16
    # counted for half
    for name in ("token", "token tail", "group row", "group tma"):
        assert "add.s16x2" not in ptx("sm_90", name)


@pytest.mark.parametrize(
    ("rows", "replaced", "values"),
    [(16, "set.eq.u32.bf16x2", 2), (256, "vote.sync.any", 16), (4096, "lop3.b32 flag", 4)],
)
def test_replacing_nan_costs_groups_at_most_one_operation_a_value(rows, replaced, values):
    codes = []
    for nan_to_zero in (False, True):
        with testing.recorded_launches("sm_90") as launches:
            quantize.per_group(
                torch.empty(rows, 4096, dtype=torch.bfloat16), 128, nan_to_zero=nan_to_zero
            )
        codes.append(testing.compile_launch(launches[0], "sm_90").asm["ptx"])
    # all that is added are the blocks of inline assembly, and what a run's eight pairs have in
    # common for its block to look at
    common = ["or.b32"] * 7 if values == 16 else []
    assert sorted(instructions(codes[0]) + common) == instructions(codes[1])
    tile = launches[0].constants["ROWS"] * launches[0].constants["GROUPS"] * 128
    each = tile // (32 * launches[0].num_warps)
    assert codes[1].count(replaced) == each // values


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_product_compiles_for_every_architecture_that_runs_it(architecture, dtype):
    for name, source in products(architecture, dtype):
        faults = check_product(source, architecture).faults
        assert not faults, f"{name} on {architecture}: {faults}"


def test_each_backend_is_compiled_where_it_runs():
    def backends(architecture):
        return {name.split()[0] for name, _ in products(architecture, "bf16")}

    assert backends("sm_80") == {"triton_w8a16"}
    assert backends("sm_90") == {"triton_w8a16", "triton_row", "triton_block"}


def test_a_tile_that_does_not_fit_is_a_fault():
    problem = Problem("linear", Scheme("channel", "token", True), 4096, 4096, 4096)
    tile = TileConfig(128, 256, 128, 8, 8, 6)
    device = generic_device(ARCHES["sm_89"])
    report = check_product(triton_row.BACKEND.source(problem, tile, device), "sm_89")
    assert report.faults == (f"{report.shared_bytes} bytes of shared memory, limit 101376",)


def test_an_overflowing_row_product_is_found():
    ttir = """
      tt.func @k(%x_inner: i32, %M: i32) {
        %3 = arith.muli %2, %x_inner : i32 loc(#loc)
        %5 = arith.muli %4, %9 : i64 loc(#loc)
    """
    assert len(testing.i32_products(ttir, ["x_inner"])) == 1
    assert not testing.i32_products(ttir, ["M"])


# read at import: the environment is cleared of anyfp8's names before a test
TRITON_PATHS = [p for p in os.environ.get("ANYFP8_TEST_TRITON_PATHS", "").split(os.pathsep) if p]


@pytest.mark.slow
@pytest.mark.skipif(not TRITON_PATHS, reason="ANYFP8_TEST_TRITON_PATHS names no other Triton")
@pytest.mark.parametrize("path", TRITON_PATHS)
def test_all_kernels_compile_with_another_triton(path):
    """`path` is a folder that holds a Triton: `pip install --target path triton==3.6.0`."""
    environment = dict(os.environ, PYTHONPATH=path)
    where = "import triton; print(triton.__file__, triton.__version__)"
    found = subprocess.run(
        [sys.executable, "-c", where], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.startswith(str(Path(path).resolve())), found.stdout
    command = [sys.executable, "-m", "anyfp8.tools.compile_matrix"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
