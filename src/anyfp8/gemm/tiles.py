"""What the Triton W8A8 backends share: the tile configuration, its legality, lowering and launch.

Shared memory follows Triton 3.6 to 3.9, compiled and compared: a pipeline of `num_stages` tiles
where the dot reads its operands from shared memory (Hopper's and Blackwell's, from 64 rows up), one
fewer where it reads registers; the epilogue's layout change reuses the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

import torch

from anyfp8.errors import InputError
from anyfp8.gemm.base import Backend, Config
from anyfp8.problem import Problem

if TYPE_CHECKING:
    from anyfp8.device import Device

# fp32 accumulators a thread can hold: the register file's limit, and what leaves room for the rest
_MAX_ACCUMULATORS = 256
_GOOD_ACCUMULATORS = 128


@dataclass(frozen=True)
class TileConfig(Config):
    """Tile of one program, its warps and the depth of its pipeline.

    group_m row tiles are walked before the next column tile, so that they share it in L2.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int = 8
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self) -> None:
        blocks = (self.block_m, self.block_n, self.block_k, self.num_warps)
        if any(b < 1 or b & (b - 1) for b in blocks) or self.num_stages < 1 or self.group_m < 1:
            raise InputError(
                "not a tile",
                got=repr(self),
                want="blocks and num_warps powers of two, num_stages and group_m at least 1",
            )

    def smem_bytes(self, device: Device, out_bytes: int = 2) -> int:
        """Shared memory of a row-scaled tile, never less than what Triton takes."""
        tile = (self.block_m + self.block_n) * self.block_k
        features = device.arch.features
        from_shared = self.block_m >= 64 and self.num_warps >= 4
        if from_shared and ("wgmma" in features or "tcgen05" in features):
            depth = self.num_stages
        else:
            depth = max(self.num_stages - 1, 1)
        barriers = 16 if "tcgen05" in features else 0
        return max(depth * tile, self.block_m * self.block_n * out_bytes) + barriers


class TileBackend(Backend):
    """A Triton W8A8 backend: `max_block_k` and the kernel are the subclass's."""

    kind = "w8a8"
    config_class = TileConfig
    batch_invariant = True

    def why_not(self, problem: Problem, device: Device) -> str | None:
        if not device.has_fp8:
            return f"multiplies on FP8 units and {device.name} has none"
        return None

    def missing(self) -> str | None:
        return triton_missing()

    def max_block_k(self, problem: Problem) -> int:
        """Largest BLOCK_K with which scales and accumulation stay right."""
        return 128 if problem.accumulate == "fp32_128" else 1024

    def smem_bytes(self, config: TileConfig, problem: Problem, device: Device) -> int:
        """Shared memory of one block, never less than what Triton takes."""
        return config.smem_bytes(device, 4 if problem.out_dtype == "fp32" else 2)

    def illegal(self, config: Config, problem: Problem, device: Device) -> str | None:
        assert isinstance(config, TileConfig)
        if config.block_m < 16 or config.block_n < 16 or config.block_k < 32:
            return "is below the tensor cores' 16x16x32"
        limit = self.max_block_k(problem)
        if config.block_k > limit or limit % config.block_k:
            return f"has block_k={config.block_k}, and the scales or the accumulation need {limit}"
        threads = config.num_warps * (64 if "mfma" in device.arch.features else 32)
        if threads > 1024 or config.block_m * config.block_n > threads * _MAX_ACCUMULATORS:
            return f"does not fit {config.num_warps} warps"
        need = self.smem_bytes(config, problem, device)
        if need > device.shared_memory:
            return (
                f"needs {need:,} B of shared memory and {device.name} has {device.shared_memory:,}"
            )
        return None

    def lowered(self, config: Config, problem: Problem, device: Device) -> TileConfig | None:
        """Fewer stages, then a narrower tile, then a shorter one, until it is legal."""
        assert isinstance(config, TileConfig)
        block_k = min(config.block_k, self.max_block_k(problem))
        for bk in _halvings(block_k, 32):
            for bn in _halvings(config.block_n, 16):
                for stages in range(config.num_stages, 1, -1):
                    low = replace(config, block_n=bn, block_k=bk, num_stages=stages)
                    if self.illegal(low, problem, device) is None:
                        return low
        return None

    def default_config(self, problem: Problem, device: Device) -> TileConfig:
        """As many rows as there are, columns that give every SM a tile, a pipeline that fits."""
        m, n = problem.m, problem.n
        block_m = next((b for b in (16, 32, 64) if m <= b), 128)
        sms = device.sms or 64
        tiles_m = max(1, -(-m // block_m))
        widths = (128, 64, 32, 16)
        block_n = next((b for b in widths if 4 * tiles_m * -(-n // b) >= 3 * sms), 16)
        block_k = min(self.max_block_k(problem), 128 if block_m * block_n >= 8192 else 256)
        warps = 8 if block_m * block_n >= 16384 else 4
        config = TileConfig(block_m, block_n, block_k, 8, warps, 4)
        lower = self.lowered(config, problem, device)
        assert lower is not None, f"no legal default of {self.name} for {problem.key}"
        return lower

    def configs(self, problem: Problem, device: Device) -> Iterator[TileConfig]:
        sizes = product(
            (16, 32, 64, 128, 256), (16, 32, 64, 128, 256), (32, 64, 128, 256, 512, 1024)
        )
        for block_m, block_n, block_k in sizes:
            # a tile twice as tall as the rows there are only wastes them
            if block_m > 16 and block_m >= 2 * max(problem.m, 1):
                continue
            if block_k > 32 and block_k >= 2 * problem.k:
                continue
            for warps, stages in product((2, 4, 8), (1, 2, 3, 4, 5, 6)):
                if block_m * block_n > 32 * warps * _GOOD_ACCUMULATORS:
                    continue
                config = TileConfig(block_m, block_n, block_k, 8, warps, stages)
                if self.illegal(config, problem, device) is None:
                    yield config


def triton_missing() -> str | None:
    from importlib.util import find_spec

    return None if find_spec("triton") else "needs Triton, which is not installed"


def operand_of(device: Device) -> str:
    """How this device's dot takes FP8 codes; see `kernels.operand`."""
    names = {"e4m3fn": "fp8e4nv", "e4m3fnuz": "fp8e4b8", None: "arithmetic"}
    return names[device.arch.fp8]


def same_device(**tensors: torch.Tensor | None) -> None:
    """Raises InputError unless all tensors lie on one device; names them."""
    places = {name: t.device for name, t in tensors.items() if t is not None}
    if len(set(places.values())) > 1:
        raise InputError(
            "the tensors of one call lie on several devices",
            got=", ".join(f"{name} on {place}" for name, place in places.items()),
            want="one device",
        )


def aligned(values: Iterable[tuple[str, int]]) -> frozenset[str]:
    return frozenset(name for name, value in values if value % 16 == 0)


def _halvings(start: int, stop: int) -> Iterator[int]:
    while start >= stop:
        yield start
        start //= 2
