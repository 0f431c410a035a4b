"""Measured µs of products, to say by how much `predict` errs: one kernel and shape a line.

GPU | backend | configuration | scheme | N | K | µs at each M of `MS`

NVIDIA H200, driver 580.159.04, torch 2.11.0+cu130, 2026-11: torch._scaled_mm with fast
accumulation, operands quantized before, weights from DRAM; CUDA graphs of calls over rotating
copies of the weight, lower median of two runs. `-` is what was refused or not measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from anyfp8 import gemm
from anyfp8.device import find_device
from anyfp8.problem import Problem, Scheme
from anyfp8.select.predict import estimate

MS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

ROWS = """
NVIDIA H200 | torch_scaled_mm | | w8a8-channel-token | 6144 | 4096 | 13.7 13.6 13.6 13.8 14.0 13.9 15.6 26.5 41.4 73.4 143.3 290.2
NVIDIA H200 | torch_scaled_mm | | w8a8-tensor-static | 6144 | 4096 | 9.6 9.4 9.6 9.8 9.9 9.4 11.8 20.4 40.2 75.6 168.9 308.7
NVIDIA H200 | torch_scaled_mm | | w8a8-block128x128-group128 | 6144 | 4096 | - 14.5 14.5 14.5 14.9 14.9 15.7 30.0 46.0 88.3 183.5 355.0
NVIDIA H200 | torch_scaled_mm | | w8a8-channel-token | 4096 | 4096 | 14.1 13.3 13.4 13.4 13.5 13.7 14.6 15.5 26.5 54.1 98.9 197.5
NVIDIA H200 | torch_scaled_mm | | w8a8-tensor-static | 4096 | 4096 | 7.3 7.3 7.4 7.4 7.3 8.1 9.8 14.7 26.9 53.2 105.5 202.6
NVIDIA H200 | torch_scaled_mm | | w8a8-block128x128-group128 | 4096 | 4096 | - 14.2 14.2 14.3 14.3 14.5 14.9 16.0 30.3 61.6 121.7 235.9
NVIDIA H200 | torch_scaled_mm | | w8a8-channel-token | 24576 | 4096 | 34.2 30.7 31.7 32.1 31.9 32.2 45.6 75.7 153.3 292.1 571.6 1136.6
NVIDIA H200 | torch_scaled_mm | | w8a8-tensor-static | 24576 | 4096 | 25.5 25.9 26.4 26.7 27.5 30.1 44.6 83.5 158.9 310.5 624.9 1185.6
NVIDIA H200 | torch_scaled_mm | | w8a8-block128x128-group128 | 24576 | 4096 | - 31.7 32.2 32.6 32.7 34.1 50.7 94.0 186.1 365.2 684.8 1450.6
NVIDIA H200 | torch_scaled_mm | | w8a8-channel-token | 4096 | 12288 | 32.2 31.5 31.4 31.6 31.9 32.3 35.7 38.8 74.1 142.0 294.2 596.9
NVIDIA H200 | torch_scaled_mm | | w8a8-tensor-static | 4096 | 12288 | 17.8 17.6 18.0 15.5 15.7 18.3 22.4 40.5 79.6 166.6 309.9 628.7
NVIDIA H200 | torch_scaled_mm | | w8a8-block128x128-group128 | 4096 | 12288 | - 22.9 21.4 35.4 35.7 36.3 41.4 44.4 84.8 172.9 360.0 697.8
"""  # noqa: E501


@dataclass(frozen=True)
class Error:
    """How far estimates of one backend are from measurements, as shares of the measured time."""

    backend: str
    device: str
    points: int
    median: float
    p90: float

    def __str__(self) -> str:
        return (
            f"{self.backend}: median error {self.median:.0%}, nine in ten within {self.p90:.0%} "
            f"({self.points} points on {self.device})"
        )


@cache
def errors() -> tuple[Error, ...]:
    """The error of the estimates against `ROWS`, one for each backend measured."""
    found: dict[tuple[str, str], list[float]] = {}
    for line in ROWS.strip().splitlines():
        gpu, name, config, scheme, n, k, figures = (cell.strip() for cell in line.split("|"))
        backend, device = gemm.backend(name), find_device(gpu)
        fields = dict(part.split("=") for part in config.split())
        chosen = backend.config_class.from_dict({key: _value(v) for key, v in fields.items()})
        for m, text in zip(MS, figures.split(), strict=True):
            if text == "-":
                continue
            problem = Problem("gemm", Scheme.parse(scheme), m, int(n), int(k), accumulate="fast")
            us = estimate(problem, device, backend, chosen)
            if us is not None:
                found.setdefault((name, gpu), []).append(abs(us / float(text) - 1))
    return tuple(
        Error(name, gpu, len(e), sorted(e)[len(e) // 2], sorted(e)[len(e) * 9 // 10])
        for (name, gpu), e in found.items()
    )


def _value(text: str) -> int | str:
    return int(text) if text.isdecimal() else text
