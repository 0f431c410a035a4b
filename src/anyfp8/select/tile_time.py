"""µs of one W8A8 tile configuration: waves of tiles, each a pipeline of steps along K.

A step takes the longer of three: multiplying, moving its operands from L2 to the SM, and waiting
for a round trip that the pipeline does not hide. The constants are fitted to 1,080 timings on an
H200 (tests/data/gemm/), where the configuration that it picks reaches 97 % of the best timed one.

The surprise: below 64 rows Hopper has no FP8 product, so codes are converted to fp16 by the warps;
that conversion, not the product, is what a decode tile spends its time on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from anyfp8.gemm.tiles import TileConfig, scales_along_k, sums_kept
from anyfp8.problem import Problem

if TYPE_CHECKING:
    from anyfp8.device import Device

# share of the published bandwidth and of the published FP8 and fp16 rates
_DRAM_SHARE = 0.62
_FP8_SHARE, _FP8_SMALL_SHARE, _FP16_SHARE = 0.93, 0.99, 0.90
# bytes that one SM reads from L2 in a µs (10 TB/s over an H200's 132 SMs)
_L2_BYTES_PER_SM = 76e3
# µs: a kernel's start and end, a round trip to memory, a step, a step's barrier for each warp
_LAUNCH_US, _TRIP_US, _STEP_US, _WARP_US = 3.4, 1.02, 0.006, 0.0018
# share of a step that a tile adds before its pipeline is full and after it runs dry
_FILL = 0.08
# steps that an asynchronous product keeps in flight itself
_LAG = 0.39
# µs: converting one code to fp16, scaling one sum; with `_BUSY_WARPS` warps on the SM
_CONVERT_US, _SCALE_US, _BUSY_WARPS = 10.3e-6, 17e-6, 4.1
# registers a thread has for sums and operands before it spills, and what each more costs
_FREE_REGISTERS, _SPILL = 148, 0.029
_OPERAND_SHARE = 0.17


def tile_us(problem: Problem, device: Device, config: TileConfig) -> float | None:
    """Estimated µs of a launch on a device whose figures are known; None without FP8 units."""
    if not device.fp8_tflops:
        return None
    m, n, k = max(problem.m, 1), problem.n, problem.k
    sms, warps = device.sms or 1, config.num_warps
    resident = _resident(problem, device, config)
    tiles = -(-m // config.block_m) * -(-n // config.block_n)
    steps = -(-k // config.block_k)
    multiply = _multiply_us(problem, device, config)
    move = (config.block_m + config.block_n) * config.block_k / _L2_BYTES_PER_SM
    if config.from_shared(device):
        in_flight = max(config.num_stages - 1 - _LAG, 0.35)
    else:
        in_flight = max(config.num_stages - 1, 1)

    def wave(count: int) -> float:
        """All tiles of `count` on each SM, side by side."""
        idle = 1.0 if config.from_shared(device) else min(1.0, count * warps / _BUSY_WARPS)
        working, moving, waiting = count * multiply / idle, count * move, _TRIP_US / in_flight
        if config.num_stages == 1:
            step = working + moving + waiting
        else:
            step = _smooth_max(4, working, moving, waiting)
        step += _STEP_US + _WARP_US * warps * count
        return steps * step + _FILL * (working + moving)

    full, rest = divmod(tiles, sms * resident)
    busy = full * wave(resident) + (wave(-(-rest // sms)) if rest else 0.0)
    moved = n * k + m * k + 2 * m * n
    dram = moved / ((device.bandwidth_gbs or 1.0) * 1e3 * _DRAM_SHARE)
    return _smooth_max(3, dram, busy) + _LAUNCH_US


def _smooth_max(power: int, *parts: float) -> float:
    """The largest, and more where others are near: they get in each other's way."""
    return sum(part**power for part in parts) ** (1 / power)


def _resident(problem: Problem, device: Device, config: TileConfig) -> int:
    """Tiles that an SM holds at once, by shared memory, registers and warps."""
    smem = config.smem_bytes(device, 4 if problem.out_dtype == "fp32" else 2) + 1024
    registers = min(255, _registers(problem, device, config) + 50)
    threads = 32 * config.num_warps
    by_registers = int(65536 // (registers * threads))
    return max(1, min(device.shared_memory // smem, by_registers, 64 // config.num_warps))


def _registers(problem: Problem, device: Device, config: TileConfig) -> float:
    """Registers of one thread for sums, partial sums and operands."""
    operands = 0.0 if config.from_shared(device) else config.operand_bytes / 4
    return config.sums * sums_kept(problem) + _OPERAND_SHARE * operands


def _multiply_us(problem: Problem, device: Device, config: TileConfig) -> float:
    """One step of one tile, alone on its SM."""
    sms = device.sms or 1
    per_us = 1e6 * (device.fp8_tflops or 0.0) / sms
    elements = config.block_m * config.block_n
    if config.converts(device):
        per_us = 1e6 * (device.bf16_tflops or 0.0) / sms * _FP16_SHARE
        codes = (config.block_m + config.block_n) * config.block_k
    else:
        per_us *= _FP8_SHARE if elements >= 16384 else _FP8_SMALL_SHARE
        codes = 0
    us = 2 * elements * config.block_k / per_us + codes * _CONVERT_US
    over = max(0.0, _registers(problem, device, config) - _FREE_REGISTERS)
    scaled = elements * _SCALE_US if scales_along_k(problem) else 0.0
    return us * (1 + _SPILL * over) + scaled
