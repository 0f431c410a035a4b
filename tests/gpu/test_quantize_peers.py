"""Our bytes beside those of SGLang's, vLLM's and FBGEMM's CUDA quantizers, differences explained.

ANYFP8_TEST_PEERS names the folder with their shared objects; without it nothing runs.
"""

import os

import pytest
import torch

from anyfp8 import fp8, quantize, testing
from anyfp8.tools.quantize_peers import find_peers

pytestmark = pytest.mark.gpu
# read at import: the environment is cleared of anyfp8's names before a test
FOLDER = os.environ.get("ANYFP8_TEST_PEERS")
PEERS = [p for p in find_peers(FOLDER)[0] if p.comparable] if FOLDER else []


def ours(kind, x):
    if kind == "token":
        return quantize.per_token(x)
    return quantize.per_group(x, 128, layout="tma" if kind == "group-column" else "row")


def theirs(peer, x):
    """(codes, scale) of a peer, scale shaped like ours."""
    like = ours(peer.kind, x)
    q = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    s = torch.empty_strided(like.scale.shape, like.scale.stride(), device=x.device)
    made = peer.call(x, q, s)
    q, s = made if made is not None and not isinstance(made, torch.Tensor) else (q, s)
    return q.view(torch.uint8), s.float().reshape(like.scale.shape)


@pytest.mark.skipif(not PEERS, reason="ANYFP8_TEST_PEERS names no folder of peers")
@pytest.mark.parametrize("peer", PEERS, ids=lambda p: f"{p.name} {p.kind}")
@pytest.mark.parametrize("k", [4096, 12288])
def test_scales_differ_by_an_ulp_and_codes_only_where_they_do(peer, k):
    x = testing.random_rows(257, k, device="cuda")
    q = ours(peer.kind, x)
    codes, scale = theirs(peer, x)
    # a peer may multiply by 1/448 or divide approximately: the scale's last bit
    ulps = (q.scale.contiguous().view(torch.int32) - scale.contiguous().view(torch.int32)).abs()
    assert ulps.max() <= 1
    # codes differ by one step at most, where x · (1/s) and x / s fall on two sides of a tie
    step = (codes.int() - q.codes.int()).abs()
    assert step.max() <= 1
    assert (step != 0).float().mean() < 1e-3


@pytest.mark.skipif(not PEERS, reason="ANYFP8_TEST_PEERS names no folder of peers")
@pytest.mark.parametrize("peer", PEERS, ids=lambda p: f"{p.name} {p.kind}")
def test_a_zero_row_is_zero_everywhere(peer):
    x = testing.random_rows(8, 4096, device="cuda")
    x[3] = 0
    codes, _ = theirs(peer, x)
    assert not (codes[3] & 0x7F).any()
    assert not fp8.decode(ours(peer.kind, x).codes[3]).any()
