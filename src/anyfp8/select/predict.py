"""µs ≈ max(DRAM, L2, matrix units, latency) over waves of tiles: a ranker that measures nothing.

It takes a backend and a configuration where no table has a row. Public models of this kind come
within 5 to 10 % of an exhaustive search; ours of W8A8 tiles is in `tile_time`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, cast

from anyfp8.gemm.base import Backend, Config
from anyfp8.gemm.tiles import TileConfig
from anyfp8.gemm.triton_w8a16 import W8A16Config
from anyfp8.problem import Problem
from anyfp8.select.tile_time import tile_times, tile_us

if TYPE_CHECKING:
    from anyfp8.device import Device

# share of the published figure that a good kernel reaches
_DRAM_SHARE = 0.85
_L2_TIMES_DRAM = 2.5
# µs: start of a kernel, one round trip to DRAM, quantizing a small activation
_LAUNCH_US = 2.0
_TRIP_US = 0.9
# µs: barrier and address arithmetic of one step along K
_STEP_US = 0.05
_QUANTIZE_US = 2.0
# µs that one SM takes for one FP8 code of a tile of one token, and how that grows with the tokens:
# fitted to the fastest tiles of the H200's sweep
_CODE_US, _CODE_GROWTH = 1.25e-5, 0.43

# torch.scaled_mm on the H200 (torch 2.11, cuBLASLt): µs of its start and of 1,024 columns of K,
# which decide below M = 512, and the shares of the bandwidth and of the FP8 rate that it reaches
_LIBRARY = {
    "row": (4.3, 2.26, 0.64, 0.70),
    "block": (7.0, 2.26, 0.62, 0.58),
    "tensor": (3.0, 1.0, 0.70, 0.80),
}


@dataclass(frozen=True)
class Prediction:
    """One configuration and its estimated time."""

    us: float
    backend: Backend
    config: Config


@lru_cache(maxsize=4096)
def rank(problem: Problem, device: Device, willing: tuple[Backend, ...]) -> tuple[Prediction, ...]:
    """Each willing backend's best configuration, the fastest backend first.

    Backends without a model are left out; empty where the device's figures are not known.
    """
    if not _known(device):
        return ()
    found = [_best_of(backend, problem, device) for backend in willing]
    return tuple(sorted((p for p in found if p is not None), key=lambda p: p.us))


def _best_of(backend: Backend, problem: Problem, device: Device) -> Prediction | None:
    if backend.config_class is TileConfig:
        if not device.fp8_tflops:
            return None
        configs = cast("list[TileConfig]", list(backend.configs(problem, device)))
        times = list(tile_times(problem, device, configs))
        if not times:
            return None
        us = min(times)
        best = configs[times.index(us)]
        return Prediction(us + _quantize_us(problem, device), backend, best)
    # the default of W8A16 follows measurements, and the library chooses by itself
    config = backend.default_config(problem, device)
    us = estimate(problem, device, backend, config)
    return None if us is None else Prediction(us, backend, config)


def guesses(problem: Problem, device: Device, backend: Backend) -> dict[Config, float]:
    """Estimated µs of all of a backend's configurations, the fastest first: the tuner's start.

    Without a model of the backend or figures of the device all are 1 and the default comes first.
    """
    configs = list(backend.configs(problem, device))
    times: list[float | None]
    if _known(device) and backend.config_class is TileConfig and device.fp8_tflops:
        times = [*tile_times(problem, device, cast("list[TileConfig]", configs))]
    else:
        times = [estimate(problem, device, backend, config) for config in configs]
    known = {c: us for c, us in zip(configs, times, strict=True) if us is not None}
    if len(known) == len(configs):
        return dict(sorted(known.items(), key=lambda pair: pair[1]))
    return dict.fromkeys((backend.default_config(problem, device), *configs), 1.0)


def estimate(problem: Problem, device: Device, backend: Backend, config: Config) -> float | None:
    """µs of one configuration; None without a model of the backend or figures of the device."""
    if not _known(device):
        return None
    if backend.name == "torch_scaled_mm":
        return _library_us(problem, device) if device.fp8_tflops else None
    if isinstance(config, (TileConfig, W8A16Config)):
        return _tile_us(problem, device, config)
    return None


def _known(device: Device) -> bool:
    return bool(device.sms and device.bandwidth_gbs and device.bf16_tflops)


def _quantize_us(problem: Problem, device: Device) -> float:
    if problem.op != "linear":
        return 0.0
    return _QUANTIZE_US + 3 * problem.m * problem.k / _bytes_per_us(device)


def _library_us(problem: Problem, device: Device) -> float:
    scheme = problem.scheme
    recipe = "block" if scheme.block else "row"
    if (scheme.weight, scheme.activation) == ("tensor", "tensor"):
        recipe = "tensor"
    start, per_kilo, dram_share, fp8_share = _LIBRARY[recipe]
    m, n, k = problem.m, problem.n, problem.k
    memory = (n * k + m * k + 2 * m * n) / ((device.bandwidth_gbs or 1.0) * 1e3 * dram_share)
    math_us = 2 * m * n * k / ((device.fp8_tflops or 0) * 1e6 * fp8_share or math.inf)
    return max(memory, math_us, start + per_kilo * k / 1024) + _quantize_us(problem, device)


def _tile_us(problem: Problem, device: Device, config: Config) -> float | None:
    if isinstance(config, W8A16Config):
        return _w8a16_us(problem, device, config)
    assert isinstance(config, TileConfig)
    us = tile_us(problem, device, config)
    return None if us is None else us + _quantize_us(problem, device)


def _w8a16_us(problem: Problem, device: Device, config: W8A16Config) -> float:
    m, n, k = problem.m, problem.n, problem.k
    peak = device.bf16_tflops or 1.0
    if config.how == "chunked":
        moved = 3 * n * k / _bytes_per_us(device)
        return moved + 2 * m * n * k / (0.75e6 * peak) + 2 * _LAUNCH_US
    shape = (config.block_m, config.block_n, config.slices * config.block_k)
    # CUDA cores multiply about a sixteenth as fast as matrix units
    share = 0.06 if config.how == "gemv" else 0.5
    us = _streamed_us(
        problem,
        device,
        shape,
        config.num_stages,
        config.num_warps,
        config.smem_bytes(device),
        share * peak,
        config.split_k,
        2,
    )
    if config.how != "gemv":
        # every row of tiles turns all codes into 16 bits once
        codes = -(-m // config.block_m) * n * k / (device.sms or 1)
        # two at a time, the codes of a pair share their instructions
        share = 0.8 if config.how == "paired" else 1.0
        work = codes * _CODE_US * share * config.block_m**_CODE_GROWTH
        us = max(us, work + _LAUNCH_US + _TRIP_US)
    if config.split_k > 1:
        # the parts are summed out of the L2
        parts = 2 * 4 * config.split_k * m * n
        us += _LAUNCH_US + parts / (_bytes_per_us(device) * _L2_TIMES_DRAM)
    return us


def _streamed_us(
    problem: Problem,
    device: Device,
    shape: tuple[int, int, int],
    stages: int,
    warps: int,
    smem: int,
    tflops: float,
    split: int = 1,
    x_bytes: int = 1,
) -> float:
    """Time of a kernel whose tiles stream operands through a pipeline of `stages`."""
    m, n, k = problem.m, problem.n, problem.k
    block_m, block_n, block_k = shape
    sms = device.sms or 1
    tiles = -(-m // block_m) * -(-n // block_n) * split
    per_sm = max(1, min(device.shared_memory // max(smem, 1), 48 // warps, 8))
    steps = -(-k // (block_k * split))
    tile_bytes = (block_m * x_bytes + block_n) * block_k
    dram = (n * k + x_bytes * m * k + 2 * m * n) / _bytes_per_us(device)
    # one step of one tile, alone on its SM
    arithmetic = 2 * block_m * block_n * block_k * sms / (tflops * 1e6)
    through_l2 = tile_bytes * sms / (_bytes_per_us(device) * _L2_TIMES_DRAM)
    # a pipeline brings at most its depth of steps in one round trip
    trip = _TRIP_US / max(stages - 1, 1)

    def wave(resident: int) -> float:
        moving, working = max(through_l2 * resident, trip), arithmetic * resident
        # without a pipeline a tile waits for its operands; its neighbours may work meanwhile
        step = max(moving, working) if stages > 1 else max(moving, working) + moving / resident
        return steps * (step + _STEP_US)

    full, rest = divmod(tiles, sms * per_sm)
    busy = full * wave(per_sm) + (wave(-(-rest // sms)) if rest else 0.0)
    return max(dram, busy) + _LAUNCH_US + _TRIP_US


def _bytes_per_us(device: Device) -> float:
    return (device.bandwidth_gbs or 1.0) * 1e3 * _DRAM_SHARE
