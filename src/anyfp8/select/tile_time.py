"""µs of one W8A8 tile configuration: waves of tiles, each a pipeline of steps along K.

A step takes about the longer of three: multiplying, moving its operands from L2 to the SM, and
waiting for a round trip that the pipeline does not hide. The constants are fitted to 7,405 timings
on an H200 (tests/data/gemm/), without those of every third M, from which the error that `explain`
prints is computed.

The surprise: below 64 rows Hopper has no FP8 product, so codes are converted to fp16 by the warps;
that conversion, not the product, is what a decode tile spends its time on. A tile with the weight
first has its 64 rows there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from anyfp8.gemm.tiles import TileConfig, scales_along_k, sums_kept
from anyfp8.problem import Problem

if TYPE_CHECKING:
    from anyfp8.device import Device

# share of the published bandwidth
_DRAM_SHARE = 0.89
# bytes that one SM reads from L2 in a µs: 64 a clock, fewer where rows are shorter than 128 bytes
_L2_BYTES_PER_SM, _SHORT = 1.41e5, 0.643
# µs: a kernel's start and end, a round trip to memory, scales that change along K
_LAUNCH_US, _TRIP_US, _SCALES_US = 2.51, 0.601, 0.072
# a warp group waits less long for its operands, but keeps steps in flight itself
_GROUP_TRIPS, _LAG = 0.678, 0.98
# µs: a step's barriers for each warp group
_GROUP_STEP_US = 0.0269
# how nearly the longest of three, or of two, is all that counts: powers of a mean
_NEAR, _OVERLAP = 3.26, 2.82
# steps that a tile adds before its pipeline is full and after it runs dry
_FILL = 2.23
# µs: converting one code to fp16, scaling one sum; with `_BUSY_WARPS` warps on the SM
_CONVERT_US, _SCALE_US, _BUSY_WARPS = 8.02e-6, 1.29e-5, 5.38
# warp groups: µs of the scale of one row, which each group loads; tokens as columns take more
_ROW_US, _COLUMN = 0.00166, 2.5
# how much slower steps are that fill four fifths of the shared memory
_FULL = 0.0617
# registers a thread has for sums before it spills, and what each more costs
_FREE_REGISTERS, _SPILL = 233, 0.136
# the clock falls under load: by so much for each e-fold of products beyond `_COOL_US`
_HEAT, _COOL_US = 0.0403, 13.9


@dataclass(frozen=True, slots=True)
class _Tile:
    """What a configuration costs whatever the shape: tiles an SM holds, µs with 1, 2, … of them."""

    resident: int
    step: tuple[float, ...]
    ends: tuple[float, ...]


def tile_us(problem: Problem, device: Device, config: TileConfig) -> float | None:
    """Estimated µs of a launch on a device whose figures are known; None without FP8 units."""
    if not device.fp8_tflops:
        return None
    return next(iter(tile_times(problem, device, (config,))))


def tile_times(problem: Problem, device: Device, configs: Iterable[TileConfig]) -> Iterator[float]:
    """`tile_us` of many configurations, for a device with FP8 units."""
    m, n, k = max(problem.m, 1), problem.n, problem.k
    sms = device.sms or 1
    tiles_of = _tiles(device, scales_along_k(problem), sums_kept(problem), problem.out_dtype)
    moved = n * k + m * k + 2 * m * n
    dram = moved / ((device.bandwidth_gbs or 1.0) * 1e3 * _DRAM_SHARE)
    work = 2 * m * n * k / ((device.fp8_tflops or 1.0) * 1e6)
    heat = 1 + _HEAT * max(0.0, math.log(work / _COOL_US))
    for config in configs:
        tile = tiles_of[config]
        rows = -(-m // config.block_m)
        columns = -(-n // config.block_n)
        steps = -(-k // (config.parts * config.block_k))
        full, rest = divmod(rows * columns, sms * tile.resident)
        busy = full * (steps * tile.step[-1] + tile.ends[-1]) if full else 0.0
        if rest:
            last = -(-rest // sms) - 1
            busy += steps * tile.step[last] + tile.ends[last]
        yield ((dram**_OVERLAP + busy**_OVERLAP) ** (1 / _OVERLAP) + _LAUNCH_US) * heat


class _Tiles(dict[TileConfig, _Tile]):
    """Tiles on one device, each computed when it is first asked for."""

    def __init__(self, device: Device, scaled: bool, kept: int, out_bytes: int) -> None:
        self._about = (device, scaled, kept, out_bytes)

    def __missing__(self, config: TileConfig) -> _Tile:
        tile = self[config] = _tile(config, *self._about)
        return tile


@lru_cache(maxsize=64)
def _tiles(device: Device, scaled: bool, kept: int, out_dtype: str) -> _Tiles:
    return _Tiles(device, scaled, kept, 4 if out_dtype == "fp32" else 2)


def _tile(config: TileConfig, device: Device, scaled: bool, kept: int, out_bytes: int) -> _Tile:
    group = config.from_shared(device)
    stages, warps = config.num_stages, config.num_warps
    registers = config.sums * kept
    smem = config.smem_bytes(device, out_bytes) + 1024
    by_registers = int(65536 // (min(255, registers + 50) * 32 * warps))
    resident = max(1, min(device.shared_memory // smem, by_registers, 64 // warps))

    multiply = _multiply_us(config, device) * (1 + _SPILL * max(0.0, registers - _FREE_REGISTERS))
    scale = _scale_us(config, group) if scaled else 0.0
    move = (config.block_m + config.block_n) * config.parts * config.block_k / _L2_BYTES_PER_SM
    move *= max(1.0, 128 / config.block_k) ** _SHORT
    crowded = 1 + _FULL if group and smem > 0.8 * device.shared_memory else 1.0
    in_flight = max(stages - 1 - _LAG, 0.35) if group else max(stages - 1, 1)
    wait = _TRIP_US * (_GROUP_TRIPS if group else 1.0) / in_flight
    step, ends = [], []
    for count in range(1, resident + 1):
        idle = 1.0 if group else min(1.0, count * warps / _BUSY_WARPS)
        working, moving = count * (multiply + scale) / idle, count * move
        if group and count > 1:
            # matrix units multiply one tile while another one's sums are scaled
            apart = ((count * multiply) ** _NEAR + (count * scale) ** _NEAR) ** (1 / _NEAR)
            working = max(multiply + scale, apart)
        if stages == 1:
            longest = working + moving + wait
        else:
            # the longest, and more where others are near: they get in each other's way
            longest = (working**_NEAR + moving**_NEAR + wait**_NEAR) ** (1 / _NEAR)
        each = _GROUP_STEP_US * (warps // 4) if group else 0.0
        step.append((longest + each + (_SCALES_US if scaled else 0.0)) * crowded)
        ends.append(_FILL * (working + moving))
    return _Tile(resident, tuple(step), tuple(ends))


def _scale_us(config: TileConfig, group: bool) -> float:
    """One step's scaling of one tile's sums."""
    if not group:
        return config.block_m * config.block_n * _SCALE_US
    rows = config.block_m * config.parts
    return _ROW_US * (_COLUMN * rows if config.swap else max(rows, 16 * config.num_warps))


def _multiply_us(config: TileConfig, device: Device) -> float:
    """One step's product of one tile, alone on its SM and without spilling."""
    sms = device.sms or 1
    elements = config.block_m * config.block_n * config.parts**2
    if config.converts(device):
        per_us = 1e6 * (device.bf16_tflops or 0.0) / sms
        # each warp converts what it multiplies, its neighbours' operands included
        down, across = _warps_of(config)
        codes = (config.block_m * across + config.block_n * down) * config.block_k
    else:
        per_us = 1e6 * (device.fp8_tflops or 0.0) / sms
        codes = 0
    return 2 * elements * config.block_k / per_us + codes * _CONVERT_US


def _warps_of(config: TileConfig) -> tuple[int, int]:
    """How Triton lays warps over a tile of 16x8 products: (down, across)."""
    rows, columns = config.block_m // 16, config.block_n // 16
    down, across = 1, 1
    while down * across < config.num_warps:
        if down < rows and rows * across >= columns * down:
            down *= 2
        else:
            across *= 2
    return down, across
