"""What the backends of other packages share: is it there, and layouts that their kernels take."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch


@cache
def installed(*modules: str) -> str | None:
    """The first of these modules that can be imported, or None; imports nothing."""
    for module in modules:
        try:
            if find_spec(module) is not None:
                return module
        except (ImportError, ValueError):
            continue
    return None


def packed(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where rows are apart or it does not start at a multiple of 16 bytes.

    Kernels that assume rows without gaps do not ask for the stride: they read what lies between.
    """
    if tensor.is_contiguous() and tensor.data_ptr() % 16 == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def columns_first(scale: torch.Tensor, rows_multiple: int = 1) -> torch.Tensor:
    """[M, G] -> the same values stored column by column, each padded to a multiple of rows."""
    m = scale.shape[0]
    stride = -(-m // rows_multiple) * rows_multiple
    stored = scale.new_zeros((scale.shape[1], stride))
    stored[:, :m] = scale.t()
    return stored.t()[:m]


def finished(y: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None) -> torch.Tensor:
    """y + bias in fp32, into `out` if there is one."""
    if bias is not None:
        y = (y.float() + bias.float()).to(y.dtype)
    return y if out is None else out.copy_(y)
