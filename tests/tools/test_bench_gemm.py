"""The GEMM benchmark without a GPU: who is judged, raced and named; the timer is a stand-in."""

import json
from dataclasses import replace

import pytest
import torch
import typer
from typer.testing import CliRunner

from anyfp8 import cli, reference
from anyfp8.errors import DeviceError, InputError
from anyfp8.linear import dispatch
from anyfp8.problem import QTensor, Scheme
from anyfp8.tools import bench_command, bench_gemm
from anyfp8.tools.gemm_operands import Operands, judge, slack
from anyfp8.tools.gemm_peers import baselines, find_peers
from anyfp8.tools.gemm_report import Cell, Other, Own, summarize, table
from anyfp8.tools.gemm_roof import Roof
from anyfp8.tools.gemm_shapes import MODELS, Shape, parse_shapes
from anyfp8.tools.timing import Ratio, Timing

ROW = Scheme("channel", "token", True)
BLOCK = Scheme("block", "group", True, block=(128, 128), group=128)
SMALL = Shape("small", 256, 384)
ROOF = Roof({"256x384": 2.0}, 1000.0, 100.0, 1.0)


def timer_of(us):
    """A race in which a name takes the µs that `us` says, 10 by default."""

    def race(contenders, rounds=9, block_us=800.0, at_least=64):
        return {
            name: Timing(us.get(name, 10.0), 0, 0, (us.get(name, 10.0),) * rounds, len(calls))
            for name, calls in contenders.items()
        }

    return race


def run(op, us=None, **options):
    options = {"ms": (1, 80), "seed": 3, "warm": False} | options
    timer = timer_of(us or {})
    return bench_gemm.run(op, [SMALL], place="cpu", roof=ROOF, timer=timer, **options)


def cell(m, us=10.0, others=(), among=(), wrong=(), **changes):
    own = Own("selection", "triton_row", {}, "ranker", "", us, 1.0, 2.0, 0.5, 0.001)
    plain = Cell(
        "gemm", "qkv", 6144, 4096, m, ROW.name, "fast", 4, 9, 5.0, (own,), tuple(others),
        dict(among), dict(wrong), (), {},
    )  # fmt: skip
    return replace(plain, **changes)


def other(name, first, second=None, beside=""):
    ratios = tuple(Ratio(v, v - 0.01, v + 0.01) for v in (first, second or first))
    return Other(name, 10.0, 0.001, beside, {"selection": ratios})


@pytest.mark.parametrize("op", ["gemm", "linear"])
@pytest.mark.parametrize("scheme", [ROW, Scheme("tensor", "tensor"), BLOCK], ids=lambda s: s.name)
def test_ours_is_judged_right_on_fresh_data(op, scheme):
    result = run(op, scheme=scheme)
    assert [c.m for c in result["cells"]] == [1, 80]
    for c in result["cells"]:
        assert not c.wrong
        assert [own.name for own in c.ours] == ["selection", "kill switch"]
        assert all(0 < own.error < 0.005 for own in c.ours)


def test_thousands_of_rows_are_judged_by_the_bytes_of_our_own_quantizer():
    found = run("linear", ms=(4096,))["cells"][0]
    assert not found.wrong
    assert {"torch row fast", "torch row slow"} <= {o.name for o in found.others}


def test_figures_follow_from_the_time_and_the_roof():
    found = run("gemm", {"selection": 4.0, "kill switch": 5.0})["cells"][1]
    own = found.ours[0]
    assert own.tflops == pytest.approx(2 * 80 * 256 * 384 / 4e-6 / 1e12)
    moved = 256 * 384 + 80 * 384 + 2 * 80 * 256
    assert own.gbps == pytest.approx(moved / 4e-6 / 1e9)
    floor = 2.0 + (80 * 384 + 2 * 80 * 256) / 1000 / 1e3
    assert own.roof_share == pytest.approx(floor / 4.0)
    assert [r.value for r in found.among["kill switch / selection"]] == [1.25, 1.25]


def test_a_linear_reads_two_bytes_of_each_activation():
    ours = [run(op)["cells"][1].ours[0] for op in ("gemm", "linear")]
    assert (ours[1].gbps - ours[0].gbps) * 10e-6 * 1e9 == pytest.approx(80 * 384)


def test_kill_switch_alone_is_one_contender():
    assert [o.name for o in run("linear", kill_switch="on")["cells"][0].ours] == ["kill switch"]
    with pytest.raises(InputError, match="kill switch"):
        run("linear", kill_switch="maybe")


def test_each_backend_that_refuses_says_why():
    found = run("linear", all_backends=True)["cells"][0]
    assert found.failed["triton_row"] == "multiplies on FP8 units and cpu has none"
    assert "dequant" not in found.failed


def test_a_wrong_result_has_no_number_and_fails_the_command(monkeypatch, tmp_path):
    right = dispatch.linear

    def wrong(x, *rest, **options):
        y = right(x, *rest, **options)
        y[-1, 5] *= 1000
        return y

    monkeypatch.setattr(dispatch, "linear", wrong)
    found = run("linear")["cells"][0]
    assert found.ours == ()
    assert set(found.wrong_ours) == {"selection", "kill switch"}
    assert "relative error" in found.wrong["selection"]
    with pytest.raises(typer.Exit) as caught:
        command("linear", out=tmp_path / "lines.jsonl")
    assert caught.value.exit_code == 1


def command(op, out):
    bench_command.multiply_command(
        op, shapes=["256,384"], m="80,1", scheme=ROW.name, accumulate="auto", kill_switch="both",
        all_backends=False, peers=None, slow_peers=False, seconds=60, rounds=9, seed=1, warm=False,
        out=out, place="cpu", roof=ROOF, timer=timer_of({}),
    )  # fmt: skip


def test_json_lines_hold_header_cells_and_summary(tmp_path, capsys, hold_to_schema):
    command("gemm", tmp_path / "lines.jsonl")
    lines = [json.loads(text) for text in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert [entry["kind"] for entry in lines] == ["header", "cell", "cell", "summary"]
    assert {"gpu", "driver", "clocks_mhz", "torch", "triton", "anyfp8", "seed", "roof"} <= set(
        lines[0]
    )
    assert [entry["m"] for entry in lines[1:3]] == [1, 80]
    hold_to_schema("bench-gemm", lines[1])
    assert lines[1]["ours"][0]["interval_us"] == [10.0, 10.0]
    assert all(set(o["verdicts"].values()) <= {"tie", "beside"} for o in lines[1]["others"])
    assert lines[0]["missing"] == {"all": "no folder of peers was given"}
    shown = capsys.readouterr().out
    assert "256x384" in shown
    assert "not_slower_than_torch" in shown


def test_json_lines_on_stdout_replace_the_table(capsys):
    command("gemm", out="-")
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(text)["kind"] for text in lines] == ["header", "cell", "cell", "summary"]


def test_exact_products_are_those_of_the_dequantized_operands():
    operands = Operands(256, 384, 8, "cpu", 0, copies=2)
    for weight, activation in (("channel", "token"), ("block", "group"), ("tensor", "tensor")):
        first, second = operands.weights(weight)
        assert first.data.data_ptr() != second.data.data_ptr()
        q = operands.activations(activation)
        w = reference.dequantize(QTensor(second.data, second.scale, second.block))
        want = reference.dequantize(q).double() @ w.double().T
        torch.testing.assert_close(operands.exact(weight, activation).y, want.float())
    scale = operands.weights("channel")[0].scale
    assert torch.equal(scale, scale.bfloat16().float())


def test_one_lost_row_column_or_element_is_found_among_thousands():
    operands = Operands(4096, 128, 512, "cpu", 0, copies=1)
    exact = operands.exact("channel", "token")
    y = exact.y.bfloat16()
    allowed = slack("fast", 4096, own_quantizer=True)
    assert judge(y, exact, 512, allowed)[1] == ""
    assert judge(y[:7], exact, 7, allowed)[1] == ""
    for place, complaint in (
        ((slice(77, 78), slice(None)), "row 77"),
        ((slice(None), slice(9, 10)), "column 9"),
    ):
        lost = y.clone()
        lost[place] *= 1.1
        assert complaint in judge(lost, exact, 512, allowed)[1]
    lost = y.clone()
    lost[3, 3] = float("nan")
    assert judge(lost, exact, 512, allowed)[1] == "1 elements are not finite"
    assert "relative error" in judge(y * 1.03, exact, 512, allowed)[1]
    assert "shape" in judge(y[:6], exact, 7, allowed)[1]


@pytest.mark.parametrize(
    ("name", "scheme", "accumulate", "why"),
    [
        ("torch row fast", ROW, "fast", ""),
        ("torch row slow", ROW, "fast", "accumulates fp32_128"),
        ("torch row fast", ROW, "fp32_128", "accumulates fast"),
        ("torch row slow", ROW, "fp32_128", ""),
        ("torch tensor fast", ROW, "fast", "tensor weight scales"),
        ("torch row fast", Scheme("tensor", "tensor"), "fast", ""),
        ("torch tensor fast", Scheme("tensor", "tensor"), "fast", ""),
        ("torch block", BLOCK, "fast", ""),
        ("torch row fast", BLOCK, "fast", "channel weight scales"),
        ("torch block", ROW, "fast", "block weight scales"),
        ("torch bf16", ROW, "fast", "16-bit weights"),
        ("torch row fast", Scheme("channel"), "fast", "quantizes activations"),
    ],
)
def test_only_like_is_raced_with_like(name, scheme, accumulate, why):
    peer = next(p for p in baselines() if p.name == name and p.op == "linear")
    assert peer.beside(scheme, accumulate) == why


def test_what_is_beside_counts_neither_as_worst_nor_as_lost():
    beside = other("torch tensor fast", 0.5, beside="tensor weight scales")
    summary = summarize([cell(1, others=[beside, other("torch row fast", 1.2)])])
    assert summary["worst"]["other"] == "torch row fast"
    assert summary["not_slower_than_torch"]["holds"]
    assert summary["geometric_means"]["torch tensor fast (tensor weight scales)"] == 0.5


def test_summary_names_the_worst_cell_first():
    cells = [
        cell(1, others=[other("torch row fast", 1.3), other("vllm", 0.97)]),
        cell(8, others=[other("torch row fast", 1.1), other("vllm", 0.9)]),
    ]
    summary = summarize(cells)
    assert next(iter(summary)) == "worst"
    worst = {"cell": "gemm qkv m=8", "other": "vllm", "ratio": 0.9, "verdict": "lost"}
    assert {k: v for k, v in summary["worst"].items() if k != "ours"} == worst
    assert summary["against_the_fastest_raced"] == {"won": 0, "tie": 0, "lost": 2}
    assert summary["geometric_means"]["torch row fast"] == pytest.approx(1.196, abs=1e-3)


def test_a_linear_shows_its_quantizer_alone_and_a_product_does_not():
    linear, product = (run(op, {"quantizer alone": 2.5})["cells"][0] for op in ("linear", "gemm"))
    assert (linear.quantize_us, product.quantize_us) == (2.5, None)
    assert "quantizer alone" not in linear.failed
    assert run("linear", scheme=Scheme("channel"))["cells"][0].quantize_us is None


def test_the_summary_tells_whether_fp8_weight_only_or_bf16_is_fastest():
    def linear(m, fp8, weight_only, bf16):
        own = Own("selection", "triton_row", {}, "ranker", "", fp8, 1.0, 2.0, 0.5, 0.001)
        other_own = replace(own, name="triton_w8a16", backend="triton_w8a16", us=weight_only)
        beside = replace(other("torch bf16", 1.0, beside="16-bit weights"), us=bf16)
        return cell(m, ours=(own, other_own), others=[beside], op="linear")

    cells = [linear(1, 10.0, 9.0, 14.0), linear(16, 10.0, 11.0, 14.0), linear(64, 12.0, 15.0, 11.0)]
    assert summarize(cells)["fastest"] == {
        "cells": {"weight-only": 1, "fp8": 1, "bf16": 1},
        "not_fp8": [
            {"cell": "linear qkv m=1", "kind": "weight-only", "fp8_takes": 1.111},
            {"cell": "linear qkv m=64", "kind": "bf16", "fp8_takes": 1.091},
        ],
    }
    assert "fastest" not in summarize([cell(1)])


def test_lost_needs_both_runs():
    both, one = other("torch row fast", 0.9), other("torch row fast", 0.9, 1.02)
    assert summarize([cell(1, others=[one])])["not_slower_than_torch"]["holds"]
    found = summarize([cell(1, others=[one]), cell(8, others=[both])])["not_slower_than_torch"]
    assert not found["holds"]
    assert found["slower"] == [{"cell": "gemm qkv m=8", "other": "torch row fast", "ratio": 0.9}]


def test_a_cell_without_torch_proves_nothing():
    cells = [cell(1, others=[other("torch row fast", 1.2)]), cell(8, others=[other("vllm", 1.2)])]
    found = summarize(cells)["not_slower_than_torch"]
    assert not found["holds"]
    assert found["not_compared"] == ["gemm qkv m=8"]


def test_summary_of_nothing_is_still_one():
    summary = summarize([])
    assert summary["worst"] is None
    assert not summary["not_slower_than_torch"]["holds"]


def test_table_shows_a_cell_whose_result_was_wrong():
    cells = [
        cell(1, others=[other("torch row fast", 1.2), other("vllm cutlass", 0.9)]),
        cell(8, ours=(), wrong={"selection": "relative error 1"}),
    ]
    _, _, first, second = table(cells).splitlines()
    assert "1.20 won" in first
    assert "0.90 lost" in first
    assert second.split()[:3] == ["qkv", "8", "-"]


def test_rounds_shrink_with_the_time_left_and_never_vanish():
    now = [0.0]
    budget = bench_gemm.Budget(10.0, 10, clock=lambda: now[0])
    assert budget.rounds(15, 0.01) == 15
    assert budget.rounds(15, 0.05) == 10
    now[0] = 9.0
    budget.finished(0.5)
    assert budget.rounds(15, 0.01) == bench_gemm.MIN_ROUNDS
    now[0] = 50.0
    assert budget.rounds(15, 0.01) == bench_gemm.MIN_ROUNDS


def test_spent_budget_still_judges_and_times_every_cell():
    result = run("gemm", seconds=-100.0)
    assert [c.rounds for c in result["cells"]] == [bench_gemm.MIN_ROUNDS] * 2
    assert all(c.ours for c in result["cells"])
    assert result["summary"]["fewest_rounds"] == bench_gemm.MIN_ROUNDS


def test_peers_that_do_not_load_are_missing_with_a_reason(tmp_path):
    peers, missing = find_peers(tmp_path, slow=True)
    assert peers == []
    assert set(missing) == {"sglang-kernel", "vllm", "fbgemm", "deep_gemm", "gemlite"}
    assert "sglC.so" in missing["sglang-kernel"]
    assert "minutes" in find_peers(tmp_path)[1]["gemlite"]


def test_a_peer_that_refuses_is_left_out_with_its_reason(monkeypatch):
    def refuse(operands):
        raise RuntimeError("not this shape\nmore")

    peer = replace(baselines()[0], name="stubborn", make=refuse)
    monkeypatch.setattr(bench_gemm, "find_peers", lambda *_: ([peer], {}))
    found = run(peer.op)
    assert found["cells"][0].failed["stubborn"] == "not this shape"
    assert found["summary"]["failed"]["stubborn"] == {"cells": 2, "why": "not this shape"}


def test_whoever_cannot_be_timed_is_dropped_and_the_rest_is_raced(monkeypatch):
    plain = timer_of({})

    def race(contenders, rounds=9, block_us=800.0, at_least=64):
        if "torch row fast" in contenders:
            raise RuntimeError("operation not permitted when stream is capturing")
        return plain(contenders, rounds, block_us, at_least)

    found = bench_gemm.run(
        "gemm", [SMALL], ms=(1,), place="cpu", roof=ROOF, timer=race, warm=False, seed=0
    )["cells"][0]
    assert "cannot be timed: operation not permitted" in found.failed["torch row fast"]
    assert [own.name for own in found.ours] == ["selection", "kill switch"]


def test_a_call_of_ours_that_raises_counts_as_wrong(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("out of resources: shared memory")

    monkeypatch.setattr(dispatch, "linear", broken)
    result = run("linear")
    assert result["cells"][0].wrong["selection"] == "out of resources: shared memory"
    assert result["summary"]["ours_wrong"] == 2


def test_a_wrong_peer_is_named_and_does_not_fail_the_command(monkeypatch):
    def make(operands):
        return lambda m: [lambda: torch.zeros(m, operands.n, dtype=torch.bfloat16)]

    peer = replace(baselines()[0], name="zeros", op="gemm", make=make)
    monkeypatch.setattr(bench_gemm, "find_peers", lambda *_: ([peer], {}))
    found = run("gemm")
    assert "zeros" in found["cells"][0].wrong
    assert all(o.name != "zeros" for o in found["cells"][0].others)
    assert found["summary"]["ours_wrong"] == 0


def test_shapes_are_models_or_pairs():
    assert parse_shapes(["qwen3-8b"]) == list(MODELS["qwen3-8b"])
    assert [(s.n, s.k) for s in parse_shapes(["6144,4096 256x384", "128,128"])] == [
        (6144, 4096),
        (256, 384),
        (128, 128),
    ]
    for text in ("gpt-9", "6144", "6144,100", "1,2,3", "-128,128", "0,128"):
        with pytest.raises(InputError):
            parse_shapes([text])


def test_schemes_that_cannot_be_raced_are_refused():
    for op, name in (
        ("gemm", "w8a16-channel"),
        ("linear", "w8a8-tensor-dynamic"),
        ("linear", "w8a8-block64x32-group32"),
    ):
        with pytest.raises(InputError):
            run(op, scheme=Scheme.parse(name))


def test_weight_only_layers_are_judged_with_unquantized_activations():
    found = run("linear", scheme=Scheme("channel"))["cells"][1]
    assert not found.wrong
    assert found.ours[0].error < 0.003
    assert "torch bf16" in {o.name for o in found.others} | set(found.failed)


@pytest.mark.parametrize("text", ["", "0", "1,x", "-1"])
def test_rows_must_be_positive_integers(text):
    with pytest.raises(InputError, match="--m"):
        bench_command.integers(text, "--m")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("verb", ["quantize", "gemm", "linear"])
def test_without_a_gpu_nothing_is_timed(verb):
    result = CliRunner().invoke(cli.app, ["bench", verb])
    assert isinstance(result.exception, DeviceError)
    assert "no CUDA GPU" in str(result.exception)
