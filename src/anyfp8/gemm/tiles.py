"""What the Triton W8A8 backends share: the tile configuration, its legality, lowering and launch.

Shared memory follows Triton 3.6 to 3.9, compiled and compared: a pipeline of `num_stages` tiles
where the dot reads its operands there (Hopper's and Blackwell's, from 64 rows up) or copies pass by
the registers (gfx950's, padded), one fewer elsewhere; the epilogue reuses the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from anyfp8.errors import InputError
from anyfp8.gemm.base import Backend, Config
from anyfp8.problem import Problem

if TYPE_CHECKING:
    from anyfp8.device import Device

# fp32 accumulators a thread can hold: the register file's limit, and what leaves room for the rest
_MAX_ACCUMULATORS = 256
_GOOD_ACCUMULATORS = 128
# bytes of operands a thread holds where the dot reads registers; above, it spills (2 to 9x slower)
_GOOD_OPERAND_BYTES = 512


@dataclass(frozen=True)
class TileConfig(Config):
    """Tile of one program, its warps and the depth of its pipeline.

    group_m row tiles are walked before the next column tile, so that they share it in L2. With
    swap the weight is the product's first operand, whose 64 rows a warp group wants full. A product
    has `parts` K tiles of block_k side by side, in its rows and in its columns.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int = 8
    num_warps: int = 4
    num_stages: int = 3
    swap: bool = False
    parts: int = 1

    def __post_init__(self) -> None:
        blocks = (self.block_m, self.block_n, self.block_k, self.num_warps, self.parts)
        if any(b < 1 or b & (b - 1) for b in blocks) or self.num_stages < 1 or self.group_m < 1:
            raise InputError(
                "not a tile",
                got=repr(self),
                want="blocks, parts and num_warps powers of two, num_stages and group_m at least 1",
            )

    def to_dict(self) -> dict[str, Any]:
        # rows of tables that never had a field stay as they were
        usual = {"swap": False, "parts": 1}
        return {k: v for k, v in super().to_dict().items() if k not in usual or v != usual[k]}

    @property
    def sums(self) -> int:
        """fp32 sums of one thread."""
        return self.block_m * self.block_n * self.parts**2 // (32 * self.num_warps)

    @property
    def operand_bytes(self) -> int:
        """Bytes of one step's operands for each thread, where the dot reads registers."""
        return (self.block_m + self.block_n) * self.block_k // (32 * self.num_warps)

    def from_shared(self, device: Device) -> bool:
        """Whether the dot is a warp group's and reads its operands from shared memory."""
        first = (self.block_n if self.swap else self.block_m) * self.parts
        return _by_warp_groups(device) and first >= 64 and self.num_warps >= 4

    def converts(self, device: Device) -> bool:
        """Whether codes are converted to fp16 because no FP8 product has this shape there."""
        return _by_warp_groups(device) and not self.from_shared(device)

    def smem_bytes(self, device: Device, out_bytes: int = 2) -> int:
        """Shared memory of a row-scaled tile, never less than what Triton takes."""
        tile = (self.block_m + self.block_n) * self.parts * self.block_k
        depth = self.num_stages if self.from_shared(device) else max(self.num_stages - 1, 1)
        if "lds_copy" in device.arch.features:
            tile, depth = tile + tile // 64, self.num_stages
        barriers = 16 if "tcgen05" in device.arch.features else 0
        return max(depth * tile, self.block_m * self.block_n * out_bytes) + barriers


class TileBackend(Backend):
    """A Triton W8A8 backend: `max_block_k` and the kernel are the subclass's."""

    kind = "w8a8"
    config_class = TileConfig
    batch_invariant = True
    # whether it has a kernel with the weight first, and K tiles side by side
    swaps = False
    has_parts = False

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
        low = min(config.block_m, config.block_n) * config.parts
        if low < 16 or config.block_k < 32:
            return "is below the tensor cores' 16x16x32"
        if config.parts > 1 and not (self.has_parts and config.from_shared(device)):
            return "puts K tiles side by side, which only block scales on warp groups want"
        if config.swap and not (self.swaps and config.from_shared(device)):
            return "puts the weight first, which only products of warp groups do"
        limit = self.max_block_k(problem)
        if config.block_k > limit or limit % config.block_k:
            return f"has block_k={config.block_k}, and the scales or the accumulation need {limit}"
        threads = config.num_warps * (64 if "mfma" in device.arch.features else 32)
        sums = config.block_m * config.block_n * config.parts**2
        if threads > 1024 or sums > threads * _MAX_ACCUMULATORS:
            return f"does not fit {config.num_warps} warps"
        need = self.smem_bytes(config, problem, device)
        if need > device.shared_memory:
            return (
                f"needs {need:,} B of shared memory and {device.name} has {device.shared_memory:,}"
            )
        return None

    def waves(self, config: Config, problem: Problem, device: Device) -> int:
        assert isinstance(config, TileConfig)
        per_sm = max(1, device.shared_memory // self.smem_bytes(config, problem, device))
        return -(-_tiles(config, problem) // ((device.sms or 1) * per_sm))

    def tiles_an_sm(self, config: Config, problem: Problem, device: Device) -> int:
        assert isinstance(config, TileConfig)
        return -(-_tiles(config, problem) // (device.sms or 1))

    def lowered(self, config: Config, problem: Problem, device: Device) -> TileConfig | None:
        """Fewer stages, then a narrower tile, then a shorter one, until it is legal."""
        assert isinstance(config, TileConfig)
        found = self._lowered(config, problem, device)
        if found is None and config.parts > 1:
            # as many rows and columns of a product, all of one part
            m, n = config.block_m * config.parts, config.block_n * config.parts
            whole = replace(config, block_m=m, block_n=n, parts=1)
            found = self._lowered(whole, problem, device)
        return found

    def _lowered(self, config: TileConfig, problem: Problem, device: Device) -> TileConfig | None:
        if config.swap and not (self.swaps and config.from_shared(device)):
            config = replace(config, swap=False)
        block_k = min(config.block_k, self.max_block_k(problem))
        for bk in _halvings(block_k, 32):
            for bn in _halvings(config.block_n, 16):
                # a pipeline stays one; a row without a pipeline stays without
                for stages in range(config.num_stages, min(config.num_stages, 2) - 1, -1):
                    low = replace(config, block_n=bn, block_k=bk, num_stages=stages)
                    if self.illegal(low, problem, device) is None:
                        return low
        return None

    def default_config(self, problem: Problem, device: Device) -> TileConfig:
        """The largest tile of which there are enough for the SMs, and a pipeline that fits."""
        sms = device.sms or 64
        if _by_warp_groups(device):
            swapped = _swapped_tile(problem, sms) if self.swaps else None
            hopper = self.has_parts and "wgmma" in device.arch.features
            parts = _parts_tile(problem, sms) if hopper else None
            tile = parts or swapped or _group_tile(problem, sms)
            if tile.block_k == 256 and self.max_block_k(problem) == 128:
                # half as long steps: as many more of them in flight
                tile = replace(tile, block_k=128, num_stages=min(2 * tile.num_stages, 10))
        else:
            tile = _warp_tile(problem, sms)
        lower = self.lowered(tile, problem, device)
        assert lower is not None, f"no legal default of {self.name} for {problem.key}"
        return lower

    def configs(self, problem: Problem, device: Device) -> Iterator[TileConfig]:
        """Every legal configuration that does not waste most of its tile."""
        shapeless = replace(problem, op="gemm", m=0, n=1, k=1, bias=False)
        for config in _good_tiles(self, shapeless, device):
            # a tile twice as tall as the rows there are only wastes them, unless it is the lowest
            # that multiplies FP8: 64 rows took 9.4 µs for M = 1 to 16 and 16 rows 10.7 (H200)
            tall = config.block_m > 16 and config.block_m >= 2 * max(problem.m, 1)
            few = config.swap or config.parts > 1
            if tall and (few or config.block_m > 64 or not config.from_shared(device)):
                continue
            # beyond one tile of rows the weight would be read again
            if few and config.block_m < problem.m:
                continue
            if config.block_k > 32 and config.block_k >= 2 * problem.k:
                continue
            yield config

    def good(self, config: TileConfig, problem: Problem, device: Device) -> bool:
        """Legal, and not of the kinds that a warp group's dot or the registers make slow.

        Whatever the shape: `_good_tiles` asks once for all of them.
        """
        if config.sums * sums_kept(problem) > _GOOD_ACCUMULATORS:
            return False
        if not config.from_shared(device):
            # two warps multiply tall tiles 2 to 10 times slower than a warp group (H200)
            if _by_warp_groups(device) and config.block_m >= 64:
                return False
            if config.operand_bytes > _GOOD_OPERAND_BYTES:
                return False
        return self.illegal(config, problem, device) is None


def _tiles(config: TileConfig, problem: Problem) -> int:
    return -(-max(problem.m, 1) // config.block_m) * -(-problem.n // config.block_n)


def _warp_tile(problem: Problem, sms: int) -> TileConfig:
    """Where each warp multiplies: as few rows as there are, columns that give every SM a tile."""
    block_m = next((b for b in (16, 32, 64) if problem.m <= b), 128)
    tiles_m = max(1, -(-problem.m // block_m))
    widths = (128, 64, 32, 16)
    block_n = next((b for b in widths if 4 * tiles_m * -(-problem.n // b) >= 3 * sms), 16)
    block_k = 128 if block_m * block_n >= 8192 else 256
    warps = 8 if block_m * block_n >= 16384 else 4
    return TileConfig(block_m, block_n, block_k, 8, warps, 4)


# of warp groups, from the largest: the first of which there are enough is the fastest timed on an
# H200, or near it (tests/gemm/test_tiles.py); the second list where sums are kept twice: tiles of
# 128 rows are 10 to 27 % slower there at M = 1024 and 2048 (promoted sums)
_GROUP_TILES = (
    TileConfig(128, 256, 128, 8, 8, 4),
    TileConfig(128, 128, 128, 8, 4, 6),
    TileConfig(64, 128, 256, 8, 4, 4),
    TileConfig(64, 64, 256, 8, 4, 6),
    TileConfig(64, 32, 256, 8, 4, 6),
)
_GROUP_TILES_TWICE = (
    TileConfig(64, 128, 128, 8, 4, 4),
    TileConfig(64, 64, 128, 8, 4, 6),
    TileConfig(64, 32, 128, 8, 4, 6),
)
# three an SM, where that is one wave: 22.7 µs at 6144 x 4096, M = 512; 128x256 takes 27.4
_THIRD = TileConfig(64, 128, 128, 8, 4, 3)
# for so few columns that narrow tiles are one wave too: 8.7 µs at 2112 x 7168, M = 64; 32 columns
# take 10.0
_NARROW = TileConfig(64, 16, 256, 8, 4, 8)


def _group_tile(problem: Problem, sms: int) -> TileConfig:
    """Where warp groups multiply: 64 rows at least, the fewest that FP8 products have there."""
    m, n, twice = max(problem.m, 1), problem.n, sums_kept(problem) == 2
    if not twice and 2 * sms < -(-m // 64) * -(-n // 128) <= 3 * sms:
        return _THIRD
    for tile in _GROUP_TILES_TWICE if twice else _GROUP_TILES:
        count = -(-m // tile.block_m) * -(-n // tile.block_n)
        if tile.block_m > 64 >= m or 10 * count < 7 * sms:
            continue
        # 192 tiles leave half of a second wave idle, 384 half as large ones do not: at 6144 x 4096,
        # M = 1024 52.2 and 44.2 µs
        if tile.block_n == 256 and _fill(count, sms) < 0.8 * _fill(2 * count, sms):
            continue
        # more than one wave of this one: two fit an SM with half the ring
        halved = count > sms and tile.block_m == 64
        return replace(tile, block_k=128, num_stages=4) if halved else tile
    low = _GROUP_TILES_TWICE[-1] if twice else _GROUP_TILES[-1]
    return _NARROW if -(-m // 64) * -(-n // 16) <= sms else low


def _fill(tiles: int, sms: int) -> float:
    """Share of the waves' places that have a tile."""
    return tiles / (-(-tiles // sms) * sms)


def _swapped_tile(problem: Problem, sms: int) -> TileConfig | None:
    """For up to 32 rows.

    At M = 16 on an H200 8.8 µs (6144 x 4096), 26.2 (24576 x 4096), 15.1 (4096 x 12288) and 8.7
    (2112 x 7168); 64 rows by the best tile 9.6, 28.1, 15.9 and 9.0. With block scales nothing is
    won above 16 rows.
    """
    scaled = scales_along_k(problem)
    if problem.m > (16 if scaled else 32):
        return None
    if scaled:
        return TileConfig(16, 64, 128, 8, 4, 6, swap=True)
    # 160 KB of weights in flight, or three tiles an SM at once
    stages = 8 if -(-problem.n // 64) <= sms else 3
    return TileConfig(16 if problem.m <= 16 else 32, 64, 256, 8, 4, stages, swap=True)


def _parts_tile(problem: Problem, sms: int) -> TileConfig | None:
    """For up to 64 rows whose scales change along K, on Hopper: K tiles side by side.

    At M = 1, 16 and 64 on an H200 7.0, 8.1 and 9.7 µs (4096 x 4096), 14.6, 17.3 and 24.7
    (4096 x 12288); one K tile at a time 10.7, 11.2 and 11.9, 27.2, 28.8 and 32.7.
    """
    m, n = max(problem.m, 1), problem.n
    if m <= 8:
        if n <= 2 * sms * 16:
            return TileConfig(8, 16, 128, 8, 4, 3, parts=8)
        if n <= 2 * sms * 32:
            return TileConfig(8, 32, 128, 8, 4, 3, swap=True, parts=4)
    if m <= 16:
        if n <= 3 * sms * 16:
            return TileConfig(16, 16, 128, 8, 4, 4 if n <= 2 * sms * 16 else 3, parts=4)
        return TileConfig(8 if m <= 8 else 16, 64, 128, 8, 4, 3, swap=True, parts=2)
    if m <= 64 and n <= sms * 32:
        return TileConfig(32 if m <= 32 else 64, 32, 128, 8, 4, 6 if m <= 32 else 4, parts=2)
    return None


@lru_cache(maxsize=128)
def _good_tiles(backend: TileBackend, problem: Problem, device: Device) -> tuple[TileConfig, ...]:
    """The search space for problems of one scheme, output and accumulation; their shape is 0."""
    found = []
    sizes = (16, 32, 64, 128, 256)
    for block_m, block_n, block_k in product(sizes, sizes, (32, 64, 128, 256, 512, 1024)):
        # a weight is streamed through small tiles: the deeper the pipeline, the better
        deep = (8, 12) if block_m <= 64 and block_n <= 64 and block_k <= 256 else ()
        for warps, stages in product((2, 4, 8), (1, 2, 3, 4, 5, 6, *deep)):
            config = TileConfig(block_m, block_n, block_k, 8, warps, stages)
            if backend.good(config, problem, device):
                found.append(config)
    if backend.swaps:
        shapes = product((16, 32, 64), (64, 128, 256), (128, 256, 512), (4, 8), (3, 4, 5, 6, 8, 10))
        for block_m, block_n, block_k, warps, stages in shapes:
            config = TileConfig(block_m, block_n, block_k, 8, warps, stages, swap=True)
            if backend.good(config, problem, device):
                found.append(config)
    if backend.has_parts:
        shapes = product((8, 16, 32, 64), (16, 32, 64), (2, 4, 8), (3, 4, 6, 8), (False, True))
        for block_m, block_n, parts, stages, swap in shapes:
            config = TileConfig(block_m, block_n, 128, 8, 4, stages, swap, parts)
            rows, columns = (block_n, block_m) if swap else (block_m, block_n)
            fills = 64 <= rows * parts <= 128 and columns * parts <= (64 if swap else 128)
            # eight of more than eight rows, or of columns, were never near the fastest
            fills = fills and (parts < 8 or (rows == 8 and not swap))
            if fills and backend.good(config, problem, device):
                found.append(config)
    return tuple(found)


def _by_warp_groups(device: Device) -> bool:
    return not device.arch.features.isdisjoint(("wgmma", "tcgen05"))


def scales_along_k(problem: Problem) -> bool:
    """Whether a scale changes inside a row's sum."""
    return problem.scheme.weight == "block" or problem.scheme.activation == "group"


def sums_kept(problem: Problem) -> int:
    """How many fp32 sums an output has: a second one where each tile's product is promoted."""
    return 2 if scales_along_k(problem) or problem.accumulate == "fp32_128" else 1


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
