"""`tables check --measure` without a GPU: who is raced, what loses, what is written."""

import json
from dataclasses import replace

import pytest
import torch
import typer
from typer.testing import CliRunner

from anyfp8 import cli, select
from anyfp8.device import CPU, find_device
from anyfp8.errors import DeviceError, InputError
from anyfp8.problem import Problem, Scheme
from anyfp8.select import Request
from anyfp8.select.table import Header, Row, Table, Tables, read_table, write_table
from anyfp8.tools import tables_command, tables_measure
from anyfp8.tools.gemm_contenders import Layer
from anyfp8.tools.timing import Ratio, Timing

ROW = "w8a8-channel-token"
HEAD = Header("NVIDIA H200", "a test", "2026-01-01", (("method", "by hand"),))
CONFIG = (("memory", "per_call"), ("row_by_row", False))


def ours(m, us=8.0, **changes):
    return replace(Row(ROW, 256, 384, m, "dequant", "ours", CONFIG, us), **changes)


def default(m, us=10.0, **changes):
    return replace(Row(ROW, 256, 384, m, "dequant", "default", None, us), **changes)


def timer_of(us):
    """A race in which a name takes the µs that `us` says, 10 by default, with a little noise."""

    def race(contenders, rounds=9, block_us=800.0, at_least=64):
        noise = [1 + 0.001 * (i % 3 - 1) for i in range(rounds)]
        return {
            name: Timing(us.get(name, 10.0), 0, 0, tuple(us.get(name, 10.0) * x for x in noise), 2)
            for name in contenders
        }

    return race


def measure(rows, us=None, **options):
    options = {"seed": 3, "place": "cpu", "timer": timer_of(us or {})} | options
    return tables_measure.measure(Table(HEAD, tuple(rows)), **options)


@pytest.mark.parametrize("op", ["gemm", "linear"])
def test_each_row_is_raced_through_the_look_up_and_gets_a_verdict(op):
    rows = [ours(m, op=op) for m in (1, 8, 64, 256)]
    us = {"dequant 1": 9.0, "dequant 64": 10.1, "dequant 256": 10.3}
    found = measure(rows, us).raced
    assert [entry.verdict for entry in found] == ["won", "tie", "slower", "lost"]
    assert [round(entry.ratio, 3) for entry in found] == [1.111, 1.0, 0.990, 0.971]
    assert [entry.bad for entry in found] == [False, False, False, True]
    assert found[0].default == "dequant"
    assert (found[3].us, found[3].default_us) == (10.3, 10.0)


def test_a_loss_needs_every_run():
    clear, mixed = Ratio(0.95, 0.94, 0.96), Ratio(0.96, 0.93, 1.01)
    assert tables_measure.verdict_of((clear, clear)) == "lost"
    assert tables_measure.verdict_of((clear, mixed)) == "tie"


def test_keys_that_the_default_path_serves_are_not_raced():
    outcome = measure([ours(1), default(1), ours(16, us=9.9), default(16)])
    assert [entry.row.m for entry in outcome.raced] == [1]
    assert outcome.answered == 1


def test_shapes_and_ms_choose_rows_and_none_left_is_an_error():
    rows = [ours(1), ours(16), ours(16, n=512)]
    assert [entry.row.m for entry in measure(rows, ms=(16,)).raced] == [16, 16]
    assert [e.row.n for e in measure(rows, shapes=[(512, 384)]).raced] == [512]
    for options in ({"ms": (3,)}, {"shapes": [(128, 128)]}):
        with pytest.raises(InputError, match="no row of the table is left"):
            measure(rows, **options)
    with pytest.raises(InputError):
        measure([default(1)])


def test_a_row_that_the_look_up_does_not_take_says_why():
    tile = {"block_m": 16, "block_n": 64, "block_k": 128, "num_warps": 4, "num_stages": 3}
    found = measure([ours(1, backend="triton_row", config=tuple(tile.items()))]).raced[0]
    assert found.verdict == "unreachable"
    assert "multiplies on FP8 units and cpu has none" in found.why
    assert not found.bad


def test_what_cannot_be_raced_is_skipped_with_a_reason():
    outcome = measure([ours(1, out_dtype="fp16"), ours(1, scheme="w8a16-channel"), ours(8)])
    assert len(outcome.raced) == 1
    assert [why for _, why in outcome.skipped] == [
        "only bf16 rows are raced, not fp16",
        "a weight-only scheme has no quantized operands",
    ]


def test_a_wrong_row_loses_without_a_race(monkeypatch):
    right = Layer.of_tables

    def wrong(self, name, m, tables):
        found = right(self, name, m, tables)
        return replace(found, calls=[lambda call=call: call() * 1.5 for call in found.calls])

    monkeypatch.setattr(Layer, "of_tables", wrong)
    found = measure([ours(1)]).raced[0]
    assert (found.verdict, found.bad, found.ratios) == ("wrong", True, ())
    assert "relative error" in found.why


def test_a_wrong_default_path_is_no_opponent(monkeypatch):
    right = Layer.contender

    def wrong(self, name, m):
        found = right(self, name, m)
        return replace(found, calls=[lambda: torch.zeros(m, 256, dtype=torch.bfloat16)])

    monkeypatch.setattr(Layer, "contender", wrong)
    outcome = measure([ours(1)])
    assert outcome.raced == ()
    assert len(outcome.wrong_default) == 1
    assert "the default path is wrong" in outcome.skipped[0][1]


def test_a_row_that_cannot_be_captured_is_bad_and_the_next_one_is_raced():
    plain = timer_of({})

    def race(contenders, rounds=9, block_us=800.0, at_least=64):
        if "dequant 1" in contenders:
            raise RuntimeError("operation not permitted when stream is capturing")
        return plain(contenders, rounds)

    found = measure([ours(1), ours(8)], timer=race).raced
    assert [(entry.verdict, entry.bad) for entry in found] == [("failed", True), ("tie", False)]
    assert "not permitted" in found[0].why


def test_a_table_without_its_losers_answers_default_there():
    rows = (ours(1), default(1), ours(16), ours(64))
    table = Table(HEAD, rows)
    us = {"dequant 1": 11.0, "dequant 16": 12.0, "dequant 64": 9.0}
    found = tables_measure.without(table, measure(rows, us))
    kept = [(row.m, row.role, row.us) for row in found.rows]
    # the one that had a default row keeps its figure, the other takes the measured one
    assert kept == [(1, "default", 10.0), (16, "default", 10.0), (64, "ours", 8.0)]
    checked = dict(found.header.facts)["checked"]
    assert (checked["raced"], checked["dropped"]) == (3, 2)
    assert dict(found.header.facts)["method"] == "by hand"
    tables = Tables(CPU, (("user table", found),))
    problem = Problem("linear", Scheme.parse(ROW), 16, 256, 384)
    answer = select.select(
        problem, CPU, Request(tune=True, emulate=True, accumulate="fast"), tables
    )
    assert answer.reason == "the row of M=16 says default"


def test_a_compiling_process_calls_each_row_and_outlives_what_fails(monkeypatch, capsys):
    called = []
    right = Layer.of_tables

    def counted(self, name, m, tables):
        called.append((self.shape.n, m))
        return right(self, name, m, tables)

    monkeypatch.setattr(Layer, "of_tables", counted)
    rows = [ours(1), ours(16, backend="triton_row"), ours(16, n=512), ours(8, out_dtype="fp16")]
    share = {"header": HEAD.to_dict(), "rows": [r.to_dict() for r in rows], "index": None}
    tables_measure.work(json.dumps(share))
    assert called == [(256, 1), (256, 16), (512, 16)]
    assert capsys.readouterr() == ("", "")


def command(path, us=None, **options):
    options = {"index": None, "shapes": [], "m": None, "drop": False, "to": None} | options
    options = {"seconds": 60.0, "as_json": False, "place": "cpu"} | options
    tables_command.measure_command(str(path), timer=timer_of(us or {}), **options)


@pytest.fixture
def path(tmp_path):
    where = tmp_path / "nvidia_h200.jsonl"
    write_table(where, Table(HEAD, (ours(1), ours(16))))
    return where


def test_losing_rows_fail_the_command_and_leave_the_table_alone(path, capsys):
    before = path.read_text()
    with pytest.raises(typer.Exit) as caught:
        command(path, {"dequant 16": 12.0})
    assert caught.value.exit_code == 1
    assert path.read_text() == before
    shown = capsys.readouterr()
    assert "0.833" in shown.out
    assert "worst: 256x384 M=16" in shown.out
    assert "--drop" in shown.err


def test_drop_writes_the_table_in_place_or_elsewhere(path, tmp_path, capsys):
    other = tmp_path / "kept" / "table.jsonl"
    before = path.read_text()
    command(path, {"dequant 16": 12.0}, drop=True, to=other)
    assert path.read_text() == before
    command(path, {"dequant 16": 12.0}, drop=True)
    assert path.read_text() == other.read_text()
    assert [row.role for row in read_table(path).rows] == ["ours", "default"]
    assert list(tmp_path.glob("*.tmp")) == []
    assert "written without 1 rows" in capsys.readouterr().out


def test_a_table_without_losers_is_not_written_and_says_how_to_contribute(path, capsys):
    before = path.read_text()
    command(path, {"dequant 16": 9.0}, drop=True)
    assert path.read_text() == before
    assert "contribute" in capsys.readouterr().err


def test_the_document_has_every_row(path, capsys, hold_to_schema):
    with pytest.raises(typer.Exit):
        command(path, {"dequant 16": 12.0}, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert [row["verdict"] for row in found["rows"]] == ["tie", "lost"]
    assert found["written"] is None
    hold_to_schema("tables-check", found)


def test_dropping_needs_a_race_and_a_place_to_write_needs_dropping(path):
    result = CliRunner().invoke(cli.app, ["tables", "check", "--device", str(path), "--drop"])
    assert isinstance(result.exception, InputError)
    assert "--drop" in result.exception.got
    with pytest.raises(InputError, match="--drop writes"):
        command(path, to=path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_the_way_out_is_named():
    result = CliRunner().invoke(cli.app, ["tables", "check", "--device", "h200", "--measure"])
    assert isinstance(result.exception, DeviceError)
    assert "without --measure" in result.exception.hint


def test_a_table_of_another_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(tables_measure, "device_of", lambda _: find_device("l40s"))
    with pytest.raises(DeviceError, match="NVIDIA H200") as caught:
        tables_measure.device_for(Table(HEAD, ()))
    assert "L40S" in caught.value.got
    assert tables_measure.device_for(None).name == "NVIDIA L40S"
