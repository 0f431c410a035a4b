"""y = x · (decode(w) · sw)ᵀ + bias in 16-bit arithmetic: FP8 checkpoints on GPUs without FP8 units.

One byte a weight is stored and read; codes become fp16 or bf16 in registers, exactly, and scales
are applied in fp32 after the product (inside it where they change along K). Four kinds of kernel by
the number of tokens: CUDA cores for one, a tile whose warps split K, a plain tile, and for many
tokens the 16-bit library product over a weight that is dequantized in chunks of rows.
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
from anyfp8.gemm.w8a16_chunks import chunked
from anyfp8.gemm.w8a16_run import (
    by_groups,
    by_warps,
    decode_of,
    fewest_tokens,
    fused,
    load_kernel,
    registers_of,
    scale_facts,
    scale_step,
)
from anyfp8.problem import DTYPES, Problem, QTensor

if TYPE_CHECKING:
    from anyfp8.device import Device

# fp32 sums a thread can hold beside decoded operands
_MAX_SUMS = 128
_HOW = ("gemv", "fused", "paired", "wide", "chunked")


@dataclass(frozen=True)
class W8A16Config(Config):
    """Which kernel and its tile.

    how: "gemv" (CUDA cores, block_m rows of x at once: 1, 2 or 4), "fused" (matrix units), "paired"
    (the same, codes read two by two), "wide" (tokens on the tall side of the matrix units, which
    Hopper's instruction of four warps makes 64) or "chunked" (dequantize, then the library; the
    other fields do not matter).
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
        if self.how not in _HOW or min(self.split_k, self.num_stages) < 1:
            raise InputError("not a W8A16Config", got=repr(self), want=f"how {', '.join(_HOW)}")
        if any(b < 1 or b & (b - 1) for b in blocks):
            raise InputError("not a tile", got=repr(self), want="blocks powers of two")

    def smem_bytes(self, device: Device) -> int:
        """Shared memory of one block, never less than what Triton takes."""
        features, step = device.arch.features, self.slices * self.block_k
        w, x = self.block_n * step, 2 * self.block_m * step
        shallow = max(self.num_stages - 1, 1)
        if "lds_copy" in features:  # padded, and as deep as the pipeline
            w, x, shallow = w + w // 64, x + x // 64, self.num_stages
        scales = 4 * self.slices * self.block_n * shallow
        if self.how == "gemv":
            sums = 4 * self.block_n * self.num_warps
            return max(shallow * (w + x) + scales, sums)
        out = self.slices * self.block_m * self.block_n * 4
        if device.vendor == "nvidia" and "cp_async" not in features:
            # no matrix unit that Triton uses: operands in fp32, no pipeline
            return max(4 * w, 2 * x, out)
        if self.how == "wide" and self.block_m >= 64:
            # decoded weights pass through shared memory
            return max(shallow * w + self.num_stages * x + 2 * w + scales, out) + 1024
        if self.how == "paired":
            # even and odd columns of the tokens too, for an instruction of four warps
            return max(shallow * w + (self.num_stages + 1) * x + scales, out) + 1024
        # instructions of four warps, which slices and small tiles do without
        wide = self.slices == 1 and self.num_warps >= 4 and self.block_n >= 64
        if "tcgen05" in features and wide:
            return max(self.num_stages * (w + x) + 2 * w, out) + 16
        # Hopper reads x there and w from registers; so does Triton 3.8 in plain tiles anywhere
        deep = self.num_stages if self.slices == 1 else shallow
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
        paired = config.how == "paired"
        complaint = self._pairs_complaint(problem, device) if paired else None
        complaint = complaint or self._shape_complaint(config, device)
        if complaint:
            return complaint
        need = config.smem_bytes(device)
        if need > device.shared_memory:
            return (
                f"needs {need:,} B of shared memory and {device.name} has {device.shared_memory:,}"
            )
        return None

    def _pairs_complaint(self, problem: Problem, device: Device) -> str | None:
        # Triton 3.6 fails to compile it for AMD
        if problem.k % 16 == 0 and "cp_async" in device.arch.features:
            return None
        return f"reads codes two by two: not with K={problem.k} on {device.name}"

    def _shape_complaint(self, config: W8A16Config, device: Device) -> str | None:
        threads = 32 * config.num_warps
        if config.how == "gemv":
            if config.block_m > 4 or config.slices > 1:
                return "multiplies one, two or four rows on CUDA cores"
            sums = config.block_m * config.block_n * config.block_k
        else:
            fewest = fewest_tokens(device)
            if config.block_m < fewest or min(config.block_n, config.block_k) < 16:
                return f"is below the tensor cores' {fewest}x16x16"
            if config.how == "wide" and config.block_m < 16:
                return "has fewer tokens than the tall side of a matrix unit"
            if config.how != "fused" and config.slices > 1:
                return "splits K over warps by the fused kernel only"
            if config.how == "paired" and config.block_k < 32:
                return "multiplies even and odd columns apart, 16 of each at least"
            if config.slices not in (1, config.num_warps):
                return f"splits K over {config.slices} warps and has {config.num_warps}"
            sums = config.block_m * config.block_n * config.slices
        return f"does not fit {config.num_warps} warps" if sums > threads * _MAX_SUMS else None

    def lowered(self, config: Config, problem: Problem, device: Device) -> W8A16Config | None:
        assert isinstance(config, W8A16Config)
        step = scale_step(problem.scheme, problem.k)
        low = replace(config, block_k=min(config.block_k, step))
        if low.how == "paired" and self._pairs_complaint(problem, device):
            low = replace(low, how="fused")
        if low.how == "fused":
            low = replace(low, block_m=max(low.block_m, fewest_tokens(device)))
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
        """CUDA cores for one token, matrix units to 128 or 256, then the library.

        The thresholds are the H200's (tests/data/gemm/); N counts by columns an SM. K is split over
        blocks where N alone gives the SMs too few.
        """
        n, k, sms = problem.n, problem.k, device.sms or 64
        tile, waves = self._tile(max(problem.m, 1), n / sms, k, device)
        low = self.lowered(tile, problem, device)
        assert low is not None, f"no legal default of {self.name} for {problem.key}"
        if low.how == "chunked":
            return low
        tiles, split = -(-problem.m // low.block_m) * -(-n // low.block_n), 1
        # eight steps a part at least, which fill the pipeline twice
        least = 16 * low.slices * low.block_k
        while 2 * tiles * split <= waves * sms and split < 8 and k >= least * split:
            split *= 2
        return replace(low, split_k=split)

    def _tile(self, m: int, per_sm: float, k: int, device: Device) -> tuple[W8A16Config, float]:
        """(tile, blocks wanted for each SM) by tokens and columns of N an SM.

        µs: H200, with sm_80 code after a slash; Marlin's in brackets.
        """
        groups = by_groups(device)
        wide = per_sm > 96
        if m == 1 and not wide:
            # 8.6/8.8 (12.6) at 6144 x 4096, 14.5/14.7 (21.7) at 4096 x 12288
            return W8A16Config("gemv", 1, 8, 512, 1, 1, 2, 4), 1
        if m <= 8 and wide:
            # 26.0/26.0 (32.8) at 24576 x 4096, M = 1; CUDA cores 27.1/27.7
            return W8A16Config("fused", 8, 64, 256, 1, 1, 4, 3), 1
        if m <= 8:
            # three tiles an SM at once: 9.6/9.6 (12.6) at 6144 x 4096, 15.4/15.4 (21.8) at
            # 4096 x 12288; CUDA cores for two tokens 10.6/10.7 and 15.2/15.8
            return W8A16Config("fused", 8, 16, 128, 1, 4, 4, 4), 1
        if m <= 16 and wide:
            # 28.0/27.6 (34.0) at 24576 x 4096; code by code on the group instruction 37.0
            return W8A16Config("paired" if groups else "fused", 16, 64, 256, 1, 1, 4, 3), 1
        if m <= 16:
            # 11.4/11.0 (13.2) at 6144 x 4096, 18.9/17.5 (22.2) at 4096 x 12288
            stages = 4 if per_sm <= 32 else 3
            return W8A16Config("fused", 16, 16, 128, 1, 4, 4, stages), 1
        if m <= 32 and groups:
            # K in four parts: 13.3 (15.5) at 6144 x 4096, 21.7 (24.0) at 4096 x 12288; in two: 36.0
            # (38.3) at 24576 x 4096
            return W8A16Config("paired", 32, 128 if wide else 64, 128, 1, 1, 4, 3 if wide else 4), 3
        if m <= 32 and per_sm <= 32:
            # 22.3 (24.0) at 4096 x 12288
            return W8A16Config("fused", 32, 32, 64, 1, 4, 4, 5), 1
        if m <= 32 and not wide:
            # K in four parts: 14.5 (15.5) at 6144 x 4096
            return W8A16Config("fused", 32, 128, 128, 1, 1, 4, 3), 3
        if m <= 32:
            # 32.7 (36.1) at 24576 x 4096
            return W8A16Config("fused", 32, 64, 128, 1, 1, 4, 4), 3
        if m <= 64 and groups:
            # K in eight parts: 17.4 (22.5) at 6144 x 4096, 28.0 (35.2) at 4096 x 12288; 50.4 (51.4)
            # at 24576 x 4096
            if wide:
                return W8A16Config("wide", 64, 64, 64, 1, 1, 4, 4), 3
            return W8A16Config("paired", 64, 128, 64, 1, 1, 4, 4), 3
        if m <= 64:
            # K in four parts: 17.8 (22.5) at 6144 x 4096, 29.3 (35.2) at 4096 x 12288; 53.8 (51.4)
            # at 24576 x 4096
            return W8A16Config("fused", 64, 64, 128, 1, 1, 4, 3), 3
        if groups and wide and m <= 256:
            # 71 (88.6) at 24576 x 4096, M = 128; 129 at 256, the library 157
            return W8A16Config("wide", 128, 128, 64, 1, 1, 4, 3), 1.5
        if groups and (m <= 128 or (m <= 256 and k >= 8192)):
            # K in four parts: 27.5 (30.9) at 6144 x 4096, 45 (59.5) at 4096 x 12288, M = 128; 62 at
            # 256, the library 92
            waves = 1.5 if m <= 128 else 2
            return W8A16Config("wide", 128, 128, 64, 1, 1, 8, 4), waves
        if m <= 128:
            # K in two parts: 34.2 (30.9) at 6144 x 4096, 54 (59.5) at 4096 x 12288; 82.6 (88.6) at
            # 24576 x 4096
            return W8A16Config("fused", 64, 128, 64, 1, 1, 4, 4), 1.5
        return W8A16Config("chunked"), 1

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
        if problem.m > 4:
            paired = product((16, 32, 64), (64, 128), (64, 128, 256), (1, 2, 4, 8), (3, 4, 5))
            candidates += [
                W8A16Config("paired", bm, bn, bk, split, 1, 4, stages)
                for bm, bn, bk, split, stages in paired
                if bm == 16 or bm < 2 * problem.m
            ]
        if problem.m > 8:
            wide = product((64, 128), (32, 64, 128, 256), (64, 128), (1, 2, 4), (4, 8), (3, 4))
            candidates += [
                W8A16Config("wide", bm, bn, bk, split, 1, warps, stages)
                for bm, bn, bk, split, warps, stages in wide
                if bm == 64 or problem.m > 64
            ]
        for block_m in (8, 16, 32, 64, 128):
            if (block_m > 16 and block_m >= 2 * problem.m) or (block_m == 8 and problem.m > 8):
                continue
            if problem.m <= 64:
                sliced = product(
                    (16, 32, 64), (32, 64, 128), (1, 2, 4), (2, 4, 8), (2, 3, 4, 5, 6, 9)
                )
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
            if config.split_k > 1 and (problem.m > 128 or config.split_k * step * 2 > problem.k):
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
            registers_of(config, device),
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
        common["GROUP_M"] = 8
        if config.slices > 1:
            return common | {"SLICES": config.slices}
        # Triton shares out the warps of a tile along N only where it is so much longer that way
        square = config.how == "fused" and config.num_warps * config.block_m > config.block_n
        common["PARTS"] = 2 if square and config.block_m >= 16 and by_warps(config, device) else 1
        paired = config.how == "paired"
        if paired and common["DECODE"] == "hardware":
            common["DECODE"] = "packed"
        return common | {"TOKENS_FIRST": config.how == "wide", "PAIRED": paired}

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
