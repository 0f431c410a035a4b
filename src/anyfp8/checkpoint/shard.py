"""One linear -> its part on a tensor-parallel rank, for any number of ranks.

Column-parallel layers keep a run of rows of W (outputs), row-parallel ones a run of columns
(inputs); their outputs are added up, so only rank 0 keeps the bias.

The surprise: a run may start inside a scale block (80 rows of blocks of 128). The grid is then cut
finer, to the largest block that every boundary respects, by repeating scales: exact, no padding,
and the same scheme on every rank. Activation groups follow, so W8A8 groups of such layers are
finer than the checkpoint's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import gcd

import torch

from anyfp8.checkpoint.reader import LayerData, merge_layers
from anyfp8.checkpoint.regranulate import regranulated
from anyfp8.errors import InputError
from anyfp8.problem import QTensor, Scheme

STYLES = ("column", "row")


def partition(total: int, ranks: int, unit: int = 1) -> tuple[tuple[int, int], ...]:
    """(start, stop) of every rank: whole units, the first ranks one more where it doesn't divide.

    Args:
        total: rows or columns to share out.
        ranks: how many ranks.
        unit: what must stay together, such as the rows of an attention head.

    Raises:
        InputError: fewer units than ranks, or a total that is not whole units.
    """
    units, rest = divmod(total, unit)
    if ranks < 1 or rest or units < ranks:
        raise InputError(
            f"cannot share {total} among {ranks} ranks",
            got=f"{total} = {units} x {unit}" + (f" + {rest}" if rest else ""),
            want=f"whole units of {unit} and at least one for every rank",
            hint=f"use at most {max(units, 1)} ranks",
        )
    bounds = [unit * (units // ranks * r + min(r, units % ranks)) for r in range(ranks + 1)]
    return tuple(pairwise(bounds))


def shard_scheme(scheme: Scheme, style: str, bounds: Sequence[tuple[int, int]]) -> Scheme:
    """The scheme of every rank's part: the checkpoint's, with a block that all boundaries respect.

    Args:
        style: "column" or "row". bounds: of `partition`.
    """
    if scheme.block is None:
        if style == "column" or scheme.group is None:
            return scheme
        return replace(scheme, group=gcd(scheme.group, *(start for start, _ in bounds)))
    rows, columns = scheme.block
    starts = [start for start, _ in bounds]
    if style == "column":
        return replace(scheme, block=(gcd(rows, *starts), columns))
    group = None if scheme.group is None else gcd(scheme.group, *starts)
    return replace(scheme, block=(rows, gcd(columns, *starts)), group=group)


def shard_layer(
    layer: LayerData, style: str, bounds: Sequence[tuple[int, int]], rank: int
) -> LayerData:
    """A rank's part of a linear, in memory of its own.

    Args:
        layer: canonical, whole.
        style: "column" (rows of W) or "row" (columns of W).
        bounds: of `partition` over N or K.
        rank: whose part.

    Raises:
        InputError: another style, or bounds that don't cover the layer.
    """
    n, k = layer.weight.data.shape
    total = n if style == "column" else k
    if style not in STYLES or not bounds or bounds[-1][1] != total or not 0 <= rank < len(bounds):
        raise InputError(
            f"cannot shard {layer.name} of {n}x{k}",
            got=f"style {style!r}, rank {rank} of bounds {list(bounds)}",
            want=f"one of {STYLES} and bounds that end at its rows or columns",
        )
    fine = regranulated(layer, shard_scheme(layer.scheme, style, bounds))
    # a divisor of the block always fits
    assert fine is not None
    start, stop = bounds[rank]
    codes, scale, block = fine.weight.codes, fine.weight.scale, fine.scheme.block
    along = 0 if style == "column" else 1
    if block is not None:
        width = block[along]
        scale = scale.narrow(along, start // width, -(-stop // width) - start // width)
    elif along == 0 and scale.ndim:
        scale = scale[start:stop]
    bias = layer.bias
    if bias is not None:
        bias = bias[start:stop].clone() if along == 0 else (bias if rank == 0 else None)
    weight = codes.narrow(along, start, stop - start)
    return replace(
        fine,
        weight=QTensor(
            weight.clone(memory_format=torch.contiguous_format),
            scale.clone(memory_format=torch.contiguous_format),
            block,
        ),
        bias=bias,
    )


def shard_fused(
    layer: LayerData, sizes: Sequence[int], ranks: int, rank: int, unit: int = 1
) -> LayerData:
    """A rank's part of a column-parallel linear that is several stacked (q/k/v, gate/up).

    Each part is shared out by itself and the rank's pieces are stacked again.

    Args:
        sizes: rows of each part. ranks, rank: of the group. unit: see `partition`.

    Raises:
        InputError: sizes that don't add up to N, or a part that cannot be shared out.
    """
    n = layer.weight.data.shape[0]
    if sum(sizes) != n:
        raise InputError(
            f"cannot shard {layer.name}", got=f"parts {list(sizes)}", want=f"rows that make {n}"
        )
    edges = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    cuts = [
        tuple((edge + start, edge + stop) for start, stop in partition(size, ranks, unit))
        for edge, size in zip(edges, sizes, strict=False)
    ]
    starts = [bound for part in cuts for bound in part]
    # every piece is cut from the same grid, so that they can be stacked
    height = gcd(*(start for start, _ in starts), *(stop for _, stop in starts[:-1]))
    fine = layer
    if layer.scheme.block is not None:
        block = (gcd(layer.scheme.block[0], height), layer.scheme.block[1])
        finer = regranulated(layer, replace(layer.scheme, block=block))
        assert finer is not None
        fine = finer
    pieces = [_rows(fine, *part[rank]) for part in cuts]
    merged = merge_layers(layer.name, pieces).layer
    return replace(merged, extras=layer.extras)


def _rows(layer: LayerData, start: int, stop: int) -> LayerData:
    scale, block = layer.weight.scale, layer.scheme.block
    if block is not None:
        scale = scale[start // block[0] : -(-stop // block[0])]
    elif scale.ndim:
        scale = scale[start:stop]
    bias = None if layer.bias is None else layer.bias[start:stop]
    return replace(
        layer, weight=QTensor(layer.weight.codes[start:stop], scale, block), bias=bias, extras={}
    )
