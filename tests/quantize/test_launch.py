"""Compiled kernels are found again: Triton is asked once for each form of a launch."""

import pytest
import torch

from anyfp8.errors import DeviceError
from anyfp8.quantize.launch import Launch, Launcher
from anyfp8.quantize.per_group import group_config


@pytest.fixture(autouse=True)
def stream(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)


class Compiled:
    def __init__(self):
        self.calls = []

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.calls.append((grid, arguments))


class Kernel:
    """Stands in for a @triton.jit function of x_ptr, M and the constant BLOCK."""

    # hashing a real one makes its key on disk, too early
    __hash__ = None

    def __init__(self, arg_names=("x_ptr", "M", "BLOCK")):
        self.arg_names = list(arg_names)
        self.compilations = []
        self.compiled = Compiled()

    def __getitem__(self, grid):
        def launch(**arguments):
            self.compilations.append((grid, arguments))
            return self.compiled

        return launch


def start(launcher, kernel, x, m=7, block=64, pdl=False):
    launch = Launch(kernel, (3, 2), {"x_ptr": x, "M": m}, {"BLOCK": block}, 4, pdl)
    launcher._start(launch, 0)


def test_the_first_launch_compiles_and_the_next_goes_straight_to_the_kernel():
    kernel, launcher = Kernel(), Launcher()
    x, y = torch.zeros(32), torch.zeros(64)
    start(launcher, kernel, x)
    start(launcher, kernel, y, m=9)
    (grid, arguments), *others = kernel.compilations
    assert not others
    assert grid == (3, 2)
    assert arguments["x_ptr"] is x
    assert arguments["enable_fp_fusion"] is False
    ((grid, passed),) = kernel.compiled.calls
    assert grid == (3, 2, 1)
    # addresses: asking a tensor for its own takes the launcher longer
    assert passed == (y.data_ptr(), 9, 64)


def test_a_first_form_inside_a_capture_is_refused_before_anything_is_compiled(monkeypatch):
    kernel, launcher, x = Kernel(), Launcher(), torch.zeros(32)
    start(launcher, kernel, x)
    monkeypatch.setattr("anyfp8.launcher.capturing", lambda: True)
    start(launcher, kernel, x)
    with pytest.raises(DeviceError, match="before the capture") as raised:
        start(launcher, kernel, x, m=16)
    assert "anyfp8.warmup(model" in raised.value.hint
    assert len(kernel.compilations) == 1
    assert len(kernel.compiled.calls) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.zeros(33)[1:]},
        {"x": torch.zeros(32, dtype=torch.bfloat16)},
        {"m": 1},
        {"m": 16},
        {"m": 1 << 31},
        {"block": 128},
        {"pdl": True},
    ],
    ids=["alignment", "dtype", "one", "divisible", "int64", "constant", "pdl"],
)
def test_another_form_is_compiled_by_itself(other):
    kernel, launcher = Kernel(), Launcher()
    start(launcher, kernel, torch.zeros(32))
    start(launcher, kernel, **{"x": torch.zeros(32), **other})
    assert len(kernel.compilations) == 2
    assert not kernel.compiled.calls


@pytest.mark.parametrize("m", [1, 16, 64, 256, 4096])
@pytest.mark.parametrize("n_groups", [32, 96])
@pytest.mark.parametrize("rows_fastest", [False, True])
def test_tiles_cover_whole_warps_and_grow_with_the_work(m, n_groups, rows_fastest):
    c = group_config(m, n_groups, 128, rows_fastest)
    values = c.rows * c.groups * 128
    assert values >= 128 * c.num_warps
    # one group a program took six times as long at 4096 rows
    assert values >= 1024 or m <= 64
    assert (c.rows == 1) != (rows_fastest and m > 1)


def test_one_row_of_each_expert_is_not_rounded_up_to_eight():
    assert group_config(1, 4, 128, True, outer=128).rows == 1


def test_arguments_in_another_order_than_the_kernels_always_ask_triton():
    kernel, launcher = Kernel(["M", "x_ptr", "BLOCK"]), Launcher()
    for _ in range(2):
        start(launcher, kernel, torch.zeros(32))
    assert len(kernel.compilations) == 2
