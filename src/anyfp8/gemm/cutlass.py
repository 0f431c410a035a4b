"""y = fp8_scaled_mm(x, wᵀ, sx, sw): the CUTLASS kernels that sgl-kernel and vLLM bring.

Per-token by per-channel scales (single ones are repeated), fast accumulation only. An optional
package and the peer to beat at small M on Hopper.

The surprise: sgl-kernel's kernels never ask for the stride of a row and read whatever lies between
two rows, so activations that are a view with gaps are copied first.
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

# families for which both packages build these kernels
_CAPABILITIES = ((8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1))


class Cutlass(Backend):
    name = "cutlass"
    kind = "w8a8"
    accumulates = ("fast",)

    def missing(self) -> str | None:
        if installed("sgl_kernel", "vllm"):
            return None
        return "needs the package sglang-kernel or vllm, and neither is installed"

    def why_not(self, problem: Problem, device: Device) -> str | None:
        scheme = problem.scheme
        if device.capability not in _CAPABILITIES:
            return f"has no kernel for {device.arch.name}"
        if scheme.weight == "block" or scheme.activation == "group":
            return "applies scales once a row, and these change along K"
        if problem.n % 16 or problem.k % 16:
            return f"needs N and K divisible by 16, got N={problem.n}, K={problem.k}"
        if problem.out_dtype == "fp32":
            return "gives 16-bit results only"
        return None

    def probe(self, problem: Problem, device: Device) -> str | None:
        module = installed("sgl_kernel", "vllm")
        return tried(self, problem, "vllm" if module == "vllm" else "sglang-kernel")

    def run(
        self,
        x: torch.Tensor | QTensor,
        prepared: PreparedWeight,
        problem: Problem,
        config: Config,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x.data: [M, K] e4m3fn; x.scale: fp32 [] or [M, 1]. See `Backend.run`."""
        assert isinstance(x, QTensor)
        assert isinstance(prepared, CanonicalWeight)
        dtype = DTYPES[problem.out_dtype]
        codes = packed(x.codes).view(torch.float8_e4m3fn)
        m, n = codes.shape[0], prepared.codes.shape[0]
        same_device(x=codes, sx=x.scale, w=prepared.codes, sw=prepared.scale, bias=bias, out=out)
        if m == 0:
            return codes.new_empty((0, n), dtype=dtype) if out is None else out
        w = prepared.codes.view(torch.float8_e4m3fn).t()
        sx = x.scale.reshape(-1, 1).expand(m, 1).contiguous()
        sw = prepared.scale.reshape(-1, 1).expand(n, 1).contiguous()
        inside = packed(bias) if bias is not None and bias.dtype == dtype else None
        with on_device_of(codes):
            if installed("sgl_kernel", "vllm") == "sgl_kernel":
                package: Any = importlib.import_module("sgl_kernel")
                y = package.fp8_scaled_mm(codes, w, sx, sw, dtype, inside)
            else:
                package = importlib.import_module("vllm._custom_ops")
                y = package.cutlass_scaled_mm(codes, w, sx, sw.t(), dtype, inside)
            return finished(y, bias if inside is None else None, out)


BACKEND = Cutlass()
