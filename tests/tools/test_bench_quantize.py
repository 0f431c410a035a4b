"""anyfp8 bench quantize without a GPU: what is measured is kept, whatever comes afterwards."""

import json

import pytest

from anyfp8.tools import bench_quantize as bench
from anyfp8.tools.timing import Ratio, Timing


@pytest.fixture
def measured(monkeypatch):
    """Cells instead of races; returns the list of what was asked for."""
    asked = []

    def measure(kind, k, m, peers, runs, rounds):
        asked.append((kind, k, m))
        race = {"fast": [Ratio(0.9, 0.8, 0.95), Ratio(0.92, 0.9, 0.99)], "slow": [Ratio(2, 2, 2)]}
        return bench.Cell(kind, k, m, 2.0, 900.0, 1.8, 0.9, 0.7, 2.9, 1.01, 2.1, 4, race)

    monkeypatch.setattr(bench.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench.timing, "header", lambda: {"date": "", "gpu": "", "torch": ""})
    return asked


def test_each_cell_is_in_the_file_before_the_next_one_is_raced(
    measured, monkeypatch, tmp_path, call
):
    out, real = tmp_path / "found.json", bench.measure

    def measure(kind, k, m, *rest):
        if m == 16:
            raise KeyboardInterrupt
        return real(kind, k, m, *rest)

    monkeypatch.setattr(bench, "measure", measure)
    options = ("--kinds", "token", "--k", "4096", "--m", "1,4,16,64", "--json", out)
    status, _, _ = call("bench", "quantize", *options)
    assert status
    found = json.loads(out.read_text())
    assert [cell["m"] for cell in found["cells"]] == [1, 4]
    assert found["unmeasured"] == ["token k=4096 m=16", "token k=4096 m=64"]
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]


def test_no_cell_is_begun_after_the_time_and_those_left_out_are_named(measured, monkeypatch):
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(bench.time, "monotonic", lambda: next(clock))
    found = bench.run(kinds=["group"], columns=[4096], rows=[1, 2, 4, 8], seconds=25)
    assert measured == [("group", 4096, 1), ("group", 4096, 2)]
    assert found["unmeasured"] == ["group k=4096 m=4", "group k=4096 m=8"]


def test_a_cell_is_lost_to_its_fastest_peer_where_every_run_says_so(measured):
    summary = bench.run(kinds=["token"], columns=[4096], rows=[1, 4096])["summary"]
    assert summary["worst"] == {"cell": "token k=4096 m=1", "peer": "fast", "ratio": 0.9}
    assert summary["verdicts"] == {"won": 0, "tie": 0, "lost": 2}
    assert summary["least_copy_share_m2048"] == 0.9
    assert summary["most_times_empty_m16_k4096"] == 2.9
    assert summary["geometric_means"]["token / slow"] == 2


def test_times_pair_up_within_their_round():
    a = Timing(2.0, 2.0, 2.0, (2.0, 8.0, 2.2), 64)
    b = Timing(1.0, 1.0, 1.0, (1.0, 4.0, 2.0), 64)
    assert bench._paired(a, b) == 2.0


def test_buffers_leave_the_l2_cold_or_stay_in_it():
    l2 = 60 << 20
    for m, k in ((1, 4096), (16, 12288), (64, 12288), (256, 4096), (256, 12288), (8192, 12288)):
        moved = 3 * m * k
        together = moved * bench.buffers_for(moved, l2)
        assert together >= 4 * l2 or together <= max(l2 // 4, 2 * moved)
