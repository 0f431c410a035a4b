"""In a process of its own: which of Triton's keys on disk calls of layers ask for on an H200.

`keys_of_calls.py calls` takes the launches' way from `linear` to Triton, past a stand-in for
the GPU: tensors of the meta device and torch's facts of an H200. `keys_of_calls.py forms FILE`
compiles pickled forms as `anyfp8 warm` does. Nothing is compiled; both print {key: kernel}.
"""

import json
import pickle
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch

from anyfp8 import device, launcher
from anyfp8.device import find_device
from anyfp8.form import target_is
from anyfp8.gemm import launch as products
from anyfp8.gemm import torch_scaled_mm
from anyfp8.gemm.base import CanonicalWeight
from anyfp8.gemm.compile import gpu_target
from anyfp8.linear.dispatch import linear
from anyfp8.linear.plans import plan_for
from anyfp8.problem import Scheme
from anyfp8.quantize import launch as quantizers
from anyfp8.tools.warm import _fails

# torch.cuda.get_device_properties of one
H200 = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    shared_memory_per_block_optin=232448,
    L2_cache_size=62914560,
    total_memory=150109880320,
)
META = torch.device("meta")
# on and off the tables' grid
MS = (
    *range(1, 18), 23, 24, 31, 32, 33, 48, 63, 64, 65, 96, 100, 127, 128, 129, 192, 200, 255, 256,
    257, 300, 384, 400, 511, 512, 513, 600, 768, 777, 1000, 1024, 1025, 1537, 2000, 2049, 3000,
    4095, 4096, 4097,
)  # fmt: skip


class Compiled:
    """Stands in for Triton's compiled kernel."""

    function = packed_metadata = None

    def launch_metadata(self, *arguments):
        return None

    def run(self, *arguments, stream=0):
        return None

    def __getitem__(self, grid):
        return self.run


@contextmanager
def asked():
    """Collect {key: kernel} of what Triton would look up on disk or compile."""
    from triton.runtime import _async_compile, jit

    found = {}
    names = {}
    get_cache_key = jit.get_cache_key

    def named(src, *rest):
        key = get_cache_key(src, *rest)
        names[key] = src.name
        return key

    def submit(key, compile, finish):
        found[key] = names[key]
        return Compiled()

    token = _async_compile.active_mode.set(SimpleNamespace(submit=submit))
    jit.get_cache_key = named
    try:
        with target_is(gpu_target(find_device("h200").arch)):
            yield found
    finally:
        jit.get_cache_key = get_cache_key
        _async_compile.active_mode.reset(token)


def calls(layers):
    gpu, native = device.describe(H200), quantizers._native
    quantizers._native = lambda kind, index: native("cuda", 0)
    torch.cuda.get_device_capability = lambda index=None: gpu.capability
    torch._C._cuda_getCurrentRawStream = lambda index: 0
    products.device_of = lambda place: gpu
    launcher.Launcher.__call__ = lambda self, launch: self._start(launch, 0)
    torch_scaled_mm._multiply = lambda x, w, *rest: x.new_empty(
        (x.shape[0], w.shape[1]), dtype=torch.bfloat16
    )
    for name, n, k, bias in layers:
        scheme = Scheme.parse(name)
        codes = torch.empty(n, k, dtype=torch.uint8, device=META)
        scale = torch.empty(scheme.weight_scale_shape(n, k), device=META)
        weight = CanonicalWeight(codes, scale, scheme)
        b = torch.empty(n, dtype=torch.bfloat16, device=META) if bias else None
        # libraries' products serve, or fail their trial
        for probe in (None, _fails):
            plan = plan_for(scheme, n, k, gpu, bias=bias, probe=probe)
            assert plan.layout == "canonical"
            for m in MS:
                x = torch.empty(m, k, dtype=torch.bfloat16, device=META)
                linear(x, weight, plan, bias=b, input_scale=torch.empty((), device=META))


if __name__ == "__main__":
    with asked() as found:
        if sys.argv[1] == "calls":
            calls(json.loads(sys.argv[2]))
        else:
            for form in pickle.loads(Path(sys.argv[2]).read_bytes()):
                form.compile()
    sys.stdout.write(json.dumps(found))
