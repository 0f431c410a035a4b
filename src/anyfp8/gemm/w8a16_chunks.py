"""y = x · dequantize(w)ᵀ + bias for many tokens: rows of w through a scratch of 64 MiB, then mm.

Nothing written in Triton multiplies 16-bit operands as fast as the library, and a whole dequantized
weight is too large to keep. Chunks are of one size. Where there are several, two streams take them
by turns, each with its part of the scratch: what one has to do fills the multiprocessors that the
last wave of the other's product leaves idle. The surprise: each stream of a caller has a second one
of its own, so that the capture of one never meets eager work of another.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from anyfp8.gemm.base import CanonicalWeight
from anyfp8.gemm.launch import Launch, facts_of, redirected, start
from anyfp8.gemm.w8a16_run import decode_of, scale_facts, scale_step, sum_parts
from anyfp8.problem import Scheme

if TYPE_CHECKING:
    from anyfp8.device import Device

SCRATCH_BYTES = 64 << 20
# elements that a program dequantizes: two loads of 16 bytes a thread
_DEQUANTIZED = 4096
# operations of a product that two streams make faster
_LONG = 1 << 37
# elements of y that a chunk gives where the scratch would hold more
_OUTPUTS = 1 << 23


def lanes_for(m: int, n: int, k: int, device: Device) -> int:
    """Streams that share the chunks: two where a product takes longer than what it costs to share.

    H200, bf16 / ours of Qwen3-8B's shapes: 0.973 instead of 0.952 at 8,192 tokens, 0.949 instead of
    0.931 at 4,096; 4096 x 4096 at 2,048 is slower with two.
    """
    return 2 if device.vendor == "nvidia" and 2 * m * n * k >= _LONG else 1


def chunk_rows(m: int, n: int, k: int, lanes: int = 1) -> int:
    """Rows of w that are dequantized at once: chunks of one size, in tiles of the library's.

    A weight of which each stream could take a half is cut smaller where tokens are many: 0.978
    instead of 0.962 of bf16 at 4096 x 4096, M = 8192.
    """
    most = max(SCRATCH_BYTES // (2 * k * lanes), 16)
    if n <= most and lanes == 1:
        return n
    if n <= most * lanes:
        most = min(most, -(-n // (lanes * 256)) * 256, max(_OUTPUTS // m, 1024))
    tile = 256 if most >= 256 else 16
    chunks = max(-(-n // (most // tile * tile)), lanes)
    return -(-n // (chunks * tile)) * tile


def chunked(
    x: torch.Tensor, prepared: CanonicalWeight, bias: torch.Tensor | None, y: torch.Tensor
) -> None:
    """y [M, N] = x [M, K] · wᵀ + bias, a chunk of w's rows after the other.

    fp16 cannot hold every code times its scale: there a row's scale is left out of the scratch and
    applied in fp32 afterwards.
    """
    codes, scale, scheme = prepared.codes, prepared.scale, prepared.scheme
    n, k = codes.shape
    relative = x.dtype == torch.float16 or y.dtype != x.dtype
    by_row = _row_scale(scale, scheme, n) if relative else scale
    m = x.shape[0]
    lanes = lanes_for(m, n, k, facts_of(x))
    step = chunk_rows(m, n, k, lanes)
    scratch = x.new_empty((lanes, step, k))
    second = None
    if lanes == 2 and x.is_cuda and not redirected():
        second = _Second(torch.cuda.current_stream(x.device))
    try:
        for number, first in enumerate(range(0, n, step)):
            last = min(first + step, n)
            w = scratch[number % lanes, : last - first]
            with torch.cuda.stream(second.stream if second and number % 2 else None):
                _dequantize(codes, scale, scheme, by_row if relative else None, first, w)
                if second and number == 0:
                    # not earlier: the first product would wait for two chunks
                    second.fork()
                part_bias = None if bias is None else bias[first:last]
                target = y[:, first:last]
                if relative:
                    product = _product_fp32(x, w)[None]
                    sum_parts(product, by_row[first:last], 1, part_bias, target)
                elif part_bias is None:
                    torch.mm(x, w.t(), out=target)
                elif part_bias.dtype == x.dtype:
                    torch.addmm(part_bias, x, w.t(), out=target)
                else:
                    ones = torch.ones_like(scale.reshape(-1)[:1])
                    sum_parts(_product_fp32(x, w)[None], ones, 0, part_bias, target)
    finally:
        if second:
            second.join()


class _Second:
    """The stream beside the current one, from `fork` to `join`.

    Outside of the two there is one stream only: for the caller, a graph's capture, the allocator.
    """

    def __init__(self, main: torch.cuda.Stream) -> None:
        self.main, self.forked = main, False
        self.stream = _beside(main.device_index, main.cuda_stream)

    def fork(self) -> None:
        self.stream.wait_stream(self.main)
        self.forked = True

    def join(self) -> None:
        # a capture that the other stream never came into must not wait for it
        if self.forked:
            self.main.wait_stream(self.stream)


@cache
def _beside(device: int, stream: int) -> torch.cuda.Stream:
    """The second stream of a stream."""
    while True:
        # torch deals them out of a pool, in turn
        found = torch.cuda.Stream(device)
        if found.cuda_stream != stream:
            return found


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
