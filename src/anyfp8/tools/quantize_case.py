"""A named input for the quantizers, what the reference makes of it, and how a group's is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from anyfp8 import fp8, quantize, reference, testing
from anyfp8.problem import QTensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Case:
    """One input and the two ways to quantize it.

    Attributes:
        name: an id such as "token-m17-k576-bf16".
        x: makes the input, on the CPU.
        kernel: quantizes it where it lies.
        reference: quantizes it with plain PyTorch, on the CPU.
        slow: takes the interpreter more than a second or two.
    """

    name: str
    x: Callable[[], torch.Tensor]
    kernel: Callable[[torch.Tensor], QTensor]
    reference: Callable[[torch.Tensor], QTensor]
    slow: bool = False


def name_of(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]


def rows_of(m: int, k: int, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    """Makes random x [m, k]."""
    return lambda: testing.random_rows(m, k, dtype)


def grouped(x: torch.Tensor, group: int, layout: str, ue8m0: bool, fmt: fp8.Format) -> QTensor:
    """The reference's groups, their scales in one of `reference.SCALE_LAYOUTS`."""
    q = reference.quantize_per_group(x, group, ue8m0 or layout == "packed", fmt)
    scale = reference.arrange_scale(q.scale, layout)
    return QTensor(q.data, scale, (1, group), fmt, layout == "packed")


def group_case(
    name: str,
    x: Callable[[], torch.Tensor],
    group: int,
    layout: str = "row",
    ue8m0: bool = False,
    fmt: fp8.Format = fp8.E4M3FN,
    slow: bool = False,
) -> Case:
    """Groups of a row, of one size, layout and format."""
    return Case(
        name,
        x,
        lambda x: quantize.per_group(x, group, layout=layout, ue8m0=ue8m0, fmt=fmt),
        lambda x: grouped(x, group, layout, ue8m0, fmt),
        slow,
    )
