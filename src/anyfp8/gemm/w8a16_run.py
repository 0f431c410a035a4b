"""The launches of `triton_w8a16`: one fused kernel, or dequantize and multiply in chunks.

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

SCRATCH_BYTES = 64 << 20
# a "block" longer than any K or N: the scale never changes along it
WHOLE = 1 << 30
# elements that a program dequantizes: two loads of 16 bytes a thread
_DEQUANTIZED = 4096


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
    start(Launch(kernel, (tiles, split), values, constants, config.num_warps, config.num_stages))
    if split > 1:
        _sum(part, None if prepared.scheme.block else scale, stride_n, bias, y)


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


def _sum(
    part: torch.Tensor,
    scale: torch.Tensor | None,
    stride_n: int,
    bias: torch.Tensor | None,
    y: torch.Tensor,
) -> None:
    """y [M, N] = (part[0] + part[1] + …) · scale + bias, in this order."""
    from anyfp8.kernels.w8a16_plain import sum_parts

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
    start(Launch(sum_parts, grid, values, constants))


def chunk_rows(n: int, k: int) -> int:
    """Rows of w that are dequantized at once: chunks of one size, in tiles of the library's."""
    most = max(SCRATCH_BYTES // (2 * k), 16)
    if n <= most:
        return n
    tile = 256 if most >= 256 else 16
    chunks = -(-n // (most // tile * tile))
    return -(-n // (chunks * tile)) * tile


def chunked(
    x: torch.Tensor, prepared: CanonicalWeight, bias: torch.Tensor | None, y: torch.Tensor
) -> None:
    """Dequantize rows of w into a scratch of at most 64 MiB and multiply by them, in turn.

    fp16 cannot hold every code times its scale: there a row's scale is left out of the scratch and
    applied in fp32 afterwards.
    """
    codes, scale, scheme = prepared.codes, prepared.scale, prepared.scheme
    n, k = codes.shape
    relative = x.dtype == torch.float16 or y.dtype != x.dtype
    by_row = _row_scale(scale, scheme, n) if relative else scale
    step = chunk_rows(n, k)
    scratch = x.new_empty((step, k))
    for first in range(0, n, step):
        last = min(first + step, n)
        w = scratch[: last - first]
        _dequantize(codes, scale, scheme, by_row if relative else None, first, w)
        part_bias = None if bias is None else bias[first:last]
        target = y[:, first:last]
        if relative:
            _sum(_product_fp32(x, w)[None], by_row[first:last], 1, part_bias, target)
        elif part_bias is None:
            torch.mm(x, w.t(), out=target)
        elif part_bias.dtype == x.dtype:
            torch.addmm(part_bias, x, w.t(), out=target)
        else:
            ones = torch.ones_like(scale.reshape(-1)[:1])
            _sum(_product_fp32(x, w)[None], ones, 0, part_bias, target)


def _dequantize(
    codes: torch.Tensor,
    scale: torch.Tensor,
    scheme: Scheme,
    by_row: torch.Tensor | None,
    first: int,
    w: torch.Tensor,
) -> None:
    """Rows `first` … of the weight into w [rows, K]; relative to `by_row` [N] where it is given."""
    from anyfp8.kernels.w8a16_dequantize import dequantize

    count, k = w.shape
    rows, group, stride_n, stride_k = scale_facts(scheme, k)
    block_k = min(scale_step(scheme, k), 512)
    block_n = _DEQUANTIZED // block_k
    device = facts_of(w)
    constants = {
        "SW_ROWS": rows,
        "SW_GROUP": group,
        "RELATIVE": by_row is not None,
        "DECODE": decode_of(device),
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
    }
    r = scale if by_row is None else by_row
    values = (codes, w, scale, r, first, count, k, stride_n, stride_k)
    grid = (-(-k // block_k) * -(-count // block_n),)
    start(Launch(dequantize, grid, values, constants))


def _row_scale(scale: torch.Tensor, scheme: Scheme, n: int) -> torch.Tensor:
    """[N] fp32: the largest scale of each row."""
    if scheme.block is None:
        return scale.reshape(-1).expand(n).contiguous()
    return scale.amax(1).repeat_interleave(scheme.block[0])[:n]


def _product_fp32(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x · wᵀ of 16-bit operands in fp32: [M, N]."""
    if not x.is_cuda:
        return x.float() @ w.float().t()
    return torch.mm(x, w.t(), out_dtype=torch.float32)
