"""Measured µs of products on an H200, to say by how much `predict` errs.

backend | configuration | scheme | N | K | M:µs ...

NVIDIA H200, driver 580.159.04, torch 2.11.0+cu130, Triton 3.6.0, 2026-11: fast accumulation,
operands quantized before, weights from DRAM; CUDA graphs of calls over rotating copies of the
weight. torch._scaled_mm: lower median of two runs. Triton, as block_m block_n block_k group_m
num_warps num_stages: at every third M the fastest of about 20 tried, the default tile and what the
ranker took, which are the configurations that a plan may hold. No figure at these Ms was used to
fit the model of our W8A8 kernels. triton_w8a16, in the order of its configuration's fields: at each
M the fastest of 6 to 37 tried; its model was fitted to these.

The surprise: all of it is one GPU. With one of its four shapes left out of a fit, nine in ten
estimates of that shape were within 16 to 29 %; on other GPUs nobody knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from anyfp8 import gemm
from anyfp8.device import find_device
from anyfp8.gemm.base import Backend, Config
from anyfp8.problem import Problem, Scheme
from anyfp8.select.predict import estimate

GPU = "NVIDIA H200"

_HELD_OUT = ("triton_row", "triton_block")

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
triton_row | 16 32 256 8 4 4 | w8a8-channel-token | 4096 | 4096 | 2:9.2 16:8.7
triton_row | 16 32 512 8 4 6 | w8a8-channel-token | 4096 | 4096 | 2:8.4 16:8.4
triton_row | 16 32 1024 8 8 5 | w8a8-channel-token | 4096 | 4096 | 2:10.8 16:10.3
triton_row | 64 32 256 8 4 4 | w8a8-channel-token | 4096 | 4096 | 48:8.3
triton_row | 64 32 256 8 4 6 | w8a8-channel-token | 4096 | 4096 | 16:7.5 48:7.5
triton_row | 64 32 256 8 4 8 | w8a8-channel-token | 4096 | 4096 | 48:7.8
triton_row | 64 64 256 8 4 5 | w8a8-channel-token | 4096 | 4096 | 128:8.4
triton_row | 64 64 256 8 4 6 | w8a8-channel-token | 4096 | 4096 | 128:8.7
triton_row | 128 32 256 8 4 4 | w8a8-channel-token | 4096 | 4096 | 128:10.4
triton_row | 128 64 128 8 4 4 | w8a8-channel-token | 4096 | 4096 | 384:15.5
triton_row | 128 128 128 8 4 5 | w8a8-channel-token | 4096 | 4096 | 384:13.9
triton_row | 128 128 128 8 4 6 | w8a8-channel-token | 4096 | 4096 | 384:14.3
triton_row | 128 128 128 8 8 4 | w8a8-channel-token | 4096 | 4096 | 1024:30.2 4096:120.9
triton_row | 128 256 128 4 8 4 | w8a8-channel-token | 4096 | 4096 | 1024:25.9
triton_row | 128 256 128 8 8 3 | w8a8-channel-token | 4096 | 4096 | 4096:119.3
triton_row | 128 256 128 8 8 4 | w8a8-channel-token | 4096 | 4096 | 1024:27.6 4096:107.8
triton_row | 16 32 256 8 4 4 | w8a8-channel-token | 4096 | 12288 | 2:20.6 16:20.6
triton_row | 16 32 512 8 4 6 | w8a8-channel-token | 4096 | 12288 | 2:17.5 16:17.8
triton_row | 16 32 1024 8 8 5 | w8a8-channel-token | 4096 | 12288 | 2:22.0 16:22.2
triton_row | 64 32 256 8 4 4 | w8a8-channel-token | 4096 | 12288 | 48:19.8
triton_row | 64 32 256 8 4 8 | w8a8-channel-token | 4096 | 12288 | 16:16.4 48:16.2
triton_row | 64 64 256 8 4 6 | w8a8-channel-token | 4096 | 12288 | 128:18.2
triton_row | 128 32 256 8 4 4 | w8a8-channel-token | 4096 | 12288 | 128:24.2
triton_row | 128 64 128 8 4 4 | w8a8-channel-token | 4096 | 12288 | 384:41.8
triton_row | 128 128 128 8 4 5 | w8a8-channel-token | 4096 | 12288 | 384:39.0
triton_row | 128 128 128 8 4 6 | w8a8-channel-token | 4096 | 12288 | 384:35.5
triton_row | 128 128 128 8 8 4 | w8a8-channel-token | 4096 | 12288 | 1024:79.1 4096:317.3
triton_row | 128 256 64 8 8 4 | w8a8-channel-token | 4096 | 12288 | 4096:354.0
triton_row | 128 256 128 8 8 4 | w8a8-channel-token | 4096 | 12288 | 1024:76.5 4096:356.2
triton_row | 16 16 256 8 2 4 | w8a8-channel-token | 6144 | 4096 | 16:10.2
triton_row | 16 32 256 8 4 4 | w8a8-channel-token | 6144 | 4096 | 2:10.9 16:10.6
triton_row | 16 64 512 8 8 6 | w8a8-channel-token | 6144 | 4096 | 2:11.4 16:11.6
triton_row | 64 32 256 8 4 4 | w8a8-channel-token | 6144 | 4096 | 48:11.3
triton_row | 64 64 128 8 4 8 | w8a8-channel-token | 6144 | 4096 | 16:9.4
triton_row | 64 64 256 8 4 5 | w8a8-channel-token | 6144 | 4096 | 48:9.5
triton_row | 64 64 256 8 4 6 | w8a8-channel-token | 6144 | 4096 | 48:9.7
triton_row | 64 128 256 8 4 4 | w8a8-channel-token | 6144 | 4096 | 128:11.1
triton_row | 128 32 256 8 4 4 | w8a8-channel-token | 6144 | 4096 | 128:19.1
triton_row | 128 128 128 8 4 6 | w8a8-channel-token | 6144 | 4096 | 1024:46.6
triton_row | 128 128 128 8 8 4 | w8a8-channel-token | 6144 | 4096 | 384:27.6 1024:45.5 4096:178.5
triton_row | 128 256 128 8 8 3 | w8a8-channel-token | 6144 | 4096 | 4096:185.6
triton_row | 128 256 128 8 8 4 | w8a8-channel-token | 6144 | 4096 | 384:24.0 4096:171.7
triton_row | 16 64 128 8 4 6 | w8a8-channel-token | 24576 | 4096 | 2:27.6
triton_row | 16 64 256 8 2 4 | w8a8-channel-token | 24576 | 4096 | 2:28.1 16:28.6
triton_row | 16 128 256 8 4 4 | w8a8-channel-token | 24576 | 4096 | 2:30.0 16:30.6
triton_row | 64 128 128 8 4 4 | w8a8-channel-token | 24576 | 4096 | 16:28.0 48:28.6
triton_row | 64 256 128 8 4 5 | w8a8-channel-token | 24576 | 4096 | 48:30.0
triton_row | 128 128 128 8 4 5 | w8a8-channel-token | 24576 | 4096 | 384:83.8
triton_row | 128 128 128 8 8 4 | w8a8-channel-token | 24576 | 4096 | 128:37.8 384:77.6 1024:178.1 4096:737.4
triton_row | 128 256 128 8 8 3 | w8a8-channel-token | 24576 | 4096 | 1024:179.5
triton_row | 128 256 128 8 8 4 | w8a8-channel-token | 24576 | 4096 | 128:33.2 384:76.7 1024:159.4 4096:710.0
triton_block | 16 16 128 8 2 6 | w8a8-block128x128-group128 | 4096 | 4096 | 2:10.9 16:10.8
triton_block | 16 32 128 8 4 4 | w8a8-block128x128-group128 | 4096 | 4096 | 2:12.4 16:12.4
triton_block | 16 32 128 8 4 12 | w8a8-block128x128-group128 | 4096 | 4096 | 2:11.5 16:11.4
triton_block | 64 32 128 8 4 4 | w8a8-block128x128-group128 | 4096 | 4096 | 48:13.6
triton_block | 64 32 128 8 4 6 | w8a8-block128x128-group128 | 4096 | 4096 | 48:10.8
triton_block | 64 32 128 8 4 12 | w8a8-block128x128-group128 | 4096 | 4096 | 48:11.2
triton_block | 64 64 128 8 4 8 | w8a8-block128x128-group128 | 4096 | 4096 | 128:12.2
triton_block | 64 64 128 8 4 12 | w8a8-block128x128-group128 | 4096 | 4096 | 128:12.8
triton_block | 64 128 128 8 4 4 | w8a8-block128x128-group128 | 4096 | 4096 | 384:20.0 1024:40.3
triton_block | 128 32 128 8 4 4 | w8a8-block128x128-group128 | 4096 | 4096 | 128:15.9
triton_block | 128 64 128 8 4 4 | w8a8-block128x128-group128 | 4096 | 4096 | 384:26.7
triton_block | 128 128 128 8 8 4 | w8a8-block128x128-group128 | 4096 | 4096 | 1024:46.2 4096:175.9
triton_block | 128 128 128 8 8 6 | w8a8-block128x128-group128 | 4096 | 4096 | 384:22.1 1024:46.7 4096:186.6
triton_block | 16 16 128 8 2 6 | w8a8-block128x128-group128 | 4096 | 12288 | 2:27.6 16:27.5
triton_block | 16 32 128 8 4 4 | w8a8-block128x128-group128 | 4096 | 12288 | 2:32.5 16:32.8
triton_block | 16 32 128 8 4 12 | w8a8-block128x128-group128 | 4096 | 12288 | 2:28.9 16:29.0
triton_block | 64 32 128 8 4 4 | w8a8-block128x128-group128 | 4096 | 12288 | 48:36.7
triton_block | 64 32 128 8 4 6 | w8a8-block128x128-group128 | 4096 | 12288 | 48:29.4
triton_block | 64 32 128 8 4 12 | w8a8-block128x128-group128 | 4096 | 12288 | 48:29.8
triton_block | 64 64 128 8 4 8 | w8a8-block128x128-group128 | 4096 | 12288 | 128:32.8
triton_block | 64 64 128 8 4 12 | w8a8-block128x128-group128 | 4096 | 12288 | 128:33.2
triton_block | 128 32 128 8 4 4 | w8a8-block128x128-group128 | 4096 | 12288 | 128:53.1
triton_block | 128 64 128 8 4 4 | w8a8-block128x128-group128 | 4096 | 12288 | 384:86.8
triton_block | 128 128 128 8 8 4 | w8a8-block128x128-group128 | 4096 | 12288 | 1024:132.2 4096:523.5
triton_block | 128 128 128 8 8 6 | w8a8-block128x128-group128 | 4096 | 12288 | 384:61.0 1024:127.8 4096:517.8
triton_block | 16 16 128 8 2 6 | w8a8-block128x128-group128 | 6144 | 4096 | 2:12.5 16:12.5
triton_block | 16 32 128 8 4 4 | w8a8-block128x128-group128 | 6144 | 4096 | 2:13.7 16:13.7
triton_block | 16 64 128 8 4 12 | w8a8-block128x128-group128 | 6144 | 4096 | 2:14.9 16:15.2
triton_block | 64 32 128 8 4 4 | w8a8-block128x128-group128 | 6144 | 4096 | 48:14.8
triton_block | 64 64 128 8 4 6 | w8a8-block128x128-group128 | 6144 | 4096 | 48:11.8
triton_block | 64 64 128 8 4 12 | w8a8-block128x128-group128 | 6144 | 4096 | 48:12.4
triton_block | 64 128 128 8 4 5 | w8a8-block128x128-group128 | 6144 | 4096 | 128:15.6
triton_block | 64 128 128 8 4 6 | w8a8-block128x128-group128 | 6144 | 4096 | 128:15.9 384:43.7
triton_block | 128 32 128 8 4 4 | w8a8-block128x128-group128 | 6144 | 4096 | 128:22.2
triton_block | 128 128 128 8 8 4 | w8a8-block128x128-group128 | 6144 | 4096 | 384:42.4 1024:66.8 4096:292.5
triton_block | 128 128 128 8 8 6 | w8a8-block128x128-group128 | 6144 | 4096 | 1024:68.3 4096:265.2
triton_block | 16 64 128 8 2 8 | w8a8-block128x128-group128 | 24576 | 4096 | 2:28.2 16:29.1
triton_block | 16 128 128 8 4 4 | w8a8-block128x128-group128 | 24576 | 4096 | 2:28.5 16:29.3
triton_block | 64 128 128 8 4 4 | w8a8-block128x128-group128 | 24576 | 4096 | 48:30.1 128:45.1 384:107.8
triton_block | 64 128 128 8 4 6 | w8a8-block128x128-group128 | 24576 | 4096 | 128:50.3
triton_block | 64 256 128 8 8 5 | w8a8-block128x128-group128 | 24576 | 4096 | 48:34.0
triton_block | 128 128 128 8 8 4 | w8a8-block128x128-group128 | 24576 | 4096 | 128:49.1 384:119.2 1024:264.3 4096:1083.5
triton_block | 128 128 128 8 8 6 | w8a8-block128x128-group128 | 24576 | 4096 | 384:111.4 1024:258.2 4096:1069.6
triton_w8a16 | gemv 1 8 512 1 1 2 4 | w8a16-channel | 6144 | 4096 | 1:8.6
triton_w8a16 | fused 8 16 128 1 4 4 4 | w8a16-channel | 6144 | 4096 | 2:9.3 4:9.3 8:10.0
triton_w8a16 | fused 16 16 128 1 4 4 3 | w8a16-channel | 6144 | 4096 | 16:11.4
triton_w8a16 | paired 32 64 128 4 1 4 4 | w8a16-channel | 6144 | 4096 | 32:13.3
triton_w8a16 | wide 64 64 64 4 1 4 4 | w8a16-channel | 6144 | 4096 | 64:17.2
triton_w8a16 | wide 128 128 64 4 1 8 4 | w8a16-channel | 6144 | 4096 | 128:27.3
triton_w8a16 | chunked | w8a16-channel | 6144 | 4096 | 1024:85.3 2048:160.8 4096:283.6 8192:619.9
triton_w8a16 | gemv 1 8 512 1 1 2 4 | w8a16-channel | 4096 | 4096 | 1:6.6
triton_w8a16 | gemv 2 8 512 1 1 2 4 | w8a16-channel | 4096 | 4096 | 2:7.2
triton_w8a16 | fused 8 16 128 1 4 4 4 | w8a16-channel | 4096 | 4096 | 4:7.2 8:7.2
triton_w8a16 | fused 16 16 256 1 2 2 4 | w8a16-channel | 4096 | 4096 | 16:8.9
triton_w8a16 | paired 32 64 128 4 1 4 4 | w8a16-channel | 4096 | 4096 | 32:10.8
triton_w8a16 | paired 64 128 64 8 1 4 4 | w8a16-channel | 4096 | 4096 | 64:13.3
triton_w8a16 | paired 128 128 64 4 1 8 4 | w8a16-channel | 4096 | 4096 | 128:19.6
triton_w8a16 | chunked | w8a16-channel | 4096 | 4096 | 1024:61.0 2048:106.9 4096:226.4 8192:433.5
triton_w8a16 | fused 8 64 256 1 1 4 3 | w8a16-channel | 24576 | 4096 | 1:26.0 2:26.1 4:26.2 8:26.5
triton_w8a16 | paired 16 64 256 1 1 4 3 | w8a16-channel | 24576 | 4096 | 16:27.9
triton_w8a16 | paired 32 128 128 2 1 4 3 | w8a16-channel | 24576 | 4096 | 32:35.6
triton_w8a16 | wide 64 64 64 1 1 4 4 | w8a16-channel | 24576 | 4096 | 64:51.6
triton_w8a16 | wide 128 128 64 1 1 4 3 | w8a16-channel | 24576 | 4096 | 128:81.5
triton_w8a16 | chunked | w8a16-channel | 24576 | 4096 | 1024:363.1 2048:677.1 4096:1273.2 8192:2595.8
triton_w8a16 | gemv 1 8 512 1 1 2 5 | w8a16-channel | 4096 | 12288 | 1:14.3
triton_w8a16 | fused 8 16 128 1 4 4 5 | w8a16-channel | 4096 | 12288 | 2:15.1 4:15.1
triton_w8a16 | fused 8 16 128 1 4 4 4 | w8a16-channel | 4096 | 12288 | 8:15.5
triton_w8a16 | fused 16 16 128 1 4 4 4 | w8a16-channel | 4096 | 12288 | 16:19.0
triton_w8a16 | paired 32 64 128 4 1 4 4 | w8a16-channel | 4096 | 12288 | 32:21.6
triton_w8a16 | paired 64 128 64 8 1 4 4 | w8a16-channel | 4096 | 12288 | 64:28.2
triton_w8a16 | paired 128 128 64 4 1 8 4 | w8a16-channel | 4096 | 12288 | 128:45.2
triton_w8a16 | chunked | w8a16-channel | 4096 | 12288 | 1024:178.9 2048:337.6 4096:660.1 8192:1244.9
"""  # noqa: E501 - a table


@dataclass(frozen=True)
class Error:
    """How far estimates of one backend are from measurements, as shares of the measured time."""

    backend: str
    points: int
    median: float
    p90: float
    held_out: bool

    def __str__(self) -> str:
        how = "held out of the fit" if self.held_out else "which it was fitted to"
        return (
            f"{self.backend}: median error {self.median:.0%}, nine in ten within {self.p90:.0%} "
            f"({self.points} points on an {GPU.removeprefix('NVIDIA ')}, {how})"
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
        Error(name, len(e), sorted(e)[len(e) // 2], sorted(e)[len(e) * 9 // 10], name in _HELD_OUT)
        for name, e in found.items()
    )


def _config(text: str, backend: Backend) -> Config:
    fields = [int(part) if part.isdecimal() else part for part in text.split()]
    return backend.config_class(*fields)
