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
    step = (codes.int() - q.codes.int()).abs()
    assert step.max() <= 1
    # 448 · x / amax of 8-bit x and amax is a tie in a few values of a thousand: every such tie may
    # fall either way with the last bits of scale, inverse and product, four ulp at most together.
    # SGLang's per_token multiplies by 1/448: 0.0011 of the codes at K = 4096, 0.0016 at 12288
    different = step != 0
    per_row = x.view(257, -1, k if peer.kind == "token" else 128)
    exact = per_row.double() * 448 / per_row.abs().amax(-1, keepdim=True).double()
    exact = exact.view(257, k)[different]
    tie = (fp8.decode(codes[different]).double() + fp8.decode(q.codes[different]).double()) / 2
    assert ((exact - tie).abs() <= exact.abs() * 2**-21).all()


@pytest.mark.skipif(not PEERS, reason="ANYFP8_TEST_PEERS names no folder of peers")
@pytest.mark.parametrize("peer", PEERS, ids=lambda p: f"{p.name} {p.kind}")
def test_a_zero_row_is_zero_but_where_a_peer_divides_by_its_scale_of_zero(peer):
    x = testing.random_rows(8, 4096, device="cuda")
    x[3] = 0
    q = ours(peer.kind, x)
    assert not (q.codes[3] & 0x7F).any()
    assert (q.scale[3] > 0).all()
    codes, scale = theirs(peer, x)
    if (peer.name, peer.kind) == ("sglang per_token", "token"):
        # 0 · (1 / 0) is NaN, which its clamp turns into 448; times the scale of zero it is 0 again
        assert (codes[3] == 0x7E).all()
        assert not scale[3].any()
    else:
        assert not (codes[3] & 0x7F).any()
