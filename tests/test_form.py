"""What Triton compiles for a launch, compiled without a GPU under the key that the GPU asks for."""

import json
import logging
import os
import pickle
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from anyfp8.device import find_device
from anyfp8.form import Form, Pointer, counting, form_of, target_is, with_cache
from anyfp8.gemm.compile import gpu_target
from anyfp8.gemm.launch import Launch
from anyfp8.kernels.w8a16_plain import sum_parts

TARGET = gpu_target(find_device("h200").arch)


def launch_of(n=512, stride=512, block=256, shift=0):
    part, y = torch.zeros(2, 4, n), torch.zeros(4, n + 1, dtype=torch.bfloat16)
    scale, bias = torch.zeros(n + 1)[shift:], torch.zeros(n, dtype=torch.bfloat16)
    values = (part, y, scale, bias, 4, n, stride, 1)
    constants = {"PARTS": 2, "SCALE": True, "HAS_BIAS": False, "BLOCK": block}
    return Launch(sum_parts, (1, 1), values, constants)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    from triton import knobs

    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_launch_finds_on_disk_what_its_form_compiled(cache):
    launch = launch_of()
    with target_is(TARGET), counting() as counts:
        form_of(launch).compile()
        assert counts == {"compiled": 1, "loaded": 0}
        sum_parts.device_caches.clear()
        # Triton's own path, with the tensors and numbers of the call
        sum_parts.run(
            grid=(1,), warmup=True, **launch.arguments, **launch.constants, **launch.options
        )
    assert counts == {"compiled": 1, "loaded": 1}


@pytest.mark.parametrize(
    "other",
    [{"n": 1}, {"n": 100}, {"stride": 500}, {"stride": 1 << 33}, {"block": 128}, {"shift": 1}],
    ids=["one", "not 16s", "stride", "64 bits", "constant", "alignment"],
)
def test_what_triton_compiles_apart_are_two_forms(other):
    assert form_of(launch_of(**other)) != form_of(launch_of())


def test_what_triton_compiles_once_is_one_form():
    assert form_of(launch_of(n=1024)) == form_of(launch_of(n=512))
    one, two = launch_of(), launch_of()
    # M is not specialized
    two = Launch(sum_parts, (9, 9), (*two.values[:4], 1, 512, 512, 1), two.constants)
    assert form_of(one) == form_of(two)


def test_forms_travel_and_need_no_torch(tmp_path):
    forms = [form_of(launch_of()), Form("anyfp8.kernels.w8a16_plain:sum_parts", (), (), ())]
    path = tmp_path / "forms"
    path.write_bytes(pickle.dumps((TARGET, forms)))
    # as if torch were not installed
    code = f"import sys; sys.modules['torch'] = None; sys.argv = ['', {str(path)!r}]; "
    code += "from anyfp8 import form; form._main()"
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    fine, wrong = map(json.loads, done.stdout.splitlines())
    assert (fine["error"], fine["compiled"], fine["loaded"]) == ("", 1, 0)
    assert "missing" in wrong["error"]


ORDER = """
import importlib, json, sys
from anyfp8.form import settle
found = {}
for name in sys.argv[1].split(","):
    module, kernel = name.split(":")
    found[kernel] = getattr(importlib.import_module("anyfp8.kernels." + module), kernel)
    if sys.argv[2] == "hashed":
        hash(found[kernel])
    settle(found[kernel])
print(json.dumps({name: kernel.cache_key for name, kernel in found.items()}))
"""
KERNELS = (
    *("quantize_token:quantize_token_kernel", "quantize_group:quantize_group_kernel"),
    *("w8a16_gemv:w8a16_gemv", "w8a16_plain:w8a16_plain", "w8a16_sliced:w8a16_sliced"),
    *("row_plain:row_plain", "block_plain:block_plain", "quantize_block:quantize_block_kernel"),
    *("w8a16_dequantize:dequantize", "w8a16_plain:sum_parts"),
)


def keys_of(kernels, before=""):
    command = [sys.executable, "-c", ORDER, ",".join(kernels), before]
    return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)


def test_keys_do_not_depend_on_which_kernel_comes_first():
    keys = [keys_of(order) for order in (KERNELS, KERNELS[::-1], (*KERNELS[1:], KERNELS[0]))]
    assert keys[0] == keys[1] == keys[2]


def test_keys_do_not_depend_on_who_hashed_a_kernel_before():
    assert keys_of(KERNELS, "hashed") == keys_of(KERNELS)


def test_pointers_say_what_triton_asks():
    assert Pointer("torch.uint8", True).data_ptr() % 16 == 0
    assert Pointer("torch.uint8", False).data_ptr() % 16 != 0


def test_processes_that_compile_the_same_kernel_at_once_all_succeed(tmp_path):
    path = tmp_path / "forms"
    path.write_bytes(pickle.dumps((TARGET, [form_of(launch_of()), form_of(launch_of(n=100))])))
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    # a service's environment may have none
    environment.pop("HOME", None)
    command = [sys.executable, "-m", "anyfp8.form", str(path)]
    workers = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(4)
    ]
    for worker in workers:
        lines = worker.communicate()[0].splitlines()
        assert worker.returncode == 0
        assert ['"error": ""' in line for line in lines] == [True, True]


def test_a_cache_that_cannot_be_written_costs_one_warning(monkeypatch, tmp_path, caplog):
    from triton import knobs

    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    monkeypatch.setattr(knobs.cache, "dir", str(blocked))
    with target_is(TARGET), counting() as counts, caplog.at_level(logging.WARNING):
        for n in (512, 100):
            sum_parts.device_caches.clear()
            assert with_cache(form_of(launch_of(n=n)).compile).metadata.name == "sum_parts"
    assert counts["compiled"] == 2
    assert len(caplog.records) == 1
    assert "TRITON_CACHE_DIR" in caplog.text
    assert knobs.cache.dir == str(blocked)


def test_an_error_that_is_not_the_caches_is_raised():
    def broken():
        raise FileNotFoundError("no ptxas")

    with pytest.raises(FileNotFoundError, match="no ptxas"):
        with_cache(broken)
