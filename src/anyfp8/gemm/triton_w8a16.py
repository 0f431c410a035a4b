"""y = x · (decode(w) · sw)ᵀ + bias in 16-bit arithmetic: FP8 checkpoints on GPUs without FP8 units.

One byte a weight is stored and read; codes become fp16 or bf16 in registers, exactly, and scales
are applied in fp32 after the product (inside it where they change along K). Few tokens split K, in
a fixed order; many tokens dequantize the weight in chunks of rows into a bounded scratch and use
the 16-bit library product, which nothing written in Triton beats there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

import torch

from anyfp8.errors import InputError
from anyfp8.gemm.base import Backend, CanonicalWeight, Config, PreparedWeight
from anyfp8.gemm.compile import Source
from anyfp8.gemm.launch import Launch, facts_of, on_device_of, start
from anyfp8.gemm.tiles import aligned, same_device, triton_missing
from anyfp8.gemm.triton_row import POINTER_TYPES
from anyfp8.problem import DTYPES, Problem, QTensor, Scheme

if TYPE_CHECKING:
    from anyfp8.device import Device

_SCRATCH_BYTES = 64 << 20
_WHOLE = 1 << 30  # a "block" longer than any K or N: the scale never changes along it


@dataclass(frozen=True)
class W8A16Config(Config):
    """how: "fused" decodes in the product's kernel, "chunked" dequantizes and calls the library.

    The other fields are of the fused kernel; split_k parts of K are summed by a second kernel.
    """

    how: str = "fused"
    block_m: int = 16
    block_n: int = 64
    block_k: int = 128
    split_k: int = 1
    num_warps: int = 4
    num_stages: int = 4

    def __post_init__(self) -> None:
        blocks = (self.block_m, self.block_n, self.block_k, self.num_warps)
        if self.how not in ("fused", "chunked") or min(self.split_k, self.num_stages) < 1:
            raise InputError("not a W8A16Config", got=repr(self), want="how 'fused' or 'chunked'")
        if any(b < 1 or b & (b - 1) for b in blocks):
            raise InputError("not a tile", got=repr(self), want="blocks powers of two")

    def smem_bytes(self, device: Device) -> int:
        """Shared memory of one block, never less than what Triton takes."""
        w, x = self.block_n * self.block_k, 2 * self.block_m * self.block_k
        out = self.block_m * self.block_n * 4
        features = device.arch.features
        if device.vendor == "nvidia" and "cp_async" not in features:
            # no matrix unit that Triton uses: operands in fp32, no pipeline
            return max(4 * w, 2 * x, out)
        shallow = max(self.num_stages - 1, 1)
        if "tcgen05" in features:
            # decoded weights pass through shared memory
            return max(self.num_stages * (w + x) + 2 * w, out) + 16
        # Hopper reads x there and w from registers
        deep = self.num_stages if "wgmma" in features else shallow
        scales = 4 * self.block_n * shallow
        return max(shallow * w + deep * x + scales, out)


class TritonW8A16(Backend):
    name = "triton_w8a16"
    kind = "weight_only"
    config_class = W8A16Config
    batch_invariant = True

    def missing(self) -> str | None:
        return triton_missing()

    def why_not(self, problem: Problem, device: Device) -> str | None:
        if device.vendor == "cpu":
            return "runs on GPUs only"
        if problem.x_dtype == "fp32":
            return "takes 16-bit activations, got fp32"
        capability = device.capability
        if problem.x_dtype == "bf16" and capability is not None and capability < (8, 0):
            return f"multiplies bf16 on matrix units and {device.name} has none for it"
        if self._step(problem) < 16:
            return f"needs 16 columns of K with one scale, got {problem.scheme.name}"
        return None

    def illegal(self, config: Config, problem: Problem, device: Device) -> str | None:
        assert isinstance(config, W8A16Config)
        if config.how == "chunked":
            return None
        if config.block_m < 16 or config.block_n < 16 or config.block_k < 16:
            return "is below the tensor cores' 16x16x16"
        step = self._step(problem)
        if config.block_k > step or step % config.block_k:
            return f"has block_k={config.block_k}, and a scale covers {step} columns of K"
        if config.block_m * config.block_n > config.num_warps * 32 * 128:
            return f"does not fit {config.num_warps} warps"
        need = config.smem_bytes(device)
        if need > device.shared_memory:
            return (
                f"needs {need:,} B of shared memory and {device.name} has {device.shared_memory:,}"
            )
        return None

    def lowered(self, config: Config, problem: Problem, device: Device) -> W8A16Config | None:
        assert isinstance(config, W8A16Config)
        low = replace(config, block_k=min(config.block_k, self._step(problem)))
        while self.illegal(low, problem, device):
            if low.num_stages > 2:
                low = replace(low, num_stages=low.num_stages - 1)
            elif low.block_k > 32:
                low = replace(low, block_k=low.block_k // 2)
            elif low.block_n > 16:
                low = replace(low, block_n=low.block_n // 2)
            else:
                return None
        return low

    def default_config(self, problem: Problem, device: Device) -> W8A16Config:
        """A tile as wide as the tokens, K split until every SM has work; the library from 384."""
        m, n, k = problem.m, problem.n, problem.k
        if m >= 384:
            return W8A16Config("chunked")
        block_m = next((b for b in (16, 32, 64) if m <= b), 128)
        block_n = 64 if block_m < 128 else 128
        tiles = max(1, -(-m // block_m)) * -(-n // block_n)
        split = 1
        while tiles * split < (device.sms or 64) and split < 8 and k // (split * 2) >= 512:
            split *= 2
        config = W8A16Config("fused", block_m, block_n, 128, split, 4 if block_m < 128 else 8, 4)
        low = self.lowered(config, problem, device)
        assert low is not None, f"no legal default of {self.name} for {problem.key}"
        return low

    def configs(self, problem: Problem, device: Device) -> Iterator[W8A16Config]:
        if problem.m >= 128:
            yield W8A16Config("chunked")
        for block_m, block_n, block_k in product(
            (16, 32, 64, 128), (16, 32, 64, 128, 256), (32, 64, 128, 256)
        ):
            if block_m > 16 and block_m >= 2 * max(problem.m, 1):
                continue
            for split, warps, stages in product((1, 2, 4, 8), (4, 8), (2, 3, 4, 5)):
                if split > 1 and (problem.m > 64 or split * block_k * 2 > problem.k):
                    continue
                config = W8A16Config("fused", block_m, block_n, block_k, split, warps, stages)
                if self.illegal(config, problem, device) is None:
                    yield config

    def source(self, problem: Problem, config: W8A16Config, device: Device) -> Source:
        """The fused kernel's specialization that `run` launches, for compiling it elsewhere."""
        n, k = problem.n, problem.k
        x_type, y_type = POINTER_TYPES[problem.x_dtype], POINTER_TYPES[problem.out_dtype]
        signature = {"x_ptr": x_type, "w_ptr": "*u8", "y_ptr": y_type, "part_ptr": "*fp32"}
        signature |= {"sw_ptr": "*fp32", "bias_ptr": y_type}
        pointers = frozenset(signature)
        _, _, stride_n, stride_k = _scale_facts(problem.scheme, k)
        integers = {"N": n, "K": k, "stride_xm": k, "stride_wn": k, "stride_ym": n}
        integers |= {"stride_swn": stride_n, "stride_swk": stride_k}
        signature |= {"M": "i32"} | {name: "i32" for name, v in integers.items() if v != 1}
        constants = self.constants(problem, config, device)
        constants |= {name: 1 for name, v in integers.items() if v == 1}
        return Source(
            "anyfp8.kernels.w8a16_plain:w8a16_plain",
            tuple(signature.items()),
            tuple(constants.items()),
            pointers | aligned((name, v) for name, v in integers.items() if v != 1),
            config.num_warps,
            config.num_stages,
        )

    def constants(self, problem: Problem, config: W8A16Config, device: Device) -> dict[str, object]:
        rows, group, _, _ = _scale_facts(problem.scheme, problem.k)
        return {
            "SW_ROWS": rows,
            "SW_GROUP": group,
            "SCALE_IN_LOOP": problem.scheme.weight == "block",
            "HAS_BIAS": problem.bias,
            "DECODE": "hardware" if _converts(device) else "bits",
            "EVEN_K": problem.k % config.block_k == 0,
            "SPLIT_K": config.split_k,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k,
            "GROUP_M": 8,
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
        """x: [M, K] fp16 or bf16 with K contiguous. See `Backend.run`."""
        assert not isinstance(x, QTensor)
        assert isinstance(prepared, CanonicalWeight)
        assert isinstance(config, W8A16Config)
        rows = x if x.stride(1) == 1 else x.contiguous()
        shape, dtype = (rows.shape[0], problem.n), DTYPES[problem.out_dtype]
        y = rows.new_empty(shape, dtype=dtype) if out is None else out
        same_device(x=rows, w=prepared.codes, sw=prepared.scale, bias=bias, out=y)
        if rows.shape[0] == 0:
            return y
        with on_device_of(rows):
            if config.how == "chunked":
                _chunked(rows, prepared, bias, y)
            else:
                self._fused(rows, prepared, problem, config, bias, y)
        return y

    def _fused(
        self,
        x: torch.Tensor,
        prepared: CanonicalWeight,
        problem: Problem,
        config: W8A16Config,
        bias: torch.Tensor | None,
        y: torch.Tensor,
    ) -> None:
        from anyfp8.kernels.w8a16_plain import w8a16_plain

        w, scale = prepared.codes, prepared.scale
        (m, k), n = x.shape, w.shape[0]
        _, _, stride_n, stride_k = _scale_facts(problem.scheme, k)
        tiles = -(-m // config.block_m) * -(-n // config.block_n)
        split = config.split_k
        part = x.new_empty((split, m, n), dtype=torch.float32) if split > 1 else scale
        values = (
            x,
            w,
            y,
            part,
            scale,
            y if bias is None else bias,
            m,
            n,
            k,
            x.stride(0),
            w.stride(0),
            y.stride(0),
            stride_n,
            stride_k,
        )
        constants = self.constants(problem, config, facts_of(x))
        grid = (tiles, split)
        start(Launch(w8a16_plain, grid, values, constants, config.num_warps, config.num_stages))
        if split > 1:
            scaled = problem.scheme.weight != "block"
            _sum(part, scale if scaled else None, stride_n, bias, y)

    def _step(self, problem: Problem) -> int:
        """Columns of K that a tile may span: the largest power of two in a scale's block."""
        group = _scale_facts(problem.scheme, problem.k)[1]
        return min(group & -group, 1024)


def _scale_facts(scheme: Scheme, k: int) -> tuple[int, int, int, int]:
    """(rows, columns) under one scale, and the scale's strides along them."""
    if scheme.block is not None:
        return scheme.block[0], scheme.block[1], -(-k // scheme.block[1]), 1
    if scheme.weight == "channel":
        return 1, _WHOLE, 1, 0
    return _WHOLE, _WHOLE, 0, 0


def _converts(device: Device) -> bool:
    """Whether e4m3 to fp16 is an instruction there (SM89 up)."""
    return device.capability is not None and device.capability >= (8, 9)


def _sum(
    part: torch.Tensor,
    scale: torch.Tensor | None,
    stride_n: int,
    bias: torch.Tensor | None,
    y: torch.Tensor,
) -> None:
    from anyfp8.kernels.w8a16_plain import sum_parts

    parts, m, n = part.shape
    block = 512
    grid = (m, -(-n // block))
    values = (
        part,
        y,
        part if scale is None else scale,
        y if bias is None else bias,
        m,
        n,
        parts,
        y.stride(0),
        stride_n,
    )
    constants = {"SCALE": scale is not None, "HAS_BIAS": bias is not None, "BLOCK": block}
    start(Launch(sum_parts, grid, values, constants))


def _chunked(
    x: torch.Tensor, prepared: CanonicalWeight, bias: torch.Tensor | None, y: torch.Tensor
) -> None:
    """Dequantize rows of w into a scratch of at most 64 MiB and multiply by them, in turn.

    fp16 cannot hold every code times its scale: there a row's scale is left out of the scratch and
    applied in fp32 afterwards.
    """
    from anyfp8.kernels.w8a16_dequantize import dequantize

    codes, scale, scheme = prepared.codes, prepared.scale, prepared.scheme
    n, k = codes.shape
    rows, group, stride_n, stride_k = _scale_facts(scheme, k)
    relative = x.dtype == torch.float16 or y.dtype != x.dtype
    by_row = _row_scale(scale, scheme, n) if relative else scale
    step = max(16, min(n, _SCRATCH_BYTES // (2 * k)) // 16 * 16)
    scratch = x.new_empty((min(step, n), k))
    constants = {
        "SW_ROWS": rows,
        "SW_GROUP": group,
        "RELATIVE": relative,
        "HARDWARE": _converts(facts_of(x)),
        "BLOCK_N": 16,
        "BLOCK_K": 256,
    }
    for first in range(0, n, step):
        last = min(first + step, n)
        w = scratch[: last - first]
        count = last - first
        values = (codes, w, scale, by_row, first, count, k, stride_n, stride_k)
        grid = (-(-k // constants["BLOCK_K"]), -(-count // constants["BLOCK_N"]))
        start(Launch(dequantize, grid, values, constants))
        part_bias = None if bias is None else bias[first:last]
        target = y[:, first:last]
        if relative:
            _sum(_product_fp32(x, w)[None], by_row[first:last], 1, part_bias, target)
        elif part_bias is None:
            torch.mm(x, w.t(), out=target)
        elif part_bias.dtype == x.dtype:
            torch.addmm(part_bias, x, w.t(), out=target)
        else:
            ones = torch.ones_like(by_row.reshape(-1)[:1]).expand(count)
            _sum(_product_fp32(x, w)[None], ones, 0, part_bias, target)


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


BACKEND = TritonW8A16()
