"""What lanes past the last row of the activations do, by what memory there is."""

import pytest
import torch

from anyfp8.gemm.tiles import past_of


@pytest.mark.parametrize(
    ("m", "block_m", "want"), [(16, 16, "read"), (1, 16, "skip"), (17, 16, "clamp")]
)
def test_memory_that_ends_with_the_last_row_is_not_left(m, block_m, want):
    assert past_of(torch.zeros(m, 48, dtype=torch.uint8), block_m) == want


@pytest.mark.parametrize(("m", "block_m"), [(1, 16), (17, 16), (33, 64)])
def test_rows_that_the_quantizer_padded_are_read(m, block_m):
    whole = torch.zeros(64, 48, dtype=torch.uint8)
    assert past_of(whole[:m], block_m) == "read"
    # the last row of the tile ends one byte after the memory does
    assert past_of(whole.view(-1)[1:].as_strided((m, 48), (48, 1), 1), 64) != "read"


def test_a_stride_of_its_own_is_followed():
    wide = torch.zeros(16, 64, dtype=torch.uint8)
    assert past_of(wide[:3, :48], 16) == "read"
    assert past_of(wide[2:3, :48], 16) == "skip"
    assert past_of(wide[:1].expand(3, 64), 16) == "skip"
