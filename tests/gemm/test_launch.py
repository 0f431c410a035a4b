"""A launch: which rows it may read, what of it is compiled ahead, and on which GPU it starts."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from anyfp8 import gemm, testing_gemm
from anyfp8.device import find_device
from anyfp8.errors import InputError
from anyfp8.gemm.base import CanonicalWeight
from anyfp8.gemm.launch import Launch, use_target
from anyfp8.gemm.tiles import TileConfig
from anyfp8.launcher import Launcher
from anyfp8.problem import Scheme

pytest.importorskip("triton")

SCHEMES = {
    "triton_row": Scheme("channel", "token", True),
    "triton_block": Scheme("block", "group", True, block=(128, 128), group=128),
}


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize(("m", "short"), [(1, True), (15, True), (16, False), (17, False)])
def test_lanes_of_a_short_tile_are_masked_by_the_rows_there_are(name, m, short):
    backend, scheme = gemm.backend(name), SCHEMES[name]
    layer = testing_gemm.random_layer(scheme, m, 128, 128)
    launches = []
    # a problem of another m than x has must not let the kernel read past its end
    for said in (16, m):
        problem = testing_gemm.Problem("gemm", scheme, said, 128, 128)
        with use_target(find_device("NVIDIA H200"), launches.append):
            backend.run(
                layer.q,
                testing_gemm.canonical_weight(layer.weight, scheme),
                problem,
                TileConfig(16, 32, 64),
            )
    assert [launch.constants["SHORT"] for launch in launches] == [short, short]


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("m", [1, 16, 17, 4097])
def test_what_runs_is_what_is_compiled_ahead(name, m):
    backend, scheme, device = gemm.backend(name), SCHEMES[name], find_device("NVIDIA H200")
    layer = testing_gemm.random_layer(scheme, m, 48, 128)
    problem = testing_gemm.Problem("gemm", scheme, m, 48, 128, bias=True)
    config, launches = backend.default_config(problem, device), []
    with use_target(device, launches.append):
        weight = testing_gemm.canonical_weight(layer.weight, scheme)
        backend.run(layer.q, weight, problem, config, layer.bias)
    [launch], source = launches, backend.source(problem, config, device)
    compiled = dict(source.constants)
    assert {name: compiled[name] for name in launch.constants} == dict(launch.constants)
    assert (launch.num_warps, launch.num_stages) == (source.num_warps, source.num_stages)


def test_a_kernel_starts_with_its_tensors_gpu_current(monkeypatch):
    current, starts = [0], []

    @contextmanager
    def guard(device):
        current.append(device.index)
        yield
        current.pop()

    class Kernel:
        arg_names = ()

        def __getitem__(self, grid):
            return lambda **arguments: starts.append((grid, current[-1]))

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", guard)
    launcher = Launcher()
    for index in (1, 0, 2):
        x = SimpleNamespace(device=torch.device("cuda", index))
        launcher(Launch(Kernel(), (7,), (x,), {}))
        assert current == [0]
    assert starts == [((7,), 1), ((7,), 0), ((7,), 2)]


@pytest.mark.parametrize("name", ["torch_scaled_mm", "triton_row"])
def test_tensors_on_several_devices_are_named(name):
    layer = testing_gemm.random_layer(SCHEMES["triton_row"], 4, 64, 64)
    problem = testing_gemm.problem_of(layer, torch.bfloat16, False)
    backend = gemm.backend(name)
    elsewhere = layer.weight.scale.to("meta")
    with pytest.raises(InputError, match="several devices") as caught:
        backend.run(
            layer.q,
            CanonicalWeight(layer.weight.codes, elsewhere, layer.scheme),
            problem,
            backend.default_config(problem, find_device("NVIDIA H200")),
        )
    assert "sw on meta" in str(caught.value)
    assert "x on cpu" in str(caught.value)
