"""The launches of `triton_w8a16` for few tokens: one kernel, and one that adds its parts of K.

Kept apart from what it decides, which needs neither Triton nor a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from anyfp8.gemm.base import CanonicalWeight
from anyfp8.gemm.launch import Launch, facts_of, start
from anyfp8.problem import Scheme

if TYPE_CHECKING:
    from anyfp8.device import Device
    from anyfp8.gemm.triton_w8a16 import W8A16Config

# a "block" longer than any K or N: the scale never changes along it
WHOLE = 1 << 30


def scale_facts(scheme: Scheme, k: int) -> tuple[int, int, int, int]:
    """(rows, columns) under one scale, and the scale's strides along them."""
    if scheme.block is not None:
        return scheme.block[0], scheme.block[1], -(-k // scheme.block[1]), 1
    if scheme.weight == "channel":
        return 1, WHOLE, 1, 0
    return WHOLE, WHOLE, 0, 0


def scale_step(scheme: Scheme, k: int) -> int:
    """Columns of K that a tile may span: the largest power of two in a scale's block."""
    group = scale_facts(scheme, k)[1]
    return min(group & -group, 1024)


def decode_of(device: Device) -> str:
    """How codes are decoded there; see `kernels.w8a16_codes`."""
    if device.vendor != "nvidia":
        return "bits"
    # e4m3 to fp16 is an instruction from SM89 up
    capability = device.capability
    return "hardware" if capability is not None and capability >= (8, 9) else "packed"


def by_groups(device: Device) -> bool:
    """Whether matrix instructions of four warps are there."""
    return bool({"wgmma", "tcgen05"} & device.arch.features)


def fewest_tokens(device: Device) -> int:
    """Eight tokens fill the narrow side of NVIDIA's instruction of one warp, AMD's takes 16."""
    return 8 if "cp_async" in device.arch.features else 16


def by_warps(config: W8A16Config, device: Device) -> bool:
    """Whether each warp multiplies its own part of a plain tile, as NVIDIA's do."""
    wide = config.num_warps >= 4 and config.block_n >= 64
    return device.vendor != "amd" and not (by_groups(device) and wide)


def registers_of(config: W8A16Config, device: Device) -> int | None:
    """How many registers a thread may take where ptxas takes too few; None is its own choice.

    It aims at 6 or 8 blocks an SM where shared memory holds 4, and keeps fewer codes on their way.
    H200: 1.5 to 2 % at 6144 x 4096 and 4096 x 4096, 1 % elsewhere, for one to 8 tokens. For more
    tokens in slices, or on the group instruction, more registers make it slower.
    """
    if "cp_async" not in device.arch.features:
        return None
    if config.how == "gemv":
        return 255 if config.num_warps <= 2 else None
    # a limit below what the tile needs would spill
    codes = config.slices * config.block_k * config.block_n // (32 * config.num_warps)
    return 168 if config.block_m == 8 and codes <= 128 else None


def fused(
    x: torch.Tensor,
    prepared: CanonicalWeight,
    config: W8A16Config,
    constants: Mapping[str, object],
    bias: torch.Tensor | None,
    y: torch.Tensor,
) -> None:
    """y [M, N] = x [M, K] · wᵀ + bias by the kernel that the configuration names."""
    w, scale = prepared.codes, prepared.scale
    (m, k), n = x.shape, w.shape[0]
    _, _, stride_n, stride_k = scale_facts(prepared.scheme, k)
    tiles = -(-m // config.block_m) * -(-n // config.block_n)
    split = config.split_k
    part = x.new_empty((split, m, n), dtype=torch.float32) if split > 1 else scale
    values = (
        *(x, w, y, part, scale, y if bias is None else bias),
        *(m, n, k, x.stride(0), w.stride(0), y.stride(0), stride_n, stride_k),
    )
    if x.device.type == "cpu":
        # the interpreter multiplies 16-bit operands wrongly, bf16 ones most of all
        constants = {**constants, "DECODE": "bits" if x.dtype == torch.float16 else "fp32"}
    kernel = load_kernel(config)
    most = registers_of(config, facts_of(x))
    options = (config.num_warps, config.num_stages)
    start(Launch(kernel, (tiles, split), values, constants, *options, registers=most))
    if split > 1:
        sum_parts(part, None if prepared.scheme.block else scale, stride_n, bias, y)


def load_kernel(config: W8A16Config) -> Any:
    """The @triton.jit function of a fused configuration."""
    if config.how == "gemv":
        from anyfp8.kernels.w8a16_gemv import w8a16_gemv

        return w8a16_gemv
    if config.slices > 1:
        from anyfp8.kernels.w8a16_sliced import w8a16_sliced

        return w8a16_sliced
    from anyfp8.kernels.w8a16_plain import w8a16_plain

    return w8a16_plain


def sum_parts(
    part: torch.Tensor,
    scale: torch.Tensor | None,
    stride_n: int,
    bias: torch.Tensor | None,
    y: torch.Tensor,
) -> None:
    """y [M, N] = (part[0] + part[1] + …) · scale + bias, in this order."""
    from anyfp8.kernels import w8a16_plain

    parts, m, n = part.shape
    block = 512
    grid = (m, -(-n // block))
    values = (
        *(part, y, part if scale is None else scale, y if bias is None else bias),
        *(m, n, y.stride(0), stride_n),
    )
    constants = {
        "PARTS": parts,
        "SCALE": scale is not None,
        "HAS_BIAS": bias is not None,
        "BLOCK": block,
    }
    start(Launch(w8a16_plain.sum_parts, grid, values, constants))
