"""anyfp8 warm: every kernel of a model, compiled without a GPU, found again wherever it lies."""

import json
import re
import shutil
import sys
from importlib.metadata import version

import pytest
import torch

pytest.importorskip("triton")

from anyfp8.device import find_device
from anyfp8.form import Form, counting, form_of, target_is
from anyfp8.gemm.compile import gpu_target
from anyfp8.linear.plans import plan_for
from anyfp8.linear.warm import launches_of
from anyfp8.problem import Scheme
from anyfp8.tools import warm as tool
from anyfp8.tools.shapes import Layer, Model

ROW = Scheme("channel", "token", True)
SMALL = ("256,512", "--device", "l40s", "--m", "1,16", "--workers", "2")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """The kernels of a 256 x 512 layer for two Ms, compiled once for this file."""
    folder = tmp_path_factory.mktemp("warm") / "cache"
    report = tool.warm(model_of(256, 512), find_device("l40s"), folder, (1, 16), workers=2)
    assert report.failed == {}
    assert report.compiled == sum(report.kernels.values()) > 0
    assert report.loaded == 0
    assert report.no_stub == ""
    return folder


def model_of(n, k, **options):
    return Model(f"{n}x{k}", (Layer("linear", ROW, n, k), Layer("again", ROW, n, k)), **options)


def test_a_second_time_compiles_nothing_and_says_so(call, hold_to_schema, cache):
    status, out, _ = call("warm", *SMALL, "--cache", cache, "--json")
    report = json.loads(out)
    hold_to_schema("warm", report)
    assert status == 0
    assert (report["compiled"], report["mended"]) == (0, 0)
    assert report["loaded"] == sum(report["kernels"].values())


def test_what_starts_kernels_is_built_for_the_drivers_library(cache):
    """Found there again, it is not built twice; and it asks the loader for what is missing here."""
    triton = version("triton")
    built = [*cache.rglob("*.so")]
    if tuple(map(int, triton.split(".")[:2])) >= (3, 8):
        assert not built
        return
    names = {path.name.partition(".")[0] for path in built}
    assert names == {"cuda_utils", *(["__triton_launcher"] if triton.startswith("3.6.") else [])}
    assert all(b"libcuda.so.1" in path.read_bytes() for path in built)
    report = tool.warm(model_of(256, 512), find_device("l40s"), cache, (1, 16), workers=1)
    assert (report.stubs, report.no_stub) == (0, "")


def test_without_a_c_compiler_kernels_are_compiled_all_the_same(monkeypatch, call, tmp_path):
    if tuple(map(int, version("triton").split(".")[:2])) >= (3, 8):
        pytest.skip("nothing is built in C")
    monkeypatch.setenv("CC", str(tmp_path / "absent"))
    status, out, err = call("warm", *SMALL[:3], "--m", "16", "--cache", tmp_path / "cache")
    assert status == 0
    assert re.search(r"[1-9] compiled", out)
    assert "warning: what starts kernels is left to their first launch" in err
    assert "absent" in err


def test_it_reads_as_before(call, hold_snapshot, cache):
    status, *texts = call("warm", *SMALL, "--cache", cache)
    # a slow machine says in between how far it is
    texts = [re.sub(r"(?m)^compiling .* \d+/\d+ .*\n", "", text) for text in texts]
    found = (status, *(text.replace(str(cache), "KERNELS") for text in texts))
    hold_snapshot("warm", ["warm", *SMALL, "--cache", "KERNELS"], found)


def test_the_launches_of_a_call_find_their_kernels_there(cache, monkeypatch):
    from triton import knobs

    device = find_device("l40s")
    plan = plan_for(ROW, 256, 512, device)
    monkeypatch.setattr(knobs.cache, "dir", str(cache))
    with target_is(gpu_target(device.arch)), counting() as counts:
        for launch in launches_of(plan, device, (1, 16)):
            launch.kernel.device_caches.clear()
            arguments = {**launch.arguments, **launch.constants, **launch.options}
            launch.kernel.run(grid=(1,), warmup=True, **arguments)
    assert counts["compiled"] == 0
    assert counts["loaded"] > 0


def test_a_folder_that_was_moved_is_mended(cache, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(cache, moved)
    # as if the first place were gone
    for path in moved.glob("*/__grp__*.json"):
        path.write_text(path.read_text().replace(str(cache), str(tmp_path / "gone")))
    report = tool.warm(model_of(256, 512), find_device("l40s"), moved, (1, 16), workers=1)
    assert report.compiled == 0
    assert report.mended == report.loaded == sum(report.kernels.values())
    assert tool.mend(moved) == 0


def test_two_layers_of_a_shape_are_one_and_biases_count():
    device = find_device("l40s")
    plain = model_of(256, 512)
    biased = Model("biased", (*plain.layers, Layer("third", ROW, 256, 512, True)))
    shapes = [{(x.scheme, x.n, x.k, x.bias) for x in m.layers} for m in (plain, biased)]
    assert [len(s) for s in shapes] == [1, 2]
    forms = [
        {
            form_of(launch)
            for scheme, n, k, bias in each
            for launch in launches_of(plan_for(scheme, n, k, device, bias=bias), device, (1,))
        }
        for each in shapes
    ]
    assert forms[0] < forms[1]


def test_activations_in_the_models_dtype():
    device = find_device("l40s")
    found = [
        {form_of(e) for e in launches_of(plan_for(ROW, 256, 512, device, dtype), device, (1,))}
        for dtype in (torch.bfloat16, torch.float16)
    ]
    assert not found[0] & found[1]


def test_a_kernel_that_does_not_compile_is_named_and_the_rest_is_there(call, monkeypatch, tmp_path):
    wrong = Form("anyfp8.kernels.w8a16_plain:sum_parts", (), (), ())

    def two(launch):
        return wrong if "quantize" in launch.kernel.__name__ else form_of(launch)

    monkeypatch.setattr(tool, "form_of", two)
    status, out, err = call("warm", *SMALL[:3], "--m", "16", "--cache", tmp_path / "cache")
    assert status == 1
    assert "1 compiled" in out
    assert "error: anyfp8.kernels.w8a16_plain:sum_parts does not compile" in err
    assert "missing" in err


def test_a_compiler_that_breaks_down_is_reported(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    report = tool.warm(model_of(256, 512), find_device("l40s"), tmp_path, (1,), workers=2)
    assert report.compiled == 0
    assert all("broke down" in error for error in report.failed.values())


def test_the_cpu_has_no_kernels(call, hold_snapshot):
    arguments = ["warm", "256,512", "--device", "cpu"]
    hold_snapshot("warm-cpu", arguments, call(*arguments))


def test_where_triton_looks_is_where_kernels_go(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/somewhere")
    assert str(tool.default_cache()) == "/somewhere"
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    assert tool.default_cache() == tmp_path / ".triton" / "cache"
