"""y = x · (decode(w) · sw)ᵀ + bias in 16-bit arithmetic: FP8 checkpoints on GPUs without FP8 units.

One byte a weight is stored and read; codes become fp16 or bf16 in registers, exactly, and scales
are applied in fp32 after the product (inside it where they change along K). Four kinds of kernel by
the number of tokens: CUDA cores for one to four, a tile whose warps split K, a plain tile, and for
many tokens the 16-bit library product over a weight that is dequantized in chunks of rows, which
nothing written in Triton beats there.
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
from anyfp8.gemm.launch import facts_of, on_device_of
from anyfp8.gemm.tiles import aligned, same_device, triton_missing
from anyfp8.gemm.triton_row import POINTER_TYPES
from anyfp8.gemm.w8a16_run import chunked, decode_of, fused, load_kernel, scale_facts, scale_step
from anyfp8.problem import DTYPES, Problem, QTensor

if TYPE_CHECKING:
    from anyfp8.device import Device

# fp32 sums a thread can hold beside decoded operands
_MAX_SUMS = 128


@dataclass(frozen=True)
class W8A16Config(Config):
    """Which kernel and its tile.

    how: "gemv" (CUDA cores, block_m rows of x at once: 1, 2 or 4), "fused" (matrix units) or
    "chunked" (dequantize, then the library; the other fields do not matter).
    split_k: parts of K that a second kernel sums. slices: warps of a block that split K; with more
    than one there are as many warps as slices, and a step covers slices · block_k columns.
    """

    how: str = "fused"
    block_m: int = 16
    block_n: int = 64
    block_k: int = 128
    split_k: int = 1
    slices: int = 1
    num_warps: int = 4
    num_stages: int = 4

    def __post_init__(self) -> None:
        blocks = (self.block_m, self.block_n, self.block_k, self.num_warps, self.slices)
        if self.how not in ("gemv", "fused", "chunked") or min(self.split_k, self.num_stages) < 1:
            raise InputError(
                "not a W8A16Config", got=repr(self), want="how 'gemv', 'fused' or 'chunked'"
            )
        if any(b < 1 or b & (b - 1) for b in blocks):
            raise InputError("not a tile", got=repr(self), want="blocks powers of two")

    def smem_bytes(self, device: Device) -> int:
        """Shared memory of one block, never less than what Triton takes."""
        step = self.slices * self.block_k
        w, x = self.block_n * step, 2 * self.block_m * step
        features = device.arch.features
        shallow = max(self.num_stages - 1, 1)
        scales = 4 * self.slices * self.block_n * shallow
        if self.how == "gemv":
            sums = 4 * self.block_n * self.num_warps
            return max(shallow * (w + x) + scales, sums)
        out = self.slices * self.block_m * self.block_n * 4
        if device.vendor == "nvidia" and "cp_async" not in features:
            # no matrix unit that Triton uses: operands in fp32, no pipeline
            return max(4 * w, 2 * x, out)
        # instructions of four warps, which slices and small tiles do without
        wide = self.slices == 1 and self.num_warps >= 4 and self.block_n >= 64
        if "tcgen05" in features and wide:
            # decoded weights pass through shared memory
            return max(self.num_stages * (w + x) + 2 * w, out) + 16
        # Hopper reads x there and w from registers
        deep = self.num_stages if "wgmma" in features and wide else shallow
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
        if scale_step(problem.scheme, problem.k) < 16:
            return f"needs 16 columns of K with one scale, got {problem.scheme.name}"
        return None

    def illegal(self, config: Config, problem: Problem, device: Device) -> str | None:
        assert isinstance(config, W8A16Config)
        if config.how == "chunked":
            return None
        step = scale_step(problem.scheme, problem.k)
        if config.block_k > step:
            return f"has block_k={config.block_k}, and a scale covers {step} columns of K"
        complaint = self._shape_complaint(config)
        if complaint:
            return complaint
        need = config.smem_bytes(device)
        if need > device.shared_memory:
            return (
                f"needs {need:,} B of shared memory and {device.name} has {device.shared_memory:,}"
            )
        return None

    def _shape_complaint(self, config: W8A16Config) -> str | None:
        threads = 32 * config.num_warps
        if config.how == "gemv":
            if config.block_m > 4 or config.slices > 1:
                return "multiplies one, two or four rows on CUDA cores"
            sums = config.block_m * config.block_n * config.block_k
        else:
            if min(config.block_m, config.block_n, config.block_k) < 16:
                return "is below the tensor cores' 16x16x16"
            if config.slices not in (1, config.num_warps):
                return f"splits K over {config.slices} warps and has {config.num_warps}"
            sums = config.block_m * config.block_n * config.slices
        return f"does not fit {config.num_warps} warps" if sums > threads * _MAX_SUMS else None

    def lowered(self, config: Config, problem: Problem, device: Device) -> W8A16Config | None:
        assert isinstance(config, W8A16Config)
        step = scale_step(problem.scheme, problem.k)
        low = replace(config, block_k=min(config.block_k, step))
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
        """CUDA cores to 4 tokens, warps splitting K to 64, a plain tile to 128, then the library.

        K is split over blocks only where N alone leaves most SMs idle: on the H200 any split costs
        more than it gains from N = 3,000 up.
        """
        m, n, k = max(problem.m, 1), problem.n, problem.k
        if m > 128:
            return W8A16Config("chunked")
        if m <= 4:
            config = self._gemv(m, n)
        elif m <= 64:
            block_m = 16 if m <= 16 else 32 if m <= 32 else 64
            block_n = 64 if n > 8192 and block_m < 64 else 32
            config = W8A16Config("fused", block_m, block_n, 64, 1, 4, 4, 4)
        else:
            config = W8A16Config("fused", 128, 128, 64, 1, 1, 8, 4)
        low = self.lowered(config, problem, device)
        assert low is not None, f"no legal default of {self.name} for {problem.key}"
        tiles, sms = -(-n // low.block_n), device.sms or 64
        split = low.split_k
        while 2 * tiles * split < sms and split < 8 and k // (split * 2) >= 1024:
            split *= 2
        return replace(low, split_k=split)

    def _gemv(self, m: int, n: int) -> W8A16Config:
        rows = 1 if m == 1 else 2 if m == 2 else 4
        # sums of all rows stay in registers
        if rows > 1:
            return W8A16Config("gemv", rows, 8, 512, 1, 1, 4, 4)
        if n <= 4096:
            return W8A16Config("gemv", 1, 8, 512, 1, 1, 2, 4)
        return W8A16Config("gemv", 1, 8, 1024, 1, 1, 4, 4)

    def configs(self, problem: Problem, device: Device) -> Iterator[W8A16Config]:
        """Every legal configuration that does not waste most of its tile."""
        candidates: list[W8A16Config] = []
        if problem.m >= 64:
            candidates.append(W8A16Config("chunked"))
        if problem.m <= 4:
            rows = 1 if problem.m <= 1 else 2 if problem.m == 2 else 4
            tiles = product((4, 8, 16, 32), (128, 256, 512, 1024), (1, 2, 4), (2, 4, 8), (3, 4, 6))
            candidates += [
                W8A16Config("gemv", rows, bn, bk, split, 1, warps, stages)
                for bn, bk, split, warps, stages in tiles
                if 16 * 32 * warps <= bn * bk
            ]
        for block_m in (16, 32, 64, 128):
            if block_m > 16 and block_m >= 2 * problem.m:
                continue
            if problem.m <= 64:
                sliced = product((16, 32, 64), (32, 64, 128), (1, 2, 4), (2, 4, 8), (2, 3, 4, 6, 9))
                candidates += [
                    W8A16Config("fused", block_m, bn, bk, split, slices, slices, stages)
                    for bn, bk, split, slices, stages in sliced
                ]
            plain = product((16, 32, 64, 128, 256), (32, 64, 128, 256), (1, 2, 4, 8), (1, 2, 4, 8))
            candidates += [
                W8A16Config("fused", block_m, bn, bk, split, 1, warps, stages)
                for bn, bk, split, warps in plain
                for stages in (2, 3, 4, 5)
            ]
        for config in candidates:
            step = config.slices * config.block_k
            if config.split_k > 1 and (problem.m > 64 or config.split_k * step * 2 > problem.k):
                continue
            if self.illegal(config, problem, device) is None:
                yield config

    def source(self, problem: Problem, config: W8A16Config, device: Device) -> Source:
        """The fused kernel's specialization that `run` launches, for compiling it elsewhere."""
        n, k = problem.n, problem.k
        x_type, y_type = POINTER_TYPES[problem.x_dtype], POINTER_TYPES[problem.out_dtype]
        signature = {"x_ptr": x_type, "w_ptr": "*u8", "y_ptr": y_type, "part_ptr": "*fp32"}
        signature |= {"sw_ptr": "*fp32", "bias_ptr": y_type}
        pointers = frozenset(signature)
        _, _, stride_n, stride_k = scale_facts(problem.scheme, k)
        integers = {"N": n, "K": k, "stride_xm": k, "stride_wn": k, "stride_ym": n}
        integers |= {"stride_swn": stride_n, "stride_swk": stride_k}
        signature |= {"M": "i32"} | {name: "i32" for name, v in integers.items() if v != 1}
        constants = self.constants(problem, config, device)
        constants |= {name: 1 for name, v in integers.items() if v == 1}
        kernel = load_kernel(config)
        return Source(
            f"{kernel.fn.__module__}:{kernel.fn.__name__}",
            tuple(signature.items()),
            tuple(constants.items()),
            pointers | aligned((name, v) for name, v in integers.items() if v != 1),
            config.num_warps,
            config.num_stages,
        )

    def constants(self, problem: Problem, config: W8A16Config, device: Device) -> dict[str, object]:
        rows, group, _, _ = scale_facts(problem.scheme, problem.k)
        common: dict[str, object] = {
            "SW_ROWS": rows,
            "SW_GROUP": group,
            "SCALE_IN_LOOP": problem.scheme.weight == "block",
            "HAS_BIAS": problem.bias,
            "DECODE": decode_of(device),
            "EVEN_K": problem.k % (config.slices * config.block_k) == 0,
            "SPLIT_K": config.split_k,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k,
        }
        if config.how == "gemv":
            return common | {"STAGES": config.num_stages}
        sliced = {"SLICES": config.slices} if config.slices > 1 else {}
        return common | {"GROUP_M": 8} | sliced

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
                chunked(rows, prepared, bias, y)
            else:
                constants = self.constants(problem, config, facts_of(rows))
                fused(rows, prepared, config, constants, bias, y)
        return y


BACKEND = TritonW8A16()
