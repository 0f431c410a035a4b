"""What a launch of the W8A8 kernels says of the rows that it is given."""

import pytest

from anyfp8 import gemm, testing_gemm
from anyfp8.device import find_device
from anyfp8.gemm.launch import use_target
from anyfp8.gemm.tiles import TileConfig
from anyfp8.problem import Scheme

pytest.importorskip("triton")

SCHEMES = {
    "triton_row": Scheme("channel", "token", True),
    "triton_block": Scheme("block", "group", True, block=(128, 128), group=128),
}


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize(("m", "whole"), [(1, False), (16, True), (17, False), (32, True)])
def test_rows_past_the_last_are_masked_by_the_rows_there_are(name, m, whole):
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
    assert [launch.constants["EVEN_M"] for launch in launches] == [whole, whole]


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
