"""y = (x · wᵀ) · sx · sw + bias: per-tensor or per-token times per-tensor or per-channel scales.

The tile parameters are those of the engines' Triton kernel, so their tuned tables run here. Sums
stay in the tensor cores' accumulator ("fast") or leave it after each tile of K ("fp32_128"); scales
and bias are applied in fp32, before the one rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from anyfp8.gemm.base import CanonicalWeight, Config, PreparedWeight
from anyfp8.gemm.compile import Source
from anyfp8.gemm.launch import Launch, facts_of, start
from anyfp8.gemm.tiles import TileBackend, TileConfig, aligned, operand_of, same_device
from anyfp8.problem import DTYPES, Problem, QTensor

if TYPE_CHECKING:
    from anyfp8.device import Device

POINTER_TYPES = {"bf16": "*bf16", "fp16": "*fp16", "fp32": "*fp32"}


class TritonRow(TileBackend):
    name = "triton_row"
    swaps = True

    def why_not(self, problem: Problem, device: Device) -> str | None:
        scheme = problem.scheme
        if scheme.weight == "block" or scheme.activation == "group":
            return "applies scales once a row, and these change along K"
        return super().why_not(problem, device)

    def source(self, problem: Problem, config: TileConfig, device: Device) -> Source:
        """The specialization that `run` launches, for compiling it elsewhere."""
        n, k = problem.n, problem.k
        signature = dict.fromkeys(("x_ptr", "w_ptr"), "*u8")
        signature |= {"y_ptr": POINTER_TYPES[problem.out_dtype]}
        signature |= {"sx_ptr": "*fp32", "sw_ptr": "*fp32", "bias_ptr": "*bf16"}
        integers = {"N": n, "K": k, "stride_xm": k, "stride_wn": k, "stride_ym": n}
        integers = {name: value for name, value in integers.items() if value != 1}
        pointers = frozenset(signature)
        signature |= dict.fromkeys(("M", *integers), "i32")
        constants = self.constants(problem, config, device)
        constants |= dict.fromkeys(("N", "K", "stride_xm", "stride_wn", "stride_ym"), 1)
        constants = {name: v for name, v in constants.items() if name not in signature}
        form = "row_swap" if config.swap else "row_plain"
        return Source(
            f"anyfp8.kernels.{form}:{form}",
            tuple(signature.items()),
            tuple(constants.items()),
            pointers | aligned(integers.items()),
            config.num_warps,
            config.num_stages,
        )

    def constants(self, problem: Problem, config: TileConfig, device: Device) -> dict[str, object]:
        scheme = problem.scheme
        return {
            "SX_ROWS": scheme.activation == "token",
            "SW_ROWS": scheme.weight == "channel",
            "HAS_BIAS": problem.bias,
            "OPERAND": operand_of(device),
            "PROMOTE": problem.accumulate == "fp32_128",
            "SHORT": problem.m < config.block_m,
            "EVEN_K": problem.k % config.block_k == 0,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k,
            "GROUP_M": config.group_m,
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
        """x.data: [M, K] with K contiguous; x.scale: fp32 [] or [M, 1]. See `Backend.run`."""
        from anyfp8.kernels.row_plain import row_plain
        from anyfp8.kernels.row_swap import row_swap

        assert isinstance(x, QTensor)
        assert isinstance(prepared, CanonicalWeight)
        assert isinstance(config, TileConfig)
        codes, w = x.codes, prepared.codes
        (m, k), n = codes.shape, w.shape[0]
        y = codes.new_empty((m, n), dtype=DTYPES[problem.out_dtype]) if out is None else out
        same_device(x=codes, sx=x.scale, w=w, sw=prepared.scale, bias=bias, out=y)
        if m == 0:
            return y
        grid = (-(-m // config.block_m) * -(-n // config.block_n),)
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
        )
        constants = self.constants(problem, config, facts_of(codes))
        # of the rows there are, whatever the problem says: others may not be read
        constants["SHORT"] = m < config.block_m
        kernel = row_swap if config.swap else row_plain
        start(Launch(kernel, grid, values, constants, config.num_warps, config.num_stages))
        return y


BACKEND = TritonRow()
