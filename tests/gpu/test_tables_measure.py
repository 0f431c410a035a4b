"""`tables check --measure` on a GPU: rows are judged and raced as the runtime serves them."""

import pytest
import torch

from anyfp8 import gemm
from anyfp8.device import device_of
from anyfp8.problem import Problem, Scheme
from anyfp8.select.table import Header, Row, Table
from anyfp8.tools import tables_measure

pytestmark = pytest.mark.gpu

N, K = 1024, 1024


@pytest.mark.parametrize("op", ["gemm", "linear"])
@pytest.mark.parametrize(
    ("scheme", "name"),
    [("w8a8-channel-token", "triton_row"), ("w8a8-block128x128-group128", "triton_block")],
)
def test_rows_of_our_kernels_are_right_and_raced(op, scheme, name):
    device, backend = device_of(torch.device("cuda")), gemm.backend(name)
    rows = []
    for m in (1, 100):
        problem = Problem(op, Scheme.parse(scheme), m, N, K, accumulate="fast")
        if backend.why_not(problem, device):
            pytest.skip("no FP8 units")
        config = tuple(backend.default_config(problem, device).to_dict().items())
        rows.append(Row(scheme, N, K, m, name, "ours", config, op=op))
    table = Table(Header(device.name), tuple(rows))
    outcome = tables_measure.measure(table, rounds=5, seconds=5, warm=False)
    assert outcome.skipped == ()
    assert [entry.row.m for entry in outcome.raced] == [1, 100]
    for entry in outcome.raced:
        assert entry.verdict in ("won", "tie", "slower", "lost")
        assert len(entry.ratios) == 2
        assert entry.us is not None
        assert 0 < entry.us < 1000
