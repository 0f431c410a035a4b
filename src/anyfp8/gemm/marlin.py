"""y = x · (decode(w) · sw)ᵀ by Marlin: the weight-only kernel of vLLM and SGLang, where it imports.

Its weights are shuffled once at load by its own functions. The canonical codes come back by
shuffling their addresses the same way, so nothing here knows the layout.

The surprise: it rounds the scales to the activations' dtype. fp16 scales near 1e-6 lose percents,
so only bf16 activations are taken. Its tiles divide N by 64 and K by 128: other shapes are padded
with zeros, at most to twice the weight.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from anyfp8.gemm.base import Backend, Config, PreparedWeight, canonical_weight
from anyfp8.gemm.launch import on_device_of
from anyfp8.gemm.packages import installed, packed
from anyfp8.gemm.probe import tried
from anyfp8.problem import DTYPES, Problem, QTensor, Scheme

if TYPE_CHECKING:
    from anyfp8.device import Device

_MODULES = {
    "vllm": "vllm.model_executor.layers.quantization.utils.marlin_utils_fp8",
    "sglang": "sglang.srt.layers.quantization.marlin_utils_fp8",
}


@dataclass(frozen=True, eq=False)
class MarlinWeight(PreparedWeight):
    """Marlin's weight and scales, and the canonical fp32 scale for giving it back.

    Attributes:
        size: (N, K) of the checkpoint's weight; the shuffled one is `_padded`.
    """

    shuffled: torch.Tensor
    shuffled_scale: torch.Tensor
    workspace: torch.Tensor
    scale: torch.Tensor
    scheme: Scheme
    size: tuple[int, int]
    x_dtype: torch.dtype

    @property
    def layout(self) -> str:
        return "marlin"

    @property
    def shape(self) -> tuple[int, int]:
        return self.size

    def canonical(self) -> QTensor:
        n, k = _padded(*self.size)
        device = self.shuffled.device
        # each byte's address, shuffled a byte of it at a time, says where it came from
        address = torch.arange(n * k, device=device).view(n, k)
        origin = torch.zeros(n * k, dtype=torch.int64, device=device)
        for byte in range(4):
            part = ((address >> (8 * byte)) & 0xFF).to(torch.uint8)
            moved = _shuffle(part, self.scale, self.scheme, self.x_dtype).weight
            origin |= moved.contiguous().view(torch.uint8).reshape(-1).long() << (8 * byte)
        codes = torch.empty(n * k, dtype=torch.uint8, device=device)
        codes[origin] = self.shuffled.contiguous().view(torch.uint8).reshape(-1)
        rows, columns = self.size
        codes = codes.view(n, k)[:rows, :columns].contiguous().view(torch.float8_e4m3fn)
        return QTensor(codes, self.scale, self.scheme.block)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {
            "shuffled": self.shuffled,
            "shuffled_scale": self.shuffled_scale,
            "workspace": self.workspace,
            "scale": self.scale,
        }

    def replaced(self, tensors: dict[str, torch.Tensor]) -> MarlinWeight:
        return MarlinWeight(
            tensors["shuffled"],
            tensors["shuffled_scale"],
            tensors["workspace"],
            tensors["scale"],
            self.scheme,
            self.size,
            self.x_dtype,
        )


class Marlin(Backend):
    name = "marlin"
    kind = "weight_only"
    layout = "marlin"
    reads = ("marlin",)

    def missing(self) -> str | None:
        if installed(*_MODULES):
            return None
        return "needs the package vllm or sglang, and neither is installed"

    def why_not(self, problem: Problem, device: Device) -> str | None:
        scheme, capability = problem.scheme, device.capability
        if capability is None or capability < (8, 0):
            return f"has no kernel for {device.arch.name}"
        if problem.x_dtype != "bf16" or problem.out_dtype != "bf16":
            return "rounds its scales to the activations' dtype: bf16 in and out only"
        n, k = _padded(problem.n, problem.k)
        if n * k > 2 * problem.n * problem.k:
            return f"would pad N={problem.n}, K={problem.k} to {n}x{k}: more than twice the weight"
        if scheme.block is not None and scheme.block != (128, 128):
            return f"takes blocks of 128x128, not {scheme.name}"
        return None

    def probe(self, problem: Problem, device: Device) -> str | None:
        return tried(self, problem, installed(*_MODULES) or "vllm")

    def restored(
        self, layout: str, tensors: Sequence[torch.Tensor], problem: Problem
    ) -> PreparedWeight:
        if layout != self.layout:
            return super().restored(layout, tensors, problem)
        shuffled, shuffled_scale, workspace, scale = tensors
        size, x_dtype = (problem.n, problem.k), DTYPES[problem.x_dtype]
        return MarlinWeight(
            shuffled, shuffled_scale, workspace, scale, problem.scheme, size, x_dtype
        )

    def prepare(self, weight: QTensor, scheme: Scheme, x_dtype: str) -> MarlinWeight:
        plain = canonical_weight(weight, scheme)
        rows, columns = plain.shape
        n, k = _padded(rows, columns)
        codes = F.pad(plain.codes, (0, k - columns, 0, n - rows))
        layer = _shuffle(codes, plain.scale, scheme, DTYPES[x_dtype])
        scale = getattr(layer, "weight_scale", None)
        scale = layer.weight_scale_inv if scale is None else scale
        return MarlinWeight(
            layer.weight.detach(),
            scale.detach(),
            layer.workspace,
            plain.scale,
            scheme,
            plain.shape,
            DTYPES[x_dtype],
        )

    def run(
        self,
        x: torch.Tensor | QTensor,
        prepared: PreparedWeight,
        problem: Problem,
        config: Config,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x: [M, K] bf16. See `Backend.run`."""
        assert not isinstance(x, QTensor)
        assert isinstance(prepared, MarlinWeight)
        rows, columns = prepared.size
        n, k = _padded(rows, columns)
        if x.shape[0] == 0:
            return x.new_empty((0, rows)) if out is None else out
        with on_device_of(x):
            x = F.pad(x, (0, k - columns)) if k > columns else x
            y = _package().apply_fp8_marlin_linear(
                packed(x),
                prepared.shuffled,
                prepared.shuffled_scale,
                prepared.workspace,
                n,
                k,
                None,
            )[:, :rows]
            if bias is not None:
                y = (y.float() + bias.float()).to(y.dtype)
        return y.contiguous() if out is None else out.copy_(y)


def _padded(n: int, k: int) -> tuple[int, int]:
    """The shape that the kernel's tiles divide: zeros below and to the right of the weight."""
    return -(-n // 64) * 64, -(-k // 128) * 128


def _package() -> Any:
    return importlib.import_module(_MODULES[installed(*_MODULES) or "vllm"])


def _shuffle(codes: torch.Tensor, scale: torch.Tensor, scheme: Scheme, x_dtype: torch.dtype) -> Any:
    """The package's own layer object with weight, scale and workspace as its kernel wants them."""
    n, k = codes.shape
    layer: Any = torch.nn.Module()
    layer.input_size_per_partition, layer.output_size_per_partition = k, n
    layer.orig_dtype = x_dtype
    layer.weight = torch.nn.Parameter(codes.view(torch.float8_e4m3fn), requires_grad=False)
    rows = scale
    if scheme.block is None:
        # padded rows have a scale too, which multiplies zeros
        rows = scale.reshape(-1, 1)
        rows = torch.cat([rows, rows[-1:].expand(n - len(rows), 1)])
    name = "weight_scale" if scheme.block is None else "weight_scale_inv"
    if scheme.block is not None:
        layer.weight_block_size = list(scheme.block)
    setattr(layer, name, torch.nn.Parameter(rows.clone(), requires_grad=False))
    _package().prepare_fp8_layer_for_marlin(layer, size_k_first=False)
    return layer


BACKEND = Marlin()
