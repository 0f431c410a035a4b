"""y = deep_gemm.fp8_gemm_nt(x, w): DeepSeek's kernels for 1x128 by 128x128 scales on Hopper.

It leaves the short accumulator after every 128 of K, so both accumulate modes are the same to it.
Never on the default path: it compiles with nvcc at first use; a table or a user names it. On SM100
it reads packed UE8M0 exponents, which fp32 scales never become here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

from anyfp8.gemm.base import Backend, CanonicalWeight, Config, PreparedWeight
from anyfp8.gemm.launch import on_device_of
from anyfp8.gemm.packages import columns_first, finished, installed, packed
from anyfp8.gemm.probe import tried
from anyfp8.gemm.tiles import same_device
from anyfp8.problem import Problem, QTensor

if TYPE_CHECKING:
    from anyfp8.device import Device


class DeepGemm(Backend):
    name = "deep_gemm"
    kind = "w8a8"
    default = False

    def missing(self) -> str | None:
        return None if installed("deep_gemm") else "needs the package deep_gemm, not installed"

    def why_not(self, problem: Problem, device: Device) -> str | None:
        scheme = problem.scheme
        if device.capability != (9, 0):
            return f"reads fp32 scales on SM90 only, and this is {device.arch.name}"
        if scheme.block != (128, 128) or scheme.group != 128:
            return f"multiplies 1x128 by 128x128 scales, not {scheme.name}"
        if problem.n % 64 or problem.k % 128:
            return f"needs N % 64 = K % 128 = 0, got N={problem.n}, K={problem.k}"
        if problem.out_dtype != "bf16":
            return "gives bf16 results only"
        return None

    def probe(self, problem: Problem, device: Device) -> str | None:
        return tried(self, problem, "deep_gemm")

    def run(
        self,
        x: torch.Tensor | QTensor,
        prepared: PreparedWeight,
        problem: Problem,
        config: Config,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x.data: [M, K] e4m3fn; x.scale: fp32 [M, K/128]. See `Backend.run`."""
        assert isinstance(x, QTensor)
        assert isinstance(prepared, CanonicalWeight)
        package: Any = importlib.import_module("deep_gemm")
        codes = packed(x.codes).view(torch.float8_e4m3fn)
        w = prepared.codes.view(torch.float8_e4m3fn)
        same_device(x=codes, sx=x.scale, w=w, sw=prepared.scale, bias=bias, out=out)
        y = codes.new_empty((codes.shape[0], w.shape[0]), dtype=torch.bfloat16)
        if y.numel():
            with on_device_of(codes):
                # TMA wants each column of scales 16 bytes aligned
                sx = columns_first(x.scale, 4)
                package.fp8_gemm_nt((codes, sx), (w, prepared.scale), y)
        return finished(y, bias, out)


BACKEND = DeepGemm()
