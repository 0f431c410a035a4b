"""y = flashinfer.gemm.gemm_fp8_nt_groupwise(x, w): 1x128 by 128x128 scales on SM100.

Never on the default path: its kernels are built at first use; a table or a user names it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

from anyfp8.gemm.base import Backend, CanonicalWeight, Config, PreparedWeight
from anyfp8.gemm.launch import on_device_of
from anyfp8.gemm.packages import finished, installed, packed
from anyfp8.gemm.probe import tried
from anyfp8.gemm.tiles import same_device
from anyfp8.problem import DTYPES, Problem, QTensor

if TYPE_CHECKING:
    from anyfp8.device import Device


class FlashInfer(Backend):
    name = "flashinfer"
    kind = "w8a8"
    default = False

    def missing(self) -> str | None:
        return None if installed("flashinfer") else "needs the package flashinfer, not installed"

    def why_not(self, problem: Problem, device: Device) -> str | None:
        scheme = problem.scheme
        if device.capability not in ((10, 0), (10, 3)):
            return f"has this product on SM100 only, and this is {device.arch.name}"
        if scheme.block != (128, 128) or scheme.group != 128:
            return f"multiplies 1x128 by 128x128 scales, not {scheme.name}"
        if problem.n % 128 or problem.k % 128:
            return f"needs whole 128x128 blocks, got N={problem.n}, K={problem.k}"
        if problem.out_dtype == "fp32":
            return "gives 16-bit results only"
        return None

    def probe(self, problem: Problem, device: Device) -> str | None:
        return tried(self, problem, "flashinfer-python")

    def run(
        self,
        x: torch.Tensor | QTensor,
        prepared: PreparedWeight,
        problem: Problem,
        config: Config,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x.data: [M, K] e4m3fn, M padded to a multiple of 4; x.scale: fp32 [M, K/128]."""
        assert isinstance(x, QTensor)
        assert isinstance(prepared, CanonicalWeight)
        package: Any = importlib.import_module("flashinfer.gemm")
        dtype = DTYPES[problem.out_dtype]
        codes, sx = x.codes, packed(x.scale)
        w = prepared.codes.view(torch.float8_e4m3fn)
        m, n = codes.shape[0], w.shape[0]
        same_device(x=codes, sx=sx, w=w, sw=prepared.scale, bias=bias, out=out)
        if m == 0:
            return codes.new_empty((0, n), dtype=dtype) if out is None else out
        if m % 4:
            pad = (0, 0, 0, -m % 4)
            codes = torch.nn.functional.pad(codes, pad)
            sx = torch.nn.functional.pad(sx, pad)
        with on_device_of(codes):
            y = package.gemm_fp8_nt_groupwise(
                packed(codes).view(torch.float8_e4m3fn),
                w,
                sx,
                prepared.scale,
                scale_major_mode="K",
                out_dtype=dtype,
            )
        return finished(y[:m], bias, out)


BACKEND = FlashInfer()
