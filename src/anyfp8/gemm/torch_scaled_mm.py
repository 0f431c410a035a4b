"""y = torch.nn.functional.scaled_mm(x, wᵀ, scales): what torch and cuBLASLt bring, no package more.

Recipes: per-tensor by per-tensor, per-token by per-channel (a single scale is repeated), and 1x128
activations by 128x128 weights on Hopper. Which of them a GPU has differs by torch, CUDA and chip,
so each is tried once, on numbers whose scales all differ, before it is used there.

The surprises: cuBLASLt reads the 128x128 scales with rows padded to a multiple of 4 and does not
notice when they are not: the result is finite and wrong. And for some per-token shapes (seen on the
H200 with torch 2.11: K >= 7168, N <= 8192, a bias, fast accumulation) it finds no kernel at all;
there the bias is added afterwards, or the sums leave the short accumulator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from anyfp8.gemm.base import Backend, CanonicalWeight, Config, PreparedWeight
from anyfp8.gemm.launch import on_device_of
from anyfp8.gemm.packages import packed
from anyfp8.gemm.probe import judged
from anyfp8.gemm.tiles import same_device
from anyfp8.problem import DTYPES, Problem, QTensor, Scheme

if TYPE_CHECKING:
    from anyfp8.device import Device


class TorchScaledMM(Backend):
    name = "torch_scaled_mm"
    kind = "w8a8"

    def __init__(self) -> None:
        # calls for which the library had no kernel -> how they are made instead
        self._detours: dict[tuple[Any, ...], int] = {}

    def why_not(self, problem: Problem, device: Device) -> str | None:
        scheme, capability = problem.scheme, device.capability
        if device.arch.fp8 != "e4m3fn":
            return f"multiplies e4m3fn on FP8 units and {device.name} has none"
        if not device.arch.features:
            # newer than the catalogue of architectures
            return f"is not known to work on {device.arch.name}: generic Triton code only"
        recipe = recipe_of(scheme)
        if recipe is None:
            return f"has no recipe for {scheme.name}"
        if problem.n % 16 or problem.k % 16:
            return f"needs N and K divisible by 16, got N={problem.n}, K={problem.k}"
        if recipe == "block" and capability != (9, 0):
            return "has 1x128 by 128x128 scales on SM90 only"
        if recipe == "block" and (problem.n % 128 or problem.k % 128):
            return f"needs whole 128x128 blocks, got N={problem.n}, K={problem.k}"
        if recipe == "row" and capability is not None and capability[0] == 12:
            # pytorch/pytorch#192707
            return "has no per-token by per-channel product on SM12x"
        if recipe == "row" and problem.out_dtype != "bf16":
            return "gives per-token by per-channel products in bf16 only"
        if problem.accumulate == "fp32_128" and capability not in ((9, 0), (10, 0), (10, 3)):
            return f"cannot be told to leave the short accumulator on {device.name}"
        return None

    def probe(self, problem: Problem, device: Device) -> str | None:
        return judged(self, problem)

    def run(
        self,
        x: torch.Tensor | QTensor,
        prepared: PreparedWeight,
        problem: Problem,
        config: Config,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x.data: [M, K] e4m3fn; rows are padded to a multiple of 4 with block scales."""
        assert isinstance(x, QTensor)
        assert isinstance(prepared, CanonicalWeight)
        out_dtype = DTYPES[problem.out_dtype]
        recipe = recipe_of(problem.scheme)
        codes = _aligned(x.codes).view(torch.float8_e4m3fn)
        m, n = codes.shape[0], prepared.codes.shape[0]
        w = prepared.codes.view(torch.float8_e4m3fn).t()
        same_device(x=codes, sx=x.scale, w=w, sw=prepared.scale, bias=bias, out=out)
        if m == 0:
            return codes.new_empty((0, n), dtype=out_dtype) if out is None else out
        sx, sw = x.scale, prepared.scale
        if recipe == "block":
            codes, sx = _padded(codes, sx)
            sw = _block_scale(sw)
        elif recipe == "row":
            sx = sx.reshape(-1, 1).expand(m, 1).contiguous()
            sw = sw.reshape(1, -1).expand(1, n).contiguous()
        # a bias in another dtype than the output's is added after the product
        inside = (
            packed(bias)
            if bias is not None and bias.dtype == out_dtype and recipe != "block"
            else None
        )
        fast = problem.accumulate == "fast" and recipe != "block"
        with on_device_of(codes):
            y, added = self._product(codes, w, sx, sw, recipe, inside, out_dtype, fast)
            y = y[:m]
            if bias is not None and not added:
                same = bias.dtype == out_dtype
                # 16-bit sums are taken in fp32 and rounded once
                y = y.add_(bias) if same else (y.float() + bias.float()).to(out_dtype)
        return y if out is None else out.copy_(y)

    def _product(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        sx: torch.Tensor,
        sw: torch.Tensor,
        recipe: str | None,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        fast: bool,
    ) -> tuple[torch.Tensor, bool]:
        """The product, and whether the bias is in it; by a detour where the library has none."""
        ways = [(bias, fast)]
        if bias is not None:
            ways.append((None, fast))
        if fast:
            ways.append((bias, False))
        key = (x.device, recipe, out_dtype, bias is None, fast, *x.shape, x.stride(0), w.shape[1])
        for number in range(self._detours.get(key, 0), len(ways)):
            inside, quick = ways[number]
            try:
                y = _multiply(x, w, sx, sw, recipe, inside, out_dtype, quick)
            except RuntimeError as error:
                if "CUBLAS_STATUS_NOT_SUPPORTED" not in str(error) or number + 1 == len(ways):
                    raise
                self._detours[key] = number + 1
            else:
                return y, inside is not None
        raise AssertionError("the last way returns or raises")


def recipe_of(scheme: Scheme) -> str | None:
    """ "tensor", "row", "block", or None where torch has no product of these scales."""
    if scheme.weight == "block" or scheme.activation == "group":
        return "block" if scheme.block == (128, 128) and scheme.group == 128 else None
    if scheme.activation == "none":
        return None
    return "tensor" if (scheme.weight, scheme.activation) == ("tensor", "tensor") else "row"


def _multiply(
    x: torch.Tensor,
    w: torch.Tensor,
    sx: torch.Tensor,
    sw: torch.Tensor,
    recipe: str | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast: bool,
) -> torch.Tensor:
    functional: Any = torch.nn.functional
    if not hasattr(functional, "scaled_mm"):
        return torch._scaled_mm(x, w, sx, sw, bias=bias, out_dtype=out_dtype, use_fast_accum=fast)
    kinds = functional.ScalingType
    of_x, of_w = {
        "tensor": (kinds.TensorWise, kinds.TensorWise),
        "row": (kinds.RowWise, kinds.RowWise),
        "block": (kinds.BlockWise1x128, kinds.BlockWise128x128),
    }[recipe or "tensor"]
    return functional.scaled_mm(
        x, w, sx, of_x, sw, of_w, bias=bias, output_dtype=out_dtype, use_fast_accum=fast
    )


def _aligned(codes: torch.Tensor) -> torch.Tensor:
    """The codes, or a copy where a row does not start at a multiple of 16 bytes or has gaps."""
    rows, columns = codes.stride()
    if columns == 1 and rows % 16 == 0 and codes.data_ptr() % 16 == 0:
        return codes
    return codes.clone(memory_format=torch.contiguous_format)


def _padded(codes: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows up to a multiple of 4, and the scale [M, K/128] stored column by column."""
    extra = -codes.shape[0] % 4
    if extra:
        rows = torch.nn.functional.pad(codes.view(torch.uint8), (0, 0, 0, extra))
        codes = rows.view(torch.float8_e4m3fn)
        scale = torch.nn.functional.pad(scale, (0, 0, 0, extra))
    return codes, scale.t().contiguous().t()


def _block_scale(scale: torch.Tensor) -> torch.Tensor:
    """[N/128, K/128] -> [K/128, N/128] with contiguous columns, K/128 padded to a multiple of 4.

    torch 2.11 asks for the padded shape, and refuses a view of its first rows.
    """
    blocks = scale.shape[1]
    if blocks % 4:
        scale = torch.nn.functional.pad(scale, (0, -blocks % 4))
    return scale.t()


BACKEND = TorchScaledMM()
