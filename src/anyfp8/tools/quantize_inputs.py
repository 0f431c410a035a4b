"""Inputs that break quantizers or pin their bytes down, for the cases and the tests."""

from __future__ import annotations

import torch

from anyfp8 import testing


def move(x: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """x on another device with the same strides, padding included."""
    flat = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    return flat.to(device).as_strided(x.shape, x.stride(), x.storage_offset())


def odd_rows(dtype: torch.dtype, k: int = 256) -> torch.Tensor:
    """Rows that break quantizers: zeros, infinities, NaN, subnormals, one giant, one tiny value."""
    x = testing.random_rows(16, k, dtype)
    huge = torch.finfo(dtype).max
    x[0] = 0
    x[1, :4] = torch.tensor([1.0, 2.0, float("inf"), 4.0])
    x[2, :4] = torch.tensor([1.0, 2.0, float("nan"), 4.0])
    x[3, :4] = torch.tensor([1.0, 2.0, float("-inf"), float("nan")])
    x[4] = float("inf")
    x[5] = float("nan")
    x[6] = 1e-38
    x[7] = 9.2e-41
    x[8] = 1e-12
    x[9] = 1.0
    x[9, 7] = 1e-38
    x[10] = huge
    x[11] = -0.0
    x[12, 1:] = 0
    x[13] = torch.finfo(dtype).tiny
    x[14, 5] = huge
    return x


def largest_anywhere(k: int, dtype: torch.dtype) -> torch.Tensor:
    """[k, k] whose row r has its largest value in column r; no other is less than 0.6 of it."""
    generator = torch.Generator().manual_seed(k)
    x = 0.6 + 0.3 * torch.rand(k, k, generator=generator)
    x.fill_diagonal_(1.0)
    return torch.where(torch.rand(k, k, generator=generator) < 0.5, x, -x).to(dtype)


def nan_anywhere(k: int, dtype: torch.dtype) -> torch.Tensor:
    """[k, k] whose row r has NaN in column r and an infinity in one other; both signs of each."""
    x = testing.random_rows(k, k, dtype)
    row = torch.arange(k)
    x[row, (5 * row + 1) % k] = torch.where(row % 2 == 0, torch.inf, -torch.inf).to(dtype)
    x[row, row] = torch.where(row % 4 < 2, torch.nan, -torch.nan).to(dtype)
    return x


def exact_rows(m: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """[m, k] small integers times a power of two a row: their squares add up exactly in fp32."""
    generator = torch.Generator().manual_seed(m * 131 + k)
    values = torch.randint(-8, 9, (m, k), generator=generator).float()
    return (values * torch.exp2(torch.arange(m)[:, None] % 12 - 6.0)).to(dtype)


def norm_weight(k: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    return testing.random_rows(1, k, dtype, seed=7)[0].to(device)
