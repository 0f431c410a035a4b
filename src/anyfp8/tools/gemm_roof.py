"""max(reading W + moving x and y, 2·M·N·K / rate): what a GPU could do, measured in the same run.

The weight is read by a kernel that does nothing else, the best of a few tiles, from cold memory, so
launch and ramp-up are in the figure; the rates are a copy's of 768 MB and torch's fastest FP8
product of 8192 x 8192 x 8192. A share above 1 is possible where a product beats that one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from anyfp8.tools import timing
from anyfp8.tools.timing import Call, Timing

_TILES = ((1024, 4, 4), (1024, 8, 4), (2048, 4, 4), (2048, 8, 8), (4096, 4, 8), (4096, 8, 8))
_SIDE = 8192


@dataclass(frozen=True)
class Roof:
    """Floors of one GPU.

    Attributes:
        read_us: "NxK" -> µs to read that many bytes. copy_gbps: GB/s read and written.
        tflops: of a large FP8 product. empty_us: of a kernel that does nothing.
    """

    read_us: dict[str, float]
    copy_gbps: float
    tflops: float
    empty_us: float

    def us(self, n: int, k: int, m: int, moved: int) -> float:
        """The least time of a product whose x and y are `moved` bytes."""
        memory = self.read_us[f"{n}x{k}"] + moved / self.copy_gbps / 1e3
        return max(memory, 2 * m * n * k / self.tflops / 1e6)


def measure_roof(
    shapes: Sequence[tuple[int, int]], timer: Callable[..., Mapping[str, Timing]]
) -> Roof:
    """Measure the floors on the GPU at hand."""
    from anyfp8.kernels import ceiling
    from anyfp8.kernels.weight_read import weight_read_kernel

    read: Any = weight_read_kernel
    empty: Any = ceiling.empty_kernel
    copy: Any = ceiling.narrow_copy_kernel
    l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size

    def best(contenders: dict[str, list[Call]], at_least: int) -> float:
        return min(t.us for t in timer(contenders, 7, 800.0, at_least).values())

    def reader(w: torch.Tensor, block: int, unroll: int, warps: int) -> Call:
        size = w.numel()
        grid = (-(-size // (block * unroll)),)
        return lambda: read[grid](w, words, size, BLOCK=block, UNROLL=unroll, num_warps=warps)

    words = torch.empty(max(n * k for n, k in shapes) // 16384, dtype=torch.int32, device="cuda")
    read_us: dict[str, float] = {}
    for n, k in dict.fromkeys(shapes):
        size = (n * k // 4,)
        ws = [
            torch.randint(-(2**31), 2**31 - 1, size, dtype=torch.int32, device="cuda")
            for _ in range(timing.buffers_for(n * k, l2))
        ]
        read_us[f"{n}x{k}"] = best(
            {str(tile): [reader(w, *tile) for w in ws] for tile in _TILES}, 32
        )
    count = 1 << 28
    x = torch.randn(count, device="cuda", dtype=torch.bfloat16)
    y = torch.empty(count, device="cuda", dtype=torch.uint8)
    grid = (-(-count // 8192),)
    copy_us = best({"copy": [lambda: copy[grid](x, y, count, BLOCK=8192, num_warps=8)]}, 4)
    empty_us = best({"empty": [lambda: empty[(1,)](words, num_warps=4)]}, 64)
    return Roof(read_us, 3 * count / copy_us / 1e3, _product_tflops(best), empty_us)


def _product_tflops(best: Callable[[dict[str, list[Call]], int], float]) -> float:
    a = torch.randn(_SIDE, _SIDE, device="cuda").to(torch.float8_e4m3fn)
    b = torch.randn(_SIDE, _SIDE, device="cuda").to(torch.float8_e4m3fn).t()
    row, column, one = torch.ones(_SIDE, 1), torch.ones(1, _SIDE), torch.ones(())
    scales = {"row": (row.cuda(), column.cuda()), "tensor": (one.cuda(), one.cuda())}

    def product(sa: torch.Tensor, sb: torch.Tensor) -> Call:
        return lambda: torch._scaled_mm(a, b, sa, sb, out_dtype=torch.bfloat16, use_fast_accum=True)

    contenders = {name: [product(*pair)] for name, pair in scales.items()}
    working = {name: calls for name, calls in contenders.items() if _works(calls[0])}
    return 2 * _SIDE**3 / best(working, 2) / 1e6


def _works(call: Call) -> bool:
    try:
        call()
    except RuntimeError:  # a GPU without row-wise products
        return False
    return True
