"""Scales of one granularity -> the same scales of a finer one, exactly; no code changes.

A tensor scale is a block of all rows and columns and a channel scale one row of them, so every
granularity is a grid of blocks, and a grid goes over into another one wherever each new block lies
inside one old block. Conversion between formats and tensor-parallel shards both rest on it.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from anyfp8.checkpoint.reader import LayerData
from anyfp8.problem import QTensor, Scheme


def blocks_of(scheme: Scheme, n: int, k: int) -> tuple[int, int]:
    """Rows and columns that one weight scale of a scheme covers in a weight [N, K]."""
    if scheme.block is not None:
        return scheme.block
    return (n, k) if scheme.weight == "tensor" else (1, k)


def regranulated(layer: LayerData, scheme: Scheme) -> LayerData | None:
    """The layer with the weight granularity of a scheme and that scheme's name for activations.

    Args:
        layer: canonical.
        scheme: wanted; its activation side is taken as it is.

    Returns:
        The same codes with scales repeated; None where a new block would need two old scales, or
        where a power of two is asked for and a scale is none.
    """
    n, k = layer.weight.data.shape
    scale = layer.weight.scale
    if scheme.scale_format == "ue8m0" and scheme.block is not None:
        mantissas, _ = torch.frexp(scale)
        if bool((mantissas != 0.5).any()):
            return None
    if layer.scheme.weight == scheme.weight and layer.scheme.block == scheme.block:
        return replace(layer, scheme=scheme)
    # a grid of equal scales is a single one
    if bool((scale == scale.flatten()[0]).all()):
        scale, (rows, columns) = scale.flatten()[0].reshape(1, 1), (n, k)
    else:
        rows, columns = blocks_of(layer.scheme, n, k)
    new_rows, new_columns = blocks_of(scheme, n, k)
    if (rows < n and rows % new_rows) or (columns < k and columns % new_columns):
        return None
    i = torch.arange(-(-n // new_rows)) * new_rows // rows
    j = torch.arange(-(-k // new_columns)) * new_columns // columns
    grid = scale[i][:, j].reshape(scheme.weight_scale_shape(n, k)).contiguous()
    return replace(layer, scheme=scheme, weight=QTensor(layer.weight.data, grid, scheme.block))
