"""y = Σ over K blocks of (x · wᵀ) · sx[m, k/g] · sw[n/bn, k/bk], + bias: DeepSeek's layout and kin.

Who stores weights this way: 128x128 blocks with 1x128 activations in DeepSeek-V3, Qwen3-FP8 and
transformers' fine-grained FP8. Any block rows and any N serve; along K the tile must divide both
the block and the group, because a tile that spans two scales would apply the wrong one.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING

import torch

from anyfp8.errors import InputError
from anyfp8.gemm.base import CanonicalWeight, Config, PreparedWeight
from anyfp8.gemm.compile import Source
from anyfp8.gemm.launch import Launch, facts_of, start
from anyfp8.gemm.tiles import TileBackend, TileConfig, aligned, operand_of, same_device
from anyfp8.gemm.triton_row import POINTER_TYPES
from anyfp8.problem import DTYPES, Problem, QTensor, Scheme

if TYPE_CHECKING:
    from anyfp8.device import Device

_WHOLE = 1 << 30  # a "group" longer than any K: the scale never changes along it


class TritonBlock(TileBackend):
    name = "triton_block"
    swaps = True
    has_parts = True

    def why_not(self, problem: Problem, device: Device) -> str | None:
        scheme = problem.scheme
        if scheme.weight != "block" and scheme.activation != "group":
            return "applies scales once a K block, and these are one a row"
        step = self.max_block_k(problem)
        if step < 32:
            return f"needs 32 columns of K with one scale, and {scheme.name} changes after {step}"
        return super().why_not(problem, device)

    def max_block_k(self, problem: Problem) -> int:
        step = gcd(_x_group(problem.scheme), _w_group(problem.scheme))
        # the largest power of two in it: tiles are powers of two
        return min(step & -step, super().max_block_k(problem))

    def smem_bytes(self, config: TileConfig, problem: Problem, device: Device) -> int:
        # scales change their layout on the way to the accumulators, this step's and the next's
        scales = 8 * max(config.block_m, config.block_n) * config.parts
        return super().smem_bytes(config, problem, device) + scales

    def illegal(self, config: Config, problem: Problem, device: Device) -> str | None:
        assert isinstance(config, TileConfig)
        step = config.parts * config.block_k
        groups = (_x_group(problem.scheme), _w_group(problem.scheme))
        if config.parts > 1 and any(group != _WHOLE and step % group for group in groups):
            return f"steps {step} columns, and scales change after {groups[0]} and {groups[1]}"
        return super().illegal(config, problem, device)

    def source(self, problem: Problem, config: TileConfig, device: Device) -> Source:
        """The specialization that `run` launches, for compiling it elsewhere."""
        n, k = problem.n, problem.k
        signature = dict.fromkeys(("x_ptr", "w_ptr"), "*u8")
        signature |= {"y_ptr": POINTER_TYPES[problem.out_dtype]}
        signature |= {"sx_ptr": "*fp32", "sw_ptr": "*fp32", "bias_ptr": "*bf16"}
        pointers = frozenset(signature)
        groups = -(-k // _x_group(problem.scheme))
        integers = {"N": n, "K": k, "stride_xm": k, "stride_wn": k, "stride_ym": n}
        integers |= dict(zip(_STRIDES, self.strides(problem, (groups, 1)), strict=True))
        signature |= {"M": "i32"} | {name: "i32" for name, v in integers.items() if v != 1}
        constants = self.constants(problem, config, device)
        constants |= {name: 1 for name, v in integers.items() if v == 1}
        form = "block_swap" if config.swap else "block_plain"
        return Source(
            f"anyfp8.kernels.{form}:{form}",
            tuple(signature.items()),
            tuple(constants.items()),
            pointers | aligned((name, v) for name, v in integers.items() if v != 1),
            config.num_warps,
            config.num_stages,
        )

    def strides(self, problem: Problem, sx: tuple[int, int]) -> tuple[int, int, int, int]:
        """Of sx along (m, k) and of sw along (n, k), 0 where one scale serves the whole axis."""
        scheme = problem.scheme
        if scheme.activation == "tensor":
            sx = (0, 0)
        elif scheme.activation == "token":
            sx = (1, 0)
        if scheme.block is not None:
            return sx[0], sx[1], -(-problem.k // scheme.block[1]), 1
        return sx[0], sx[1], int(scheme.weight == "channel"), 0

    def constants(self, problem: Problem, config: TileConfig, device: Device) -> dict[str, object]:
        scheme = problem.scheme
        rows = scheme.block[0] if scheme.block else (1 if scheme.weight == "channel" else _WHOLE)
        return {
            "SX_GROUP": _x_group(scheme),
            "SW_ROWS": rows,
            "SW_GROUP": _w_group(scheme),
            "SW_SCALAR": rows % config.block_n == 0,
            "HAS_BIAS": problem.bias,
            "OPERAND": operand_of(device),
            "SHORT": problem.m < config.block_m,
            "EVEN_K": problem.k % (config.parts * config.block_k) == 0,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k,
            "GROUP_M": config.group_m,
            "PARTS": config.parts,
        }

    def run(
        self,
        x: torch.Tensor | QTensor,
        prepared: PreparedWeight,
        problem: Problem,
        config: Config,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x.data: [M, K] with K contiguous; x.scale: fp32 [M, ceil(K/g)], any strides."""
        from anyfp8.kernels.block_plain import block_plain
        from anyfp8.kernels.block_swap import block_swap

        assert isinstance(x, QTensor)
        assert isinstance(prepared, CanonicalWeight)
        assert isinstance(config, TileConfig)
        if x.packed:
            raise InputError(
                "this kernel reads fp32 activation scales",
                got="packed UE8M0 exponents",
                want="quantize the activations with fp32 scales",
            )
        codes, w = x.codes, prepared.codes
        (m, k), n = codes.shape, w.shape[0]
        y = codes.new_empty((m, n), dtype=DTYPES[problem.out_dtype]) if out is None else out
        same_device(x=codes, sx=x.scale, w=w, sw=prepared.scale, bias=bias, out=y)
        if m == 0:
            return y
        grid = (-(-m // config.block_m) * -(-n // config.block_n),)
        sx = (x.scale.stride(0), x.scale.stride(1)) if x.scale.ndim == 2 else (0, 0)
        values = (
            codes,
            w,
            y,
            x.scale,
            prepared.scale,
            y if bias is None else bias,
            m,
            n,
            k,
            codes.stride(0),
            w.stride(0),
            y.stride(0),
            *self.strides(problem, sx),
        )
        constants = self.constants(problem, config, facts_of(codes))
        # of the rows there are, whatever the problem says: others may not be read
        constants["SHORT"] = m < config.block_m
        kernel = block_swap if config.swap else block_plain
        start(Launch(kernel, grid, values, constants, config.num_warps, config.num_stages))
        return y


_STRIDES = ("stride_sxm", "stride_sxk", "stride_swn", "stride_swk")


def _x_group(scheme: Scheme) -> int:
    return scheme.group or _WHOLE


def _w_group(scheme: Scheme) -> int:
    return scheme.block[1] if scheme.block else _WHOLE


BACKEND = TritonBlock()
