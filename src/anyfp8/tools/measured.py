"""Measured µs of products on an H200, to say by how much `predict` errs.

backend | configuration | scheme | N | K | M:µs ...

NVIDIA H200, driver 580.159.04, torch 2.11.0+cu130, Triton 3.6.0, 2026-11: fast accumulation,
operands quantized before, weights from DRAM; CUDA graphs of calls over rotating copies of the
weight. torch._scaled_mm: lower median of two runs. Triton: the fastest of the configurations
tried, as block_m block_n block_k group_m num_warps num_stages.

The surprise: the model's constants were fitted to these figures too, so that on other shapes, and
more so on other GPUs, it errs by more than this.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from anyfp8 import gemm
from anyfp8.device import find_device
from anyfp8.gemm.base import Backend, Config
from anyfp8.gemm.tiles import TileConfig
from anyfp8.problem import Problem, Scheme
from anyfp8.select.predict import estimate

GPU = "NVIDIA H200"

ROWS = """
torch_scaled_mm | | w8a8-channel-token | 6144 | 4096 | 1:13.7 8:13.6 16:13.6 32:13.8 64:14.0 128:13.9 256:15.6 512:26.5 1024:41.4 2048:73.4 4096:143.3 8192:290.2
torch_scaled_mm | | w8a8-tensor-static | 6144 | 4096 | 1:9.6 8:9.4 16:9.6 32:9.8 64:9.9 128:9.4 256:11.8 512:20.4 1024:40.2 2048:75.6 4096:168.9 8192:308.7
torch_scaled_mm | | w8a8-block128x128-group128 | 6144 | 4096 | 8:14.5 16:14.5 32:14.5 64:14.9 128:14.9 256:15.7 512:30.0 1024:46.0 2048:88.3 4096:183.5 8192:355.0
torch_scaled_mm | | w8a8-channel-token | 4096 | 4096 | 1:14.1 8:13.3 16:13.4 32:13.4 64:13.5 128:13.7 256:14.6 512:15.5 1024:26.5 2048:54.1 4096:98.9 8192:197.5
torch_scaled_mm | | w8a8-tensor-static | 4096 | 4096 | 1:7.3 8:7.3 16:7.4 32:7.4 64:7.3 128:8.1 256:9.8 512:14.7 1024:26.9 2048:53.2 4096:105.5 8192:202.6
torch_scaled_mm | | w8a8-block128x128-group128 | 4096 | 4096 | 8:14.2 16:14.2 32:14.3 64:14.3 128:14.5 256:14.9 512:16.0 1024:30.3 2048:61.6 4096:121.7 8192:235.9
torch_scaled_mm | | w8a8-channel-token | 24576 | 4096 | 1:34.2 8:30.7 16:31.7 32:32.1 64:31.9 128:32.2 256:45.6 512:75.7 1024:153.3 2048:292.1 4096:571.6 8192:1136.6
torch_scaled_mm | | w8a8-tensor-static | 24576 | 4096 | 1:25.5 8:25.9 16:26.4 32:26.7 64:27.5 128:30.1 256:44.6 512:83.5 1024:158.9 2048:310.5 4096:624.9 8192:1185.6
torch_scaled_mm | | w8a8-block128x128-group128 | 24576 | 4096 | 8:31.7 16:32.2 32:32.6 64:32.7 128:34.1 256:50.7 512:94.0 1024:186.1 2048:365.2 4096:684.8 8192:1450.6
torch_scaled_mm | | w8a8-channel-token | 4096 | 12288 | 1:32.2 8:31.5 16:31.4 32:31.6 64:31.9 128:32.3 256:35.7 512:38.8 1024:74.1 2048:142.0 4096:294.2 8192:596.9
torch_scaled_mm | | w8a8-tensor-static | 4096 | 12288 | 1:17.8 8:17.6 16:18.0 32:15.5 64:15.7 128:18.3 256:22.4 512:40.5 1024:79.6 2048:166.6 4096:309.9 8192:628.7
torch_scaled_mm | | w8a8-block128x128-group128 | 4096 | 12288 | 8:22.9 16:21.4 32:35.4 64:35.7 128:36.3 256:41.4 512:44.4 1024:84.8 2048:172.9 4096:360.0 8192:697.8
triton_block | 16 32 128 8 8 6 | w8a8-block128x128-group128 | 4096 | 4096 | 1:13.528
triton_block | 16 16 128 8 2 6 | w8a8-block128x128-group128 | 4096 | 4096 | 16:10.812
triton_block | 64 32 128 8 4 6 | w8a8-block128x128-group128 | 4096 | 4096 | 64:12.168
triton_block | 64 128 128 8 4 4 | w8a8-block128x128-group128 | 4096 | 4096 | 256:15.546
triton_block | 128 128 128 8 8 4 | w8a8-block128x128-group128 | 4096 | 4096 | 1024:41.997
triton_block | 128 128 128 8 8 4 | w8a8-block128x128-group128 | 4096 | 4096 | 4096:171.904
triton_block | 16 32 128 8 8 6 | w8a8-block128x128-group128 | 4096 | 12288 | 1:35.013
triton_block | 16 16 128 8 2 6 | w8a8-block128x128-group128 | 4096 | 12288 | 16:27.648
triton_block | 64 32 128 8 4 6 | w8a8-block128x128-group128 | 4096 | 12288 | 64:33.449
triton_block | 64 128 128 8 4 6 | w8a8-block128x128-group128 | 4096 | 12288 | 256:41.474
triton_block | 128 128 128 8 8 4 | w8a8-block128x128-group128 | 4096 | 12288 | 1024:123.983
triton_block | 128 128 128 8 8 4 | w8a8-block128x128-group128 | 4096 | 12288 | 4096:514.867
triton_block | 16 64 128 8 8 6 | w8a8-block128x128-group128 | 6144 | 4096 | 1:14.163
triton_block | 16 16 128 8 2 6 | w8a8-block128x128-group128 | 6144 | 4096 | 16:12.595
triton_block | 64 64 128 8 4 6 | w8a8-block128x128-group128 | 6144 | 4096 | 64:12.726
triton_block | 128 128 128 8 8 6 | w8a8-block128x128-group128 | 6144 | 4096 | 256:22.426
triton_block | 128 128 128 8 8 4 | w8a8-block128x128-group128 | 6144 | 4096 | 1024:63.315
triton_block | 128 128 128 8 8 4 | w8a8-block128x128-group128 | 6144 | 4096 | 4096:252.593
triton_block | 16 128 128 8 4 4 | w8a8-block128x128-group128 | 24576 | 4096 | 1:33.971
triton_block | 16 128 128 8 4 4 | w8a8-block128x128-group128 | 24576 | 4096 | 16:29.709
triton_block | 64 128 128 8 4 4 | w8a8-block128x128-group128 | 24576 | 4096 | 64:30.675
triton_block | 128 128 128 8 8 4 | w8a8-block128x128-group128 | 24576 | 4096 | 256:67.636
triton_block | 128 128 128 8 8 4 | w8a8-block128x128-group128 | 24576 | 4096 | 1024:246.254
triton_block | 128 128 128 8 8 4 | w8a8-block128x128-group128 | 24576 | 4096 | 4096:1066.969
triton_row | 16 64 512 8 4 3 | w8a8-channel-token | 4096 | 4096 | 1:11.343
triton_row | 16 16 512 8 2 6 | w8a8-channel-token | 4096 | 4096 | 8:9.921
triton_row | 16 16 512 8 2 4 | w8a8-channel-token | 4096 | 4096 | 16:8.627
triton_row | 32 32 256 8 4 4 | w8a8-channel-token | 4096 | 4096 | 32:9.718
triton_row | 64 32 256 8 4 4 | w8a8-channel-token | 4096 | 4096 | 64:8.366
triton_row | 64 64 256 8 4 4 | w8a8-channel-token | 4096 | 4096 | 128:8.957
triton_row | 128 64 128 8 4 4 | w8a8-channel-token | 4096 | 4096 | 256:12.827
triton_row | 128 128 128 8 8 4 | w8a8-channel-token | 4096 | 4096 | 512:15.209
triton_row | 128 256 128 8 8 3 | w8a8-channel-token | 4096 | 4096 | 1024:26.296
triton_row | 128 256 128 8 8 3 | w8a8-channel-token | 4096 | 4096 | 2048:53.006
triton_row | 128 256 64 8 8 4 | w8a8-channel-token | 4096 | 4096 | 4096:108.426
triton_row | 128 256 64 8 8 4 | w8a8-channel-token | 4096 | 4096 | 8192:220.432
triton_row | 16 16 512 8 2 6 | w8a8-channel-token | 4096 | 12288 | 1:26.077
triton_row | 16 16 512 8 2 6 | w8a8-channel-token | 4096 | 12288 | 8:21.246
triton_row | 16 16 512 8 2 6 | w8a8-channel-token | 4096 | 12288 | 16:18.141
triton_row | 32 32 512 8 4 6 | w8a8-channel-token | 4096 | 12288 | 32:20.147
triton_row | 64 32 256 8 4 4 | w8a8-channel-token | 4096 | 12288 | 64:19.922
triton_row | 64 64 256 8 4 4 | w8a8-channel-token | 4096 | 12288 | 128:21.442
triton_row | 128 64 128 8 4 4 | w8a8-channel-token | 4096 | 12288 | 256:33.883
triton_row | 128 128 128 8 4 4 | w8a8-channel-token | 4096 | 12288 | 512:40.311
triton_row | 128 256 128 8 8 3 | w8a8-channel-token | 4096 | 12288 | 1024:71.121
triton_row | 128 256 64 8 8 4 | w8a8-channel-token | 4096 | 12288 | 2048:153.109
triton_row | 128 256 64 8 8 4 | w8a8-channel-token | 4096 | 12288 | 4096:306.944
triton_row | 128 256 128 8 8 3 | w8a8-channel-token | 4096 | 12288 | 8192:671.198
triton_row | 16 64 256 8 4 6 | w8a8-channel-token | 6144 | 4096 | 1:13.306
triton_row | 16 64 256 8 4 6 | w8a8-channel-token | 6144 | 4096 | 8:12.79
triton_row | 16 16 256 8 2 4 | w8a8-channel-token | 6144 | 4096 | 16:10.432
triton_row | 32 32 256 8 4 4 | w8a8-channel-token | 6144 | 4096 | 32:12.919
triton_row | 64 64 256 8 4 4 | w8a8-channel-token | 6144 | 4096 | 64:10.291
triton_row | 64 64 256 8 4 6 | w8a8-channel-token | 6144 | 4096 | 128:15.747
triton_row | 128 128 128 8 4 5 | w8a8-channel-token | 6144 | 4096 | 256:14.854
triton_row | 128 256 128 8 8 4 | w8a8-channel-token | 6144 | 4096 | 512:25.059
triton_row | 128 128 128 8 8 4 | w8a8-channel-token | 6144 | 4096 | 1024:44.785
triton_row | 128 256 128 8 8 3 | w8a8-channel-token | 6144 | 4096 | 2048:78.157
triton_row | 128 256 64 8 8 4 | w8a8-channel-token | 6144 | 4096 | 4096:166.349
triton_row | 128 256 64 8 8 4 | w8a8-channel-token | 6144 | 4096 | 8192:361.293
triton_row | 16 128 256 8 4 4 | w8a8-channel-token | 24576 | 4096 | 1:32.175
triton_row | 16 128 256 8 4 4 | w8a8-channel-token | 24576 | 4096 | 8:30.557
triton_row | 16 64 128 8 4 3 | w8a8-channel-token | 24576 | 4096 | 16:29.199
triton_row | 32 64 512 8 4 2 | w8a8-channel-token | 24576 | 4096 | 32:30.11
triton_row | 64 128 128 8 4 4 | w8a8-channel-token | 24576 | 4096 | 64:28.922
triton_row | 128 256 128 8 8 4 | w8a8-channel-token | 24576 | 4096 | 128:32.829
triton_row | 128 128 128 8 8 4 | w8a8-channel-token | 24576 | 4096 | 256:52.358
triton_row | 128 256 128 8 8 3 | w8a8-channel-token | 24576 | 4096 | 512:81.596
triton_row | 128 256 64 8 8 4 | w8a8-channel-token | 24576 | 4096 | 1024:177.155
triton_row | 128 256 64 8 8 4 | w8a8-channel-token | 24576 | 4096 | 2048:362.733
triton_row | 128 256 64 8 8 4 | w8a8-channel-token | 24576 | 4096 | 4096:764.486
triton_row | 128 256 128 8 8 3 | w8a8-channel-token | 24576 | 4096 | 8192:1416.99
"""  # noqa: E501 - a table


@dataclass(frozen=True)
class Error:
    """How far estimates of one backend are from measurements, as shares of the measured time."""

    backend: str
    points: int
    median: float
    p90: float

    def __str__(self) -> str:
        return (
            f"{self.backend}: median error {self.median:.0%}, nine in ten within {self.p90:.0%} "
            f"({self.points} points on an {GPU.removeprefix('NVIDIA ')}, which it was fitted to)"
        )


@cache
def errors() -> tuple[Error, ...]:
    """The error of the estimates against `ROWS`, one for each backend measured."""
    device = find_device(GPU)
    found: dict[str, list[float]] = {}
    for line in ROWS.strip().splitlines():
        name, config, scheme, n, k, figures = (cell.strip() for cell in line.split("|"))
        backend = gemm.backend(name)
        for m, measured in (pair.split(":") for pair in figures.split()):
            kind = Scheme.parse(scheme)
            problem = Problem("gemm", kind, int(m), int(n), int(k), accumulate="fast")
            us = estimate(problem, device, backend, _config(config, backend))
            if us is not None:
                found.setdefault(name, []).append(abs(us / float(measured) - 1))
    return tuple(
        Error(name, len(e), sorted(e)[len(e) // 2], sorted(e)[len(e) * 9 // 10])
        for name, e in found.items()
    )


def _config(text: str, backend: Backend) -> Config:
    return TileConfig(*map(int, text.split())) if text else backend.config_class()
