from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anyfp8.checkpoint.reader import LayerData
from anyfp8.checkpoint.regranulate import regranulated
from anyfp8.checkpoint.shard import partition, shard_fused, shard_layer, shard_scheme
from anyfp8.errors import InputError
from anyfp8.problem import QTensor, Scheme
from anyfp8.reference import dequantize

BLOCK = "w8a8-block128x128-group128"
SCHEMES = ("w8a8-tensor-static", "w8a8-channel-token", BLOCK, "w8a16-block1x32-ue8m0")


def layer(scheme, n, k, bias=True, seed=0):
    """A layer whose scales all differ, so that a wrong one shows."""
    scheme = Scheme.parse(scheme)
    generator = torch.Generator().manual_seed(seed)
    codes = (torch.randn(n, k, generator=generator) * 60).clamp(-448, 448)
    shape = scheme.weight_scale_shape(n, k)
    count = torch.Size(shape).numel()
    scale = (torch.randperm(count, generator=generator).float() + 1) / count
    if scheme.scale_format == "ue8m0":
        scale = 2.0 ** (torch.arange(count) % 9 - 4)
    static = torch.tensor(0.5) if scheme.activation == "tensor" else None
    return LayerData(
        "m.up_proj",
        scheme,
        QTensor(
            codes.to(torch.float8_e4m3fn).view(torch.uint8), scale.reshape(shape), scheme.block
        ),
        static,
        torch.randn(n, generator=generator) if bias else None,
    )


def values_by_hand(data):
    """codes · scale, each element's scale found by its own index."""
    codes = data.weight.codes.view(torch.float8_e4m3fn).float()
    n, k = codes.shape
    if data.scheme.block is None:
        return codes * data.weight.scale
    rows = torch.arange(n) // data.scheme.block[0]
    columns = torch.arange(k) // data.scheme.block[1]
    return codes * data.weight.scale[rows][:, columns]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("style", "ranks"), [("column", 4), ("row", 8), ("column", 3), ("row", 7)])
def test_shards_inside_scale_blocks_hold_the_values_of_the_whole(scheme, style, ranks):
    whole = layer(scheme, 320, 640)
    bounds = partition(320 if style == "column" else 640, ranks)
    parts = [shard_layer(whole, style, bounds, rank) for rank in range(ranks)]
    along = 0 if style == "column" else 1
    values = torch.cat([dequantize(part.weight) for part in parts], along)
    assert torch.equal(values, values_by_hand(whole))
    assert len({part.scheme for part in parts}) == 1
    for part in parts:
        n, k = part.weight.data.shape
        assert part.weight.scale.shape == part.scheme.weight_scale_shape(n, k)
        assert part.input_scale is whole.input_scale


def test_a_block_is_cut_only_as_fine_as_the_boundaries_need():
    scheme = Scheme.parse(BLOCK)
    assert shard_scheme(scheme, "column", partition(320, 4)).block == (16, 128)
    assert shard_scheme(scheme, "column", partition(512, 4)) == scheme
    cut = shard_scheme(scheme, "row", partition(640, 8))
    assert (cut.block, cut.group) == ((128, 16), 16)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_outputs_of_all_ranks_make_the_unsharded_output(scheme):
    whole = layer(scheme, 320, 640)
    x = torch.randn(5, 640, generator=torch.Generator().manual_seed(3))
    y = (x.double() @ values_by_hand(whole).double().T + whole.bias).float()
    for style, ranks in (("column", 4), ("row", 8)):
        bounds = partition(320 if style == "column" else 640, ranks)
        outs = []
        for rank, (start, stop) in enumerate(bounds):
            part = shard_layer(whole, style, bounds, rank)
            seen = x if style == "column" else x[:, start:stop]
            out = seen.double() @ dequantize(part.weight).double().T
            outs.append(out if part.bias is None else out + part.bias)
        total = torch.cat(outs, 1) if style == "column" else torch.stack(outs).sum(0)
        torch.testing.assert_close(total.float(), y, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_fused_layers_are_shared_out_part_by_part(scheme):
    sizes = (192, 64, 64)
    whole = layer(scheme, 320, 256)
    values = values_by_hand(whole)
    parts = [shard_fused(whole, sizes, 4, rank, unit=16) for rank in range(4)]
    for rank, part in enumerate(parts):
        rows = [torch.arange(s) for s in sizes]
        wanted, edge = [], 0
        for size in rows:
            share = len(size) // 4
            wanted += (size[rank * share : (rank + 1) * share] + edge).tolist()
            edge += len(size)
        assert torch.equal(dequantize(part.weight), values[wanted])
        assert torch.equal(part.bias, whole.bias[wanted])


@pytest.mark.parametrize(
    ("total", "ranks", "unit"), [(3, 4, 1), (576, 16, 64), (100, 2, 64), (8, 0, 1)]
)
def test_what_cannot_be_shared_out_says_how_many_ranks_would_do(total, ranks, unit):
    with pytest.raises(InputError, match="cannot share") as caught:
        partition(total, ranks, unit)
    assert "at most" in caught.value.hint


def test_uneven_shares_give_the_first_ranks_one_unit_more():
    assert partition(10, 4) == ((0, 3), (3, 6), (6, 8), (8, 10))
    assert partition(192, 2, 64) == ((0, 128), (128, 192))


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 300),
    k=st.integers(1, 300),
    ranks=st.integers(1, 9),
    style=st.sampled_from(["column", "row"]),
    scheme=st.sampled_from([*SCHEMES, "w8a16-block64x32"]),
)
def test_any_split_of_any_layer_is_exact(n, k, ranks, style, scheme):
    total = n if style == "column" else k
    if total < ranks:
        return
    whole = layer(scheme, n, k)
    bounds = partition(total, ranks)
    parts = [shard_layer(whole, style, bounds, rank) for rank in range(ranks)]
    values = [dequantize(part.weight) for part in parts]
    assert torch.equal(torch.cat(values, 0 if style == "column" else 1), values_by_hand(whole))


@pytest.mark.parametrize(
    ("source", "target", "fits"),
    [
        ("w8a16-tensor", "w8a16-channel", True),
        ("w8a16-tensor", "w8a16-block128x128", True),
        ("w8a16-channel", "w8a16-block1x32", True),
        ("w8a16-channel", "w8a16-tensor", False),
        ("w8a16-channel", "w8a16-block128x128", False),
        ("w8a16-block128x128", "w8a16-block64x32", True),
        ("w8a16-block128x128", "w8a16-block96x128", False),
        ("w8a16-block128x128", "w8a16-channel", False),
        ("w8a16-block1x32-ue8m0", "w8a16-block1x32", True),
        ("w8a16-block1x32", "w8a16-block1x32-ue8m0", False),
    ],
)
def test_finer_grids_hold_the_same_values_and_coarser_ones_are_declined(source, target, fits):
    whole = layer(source, 200, 320)
    found = regranulated(whole, Scheme.parse(target))
    assert (found is not None) == fits
    if found is not None:
        assert torch.equal(found.weight.codes, whole.weight.codes)
        assert torch.equal(values_by_hand(found), values_by_hand(whole))
