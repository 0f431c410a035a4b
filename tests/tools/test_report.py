"""Pages and comparisons of runs: their figures are the file's, and a change is more than noise."""

import json
import math
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from anyfp8 import cli
from anyfp8.errors import InputError
from anyfp8.tools import bench_command, bench_decode, report_command, report_plot
from anyfp8.tools.bench_quantize import Cell as QuantizeCell
from anyfp8.tools.decode_shapes import Decoder
from anyfp8.tools.report import Run
from anyfp8.tools.report_compare import compare
from anyfp8.tools.report_html import page, refusals, rivals, worst
from anyfp8.tools.report_read import read_run, run_of
from anyfp8.tools.timing import Ratio, Timing

ROOT = Path(__file__).parents[2]
BASELINES = ROOT / "benchmarks" / "baselines"
LINEAR = BASELINES / "nvidia_h200-linear.jsonl"
TABLE = ROOT / "src" / "anyfp8" / "select" / "tables" / "nvidia_h200.jsonl"


def documents(path=LINEAR):
    return [json.loads(line) for line in path.read_text().splitlines()]


def plain(lines=None):
    """The baseline as if no interval of a time had been kept."""
    lines = lines or documents()
    for cell in lines[1:-1]:
        cell.pop("quantize_us", None)
        for entry in (*cell["ours"], *cell["others"]):
            entry.pop("interval_us", None)
    return lines


def run_in(lines):
    return run_of(Path("run.jsonl"), lines)


def timer(contenders, rounds=9, block_us=800.0, at_least=1):
    return {
        name: Timing(10.0 + i, 0, 0, (10.0 + i,) * rounds, 1) for i, name in enumerate(contenders)
    }


@pytest.fixture(scope="module")
def decode_lines():
    lines = []
    shape = Decoder("tiny", 256, 384, 4, 2, 64, 5, 100)
    options = {"batches": (1, 4), "context": 8, "prefill": 4, "seed": 1, "layers": 1}
    bench_decode.run(shape, place="cpu", timer=timer, sink=lines.append, **options)
    return json.loads(json.dumps(lines))


@pytest.fixture
def quantize_document():
    from dataclasses import asdict

    peers = {"sglang token": [Ratio(1.2, 1.1, 1.3), Ratio(1.1, 1.05, 1.2)]}
    cells = [
        QuantizeCell(
            "token", 4096, m, 2.0, 900.0, 1.8, 0.9, 1.0, 2.0, 1.01, 2.1, 4, peers,
            {"sglang token": 2.3}, {"gemlite": "refused"},
        )
        for m in (1, 64)
    ]  # fmt: skip
    header = {name: documents()[0][name] for name in ("gpu", "torch", "date", "clocks_mhz")}
    found = {
        "header": header, "protocol": {}, "missing": {"vllm": "not there"},
        "cells": [asdict(cell) for cell in cells], "unmeasured": ["group k=4096 m=1"],
        "summary": {},
    }  # fmt: skip
    return json.loads(json.dumps(found))


class Tables(HTMLParser):
    """Every cell of the tables with figures: (panel, x, name) -> attributes and text."""

    def __init__(self, text):
        super().__init__()
        self.found, self._panel, self._x, self._now = {}, "", None, None
        self.tags, self.links = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.tags.append(tag)
        self.links += [v for k, v in attributes if k in ("src", "href") and v[0] != "#"]
        if tag == "section":
            self._panel = found.get("id", "")
        if tag == "tr":
            self._x = found.get("data-x")
        if "data-ratio" in found and self._now is not None:
            self._now["data-ratio"] = found["data-ratio"]
        if tag in ("td", "th"):
            self._now = None
            name = found.get("data-name") or ("floor" if "data-floor" in found else None)
            if self._x is not None and name is not None:
                self._now = found | {"text": ""}
                self.found[self._panel, int(self._x), name] = self._now

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self._now = None

    def handle_data(self, data):
        if self._now is not None:
            self._now["text"] += f" {data.strip()}"


def test_every_figure_of_the_tables_is_the_files():
    lines = [entry for entry in documents() if entry["kind"] == "cell"]
    shapes = list(dict.fromkeys(cell["shape"] for cell in lines))
    found = Tables(page(read_run(LINEAR))).found
    count = 0
    for cell in lines:
        panel, first = f"p{shapes.index(cell['shape'])}", cell["ours"][0]["name"]
        floor = found[panel, cell["m"], "floor"]
        assert float(floor["data-floor"]) == cell["roof_us"]
        for entry in (*cell["ours"], *cell["others"]):
            shown = found[panel, cell["m"], entry["name"]]
            assert float(shown["data-us"]) == entry["us"]
            words = shown["text"].split()
            assert words[0] == f"{entry['us']:.2f}"
            count += 1
            if "ratios" in entry:
                values = sorted(run["value"] for run in entry["ratios"][first])
                assert float(shown["data-ratio"]) == pytest.approx(sum(values) / 2, rel=1e-12)
                said = entry["verdicts"][first]
                assert words[2:] == ([] if said == "beside" else [said])
    assert count > 100


def test_points_of_the_plots_are_the_files_figures():
    panel = read_run(LINEAR).panels[0]
    cells = [c for c in documents() if c.get("shape") == documents()[1]["shape"]]
    times = {}
    for cell in cells:
        for entry in (*cell["ours"], *cell["others"]):
            times.setdefault(entry["name"], {})[cell["m"]] = entry["us"]
    floors = {c["m"]: c["roof_us"] for c in cells}
    left, right = report_plot.LEFT, report_plot.WIDTH - report_plot.RIGHT
    bottom, top = report_plot.HEIGHT - report_plot.BOTTOM, report_plot.TOP
    for plot, value_of in (
        (report_plot.time_plot(panel), lambda m, us: math.log10(us)),
        (report_plot.share_plot(panel), lambda m, us: floors[m] / us),
    ):
        root = ET.fromstring(plot)
        x_low, x_high = map(float, root.get("data-x").split())
        y_low, y_high = map(float, root.get("data-y").split())
        groups = {g.get("data-name"): g for g in root.iter("g")}
        for name in times:
            group = groups[name]
            line = next(p.get("d") for p in group.iter("path") if p.get("class") == "line")
            points = [tuple(map(float, p.split())) for p in re.split("[ML]", line) if p]
            assert len(points) == len(times[name])
            for (x, y), (m, us) in zip(points, sorted(times[name].items()), strict=True):
                at = x_low + (x - left) / (right - left) * (x_high - x_low)
                value = y_low + (bottom - y) / (bottom - top) * (y_high - y_low)
                assert at == pytest.approx(math.log2(m), abs=0.01)
                assert value == pytest.approx(value_of(m, us), abs=0.01)


def test_a_page_fetches_nothing_and_says_what_it_shows(decode_lines, quantize_document):
    runs = [
        read_run(LINEAR),
        read_run(TABLE),
        run_of(Path("d"), decode_lines),
        run_of(Path("q"), [quantize_document]),
    ]
    for run in runs:
        text = page(run)
        parsed = Tables(text)
        assert parsed.links == []
        assert not {"script", "img", "link", "iframe"} & set(parsed.tags)
        assert "@media print" in text
        assert "prefers-color-scheme: dark" in text
        assert 'role="img"' in text
        assert parsed.tags.count("figure") >= len(run.panels)
        assert parsed.tags.count("caption") == len(run.panels)
        for svg in re.findall(r"<svg.*?</svg>", text, flags=re.S):
            ET.fromstring(svg)


def test_names_from_a_file_are_text_and_no_markup():
    lines = documents()[:2]
    lines[1]["others"][0]["name"] = "<script>alert(1)</script>"
    lines[1]["failed"] = {"a & b": '<img src="x">'}
    text = page(run_of(Path("x"), lines))
    assert "<script" not in text
    assert "<img" not in text
    assert "a &amp; b" in text


def test_the_worst_cell_is_first_and_counts_are_the_summarys():
    run, summary = read_run(LINEAR), documents()[-1]
    first = worst(run)[0]
    shape, m = summary["worst"]["cell"].removeprefix("linear ").split(" m=")
    assert first["panel"].title.startswith(f"{shape}, ")
    assert (first["cell"].x, first["entry"].name) == (int(m), summary["worst"]["other"])
    assert round(first["entry"].ratio[0], 3) == summary["worst"]["ratio"]
    assert first["entry"].verdict == summary["worst"]["verdict"]
    means = {
        f"{r['name']} ({r['why']})" if r["why"] else r["name"]: round(r["mean"], 3)
        for r in rivals(run)
        if r["role"] != "ours"
    }
    assert means == summary["geometric_means"]
    switch = next(r for r in rivals(run) if r["name"] == "kill switch")
    said = summary["among_ours"]["kill switch / selection"]
    words = ("won", "tie", "lost")
    assert [switch[word] for word in words] == [said[word] for word in words]


def test_what_was_refused_wrong_or_missing_is_listed_wrong_first():
    lines = documents()[:3]
    lines[0]["missing"] = {"gemlite": "tunes itself for minutes"}
    lines[1]["wrong"] = {}
    lines[1]["failed"] = {"flashinfer": "needs sm_100"}
    lines[2]["failed"] = {"flashinfer": "needs sm_100"}
    lines[2]["wrong"] = {"vllm": "relative error 1"}
    found = refusals(run_of(Path("x"), lines))
    assert found[0][:2] == ("vllm", "wrong result: relative error 1")
    assert found[1][:2] == ("flashinfer", "needs sm_100")
    assert found[1][2].startswith("2 cells")
    assert found[2][0] == "gemlite"
    assert "relative error 1" in page(run_of(Path("x"), lines))


def test_a_linears_quantizer_is_a_figure_of_its_own_and_never_the_first():
    lines = documents()[:3]
    lines[1]["quantize_us"] = lines[2]["quantize_us"] = 1.5
    lines[2]["ours"] = []
    first, second = run_in(lines).panels[0].cells
    assert (first.entry("our quantizer alone").us, first.first.name) == (1.5, "selection")
    assert second.first is None
    assert "our quantizer alone" in page(run_in(lines))


def test_a_decoder_stack_has_a_panel_a_phase_and_says_that_layers_are_missing(decode_lines):
    run = run_of(Path("d"), decode_lines)
    assert [panel.title for panel in run.panels] == [
        "decode step, 8 tokens of context",
        "prefill, 4 tokens a prompt",
    ]
    assert any("1 of 5 layers" in note for note in run.notes)
    assert any("no figure to quote" in note for note in run.notes)
    cell = run.panels[0].cells[1]
    assert (cell.x, cell.first.us) == (4, 10.0)
    assert cell.first.config.startswith("qkv, o, gate_up, down: dequant")
    assert cell.entry("kill switch").ratio[0] == 1.1
    assert cell.entry("torch bf16").verdict == ""
    # 10 µs for one layer and the 13 µs of what is no layer
    assert cell.first.note == f"whole ~{(13 + 5 * (10 - 13)) / 1e3:.3f} ms"
    assert cell.first.note in page(run)


def test_quantizers_have_a_copy_kernel_as_floor(quantize_document):
    run = run_of(Path("q"), [quantize_document])
    cell = run.panels[0].cells[0]
    assert (cell.floor_us, cell.first.us, cell.first.share) == (1.8, 2.0, 0.9)
    assert cell.entry("sglang token").ratio == (pytest.approx(1.15), 1.05, 1.3)
    assert cell.entry("sglang token").verdict == "won"
    assert "group k=4096 m=1" in run.notes[0]
    assert run.missing == {"vllm": "not there"}


def test_a_tuned_table_shows_what_its_look_up_takes():
    run = read_run(TABLE)
    assert run.gpu == "NVIDIA H200"
    rows = documents(TABLE)[1:]
    for panel in run.panels[:2]:
        for cell in panel.cells:
            of = [
                r for r in rows
                if f"{r['op']} {r['scheme']} {r['accumulate']} N={r['n']} K={r['k']}" == panel.key
                and r["m"] == cell.x
            ]  # fmt: skip
            default = next(r["us"] for r in of if r["role"] == "default")
            fastest = min(r["us"] for r in of if r["role"] == "ours")
            taken = fastest if fastest <= 0.98 * default else default
            assert cell.first.us == taken
            assert (cell.first.backend == "default") == (taken == default)


def test_a_tuners_document_adds_what_it_refused(tmp_path):
    path = tmp_path / "tune.json"
    refused = {"cell": "linear 1", "backend": "triton_row", "config": {"a": 1}, "kind": "hung"}
    found = {"device": "NVIDIA H200", "table": "nvidia_h200.jsonl", "cells": [], "missed": []}
    document = found | {"refused": [refused | {"reason": "took 9 s"}]}
    path.write_text(json.dumps(document, indent=2))
    (tmp_path / "nvidia_h200.jsonl").write_text(TABLE.read_text())
    run = read_run(path)
    assert run.panels == read_run(TABLE).panels
    assert refusals(run) == [("triton_row a=1, linear 1", "hung: took 9 s", "the whole run")]
    assert "took 9 s" in page(run)


def test_a_run_that_was_cut_short_is_shown_with_a_note(tmp_path):
    text = "\n".join(LINEAR.read_text().splitlines()[:3])
    path = tmp_path / "cut.jsonl"
    path.write_text(text + '\n{"kind": "cell", "op')
    run = read_run(path)
    assert sum(len(panel.cells) for panel in run.panels) == 2
    assert "cut short" in run.notes[0]


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("", "no JSON object"),
        ("hello", "Expecting value"),
        ("[1, 2]", "no JSON object"),
        ('{"a": 1}', "starts with"),
        ('{"kind": "header", "op": "gemm", "scheme": "x"}\n{"kind": "cell"}', "a cell without"),
        ('{"kind": "header", "op": "gemm"}\nnot json\n{}', "Expecting value"),
    ],
)
def test_what_is_no_run_is_named(tmp_path, text, got):
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match="is no run") as caught:
        read_run(path)
    assert got in caught.value.got
    with pytest.raises(InputError, match="cannot read"):
        read_run(tmp_path / "absent.jsonl")


def changed(by, only=None, interval=None, lines=None) -> Run:
    """The baseline with times of ours multiplied, and intervals of a relative half width."""
    lines = plain(lines)
    for cell in lines[1:-1]:
        for own in cell["ours"]:
            if only is None or (own["name"], cell["m"]) == only:
                own["us"] *= by
            if interval is not None:
                own["interval_us"] = [own["us"] / interval, own["us"] * interval]
    return run_in(lines)


SHAPES = len({cell["shape"] for cell in documents()[1:-1]})
FIGURES = sum(len(cell["ours"]) for cell in documents()[1:-1])
M64 = ("selection", 64)


def test_the_same_run_twice_is_no_regression():
    found = compare(run_in(plain()), run_in(plain()))
    assert len(found.changes) == FIGURES
    assert {change.verdict for change in found.changes} == {"same"}
    assert (found.drift, found.regressions, found.differs) == (1.0, (), {})


def test_a_slower_cell_is_first_and_counts_beyond_noise_only():
    a = changed(1.0)
    found = compare(a, changed(1.06, M64))
    said = [c.verdict for c in found.changes]
    assert said == ["slower"] * SHAPES + ["same"] * (FIGURES - SHAPES)
    first = found.changes[0]
    assert (first.name, first.x, round(first.ratio, 4)) == ("selection", 64, 1.06)
    assert len(found.regressions) == SHAPES
    assert compare(a, changed(1.03, M64)).regressions == ()
    assert len(compare(a, changed(1.03, M64), noise=0.01).regressions) == SHAPES
    faster = compare(a, changed(0.9, M64))
    assert [c.verdict for c in faster.changes[-SHAPES:]] == ["faster"] * SHAPES


def test_a_wide_interval_makes_a_change_none():
    a = changed(1.0, interval=1.03)
    assert compare(a, changed(1.07, M64, interval=1.005)).regressions == ()
    tight = compare(changed(1.0, interval=1.005), changed(1.07, M64, interval=1.005))
    assert len(tight.regressions) == SHAPES
    change = tight.regressions[0]
    # two independent intervals of ±0.5 % in log µs
    half = math.hypot(math.log(1.005), math.log(1.005))
    assert math.log(change.high / change.ratio) == pytest.approx(half)


def test_drift_of_the_peers_is_divided_out_on_request():
    lines = plain()
    for cell in lines[1:-1]:
        for other in cell["others"]:
            other["us"] *= 1.06
    a, b = changed(1.0), changed(1.06, lines=lines)
    as_is, anchored = compare(a, b), compare(a, b, anchored=True)
    assert as_is.drift == pytest.approx(1.06)
    assert len(as_is.regressions) == FIGURES
    assert anchored.regressions == ()
    without = replace(a, panels=tuple(_ours_only(panel) for panel in a.panels))
    with pytest.raises(InputError, match="anchor"):
        compare(without, without, anchored=True)


def _ours_only(panel):
    cells = tuple(
        replace(cell, entries=tuple(e for e in cell.entries if e.role == "ours"))
        for cell in panel.cells
    )
    return replace(panel, cells=cells)


def test_a_figure_that_is_gone_is_a_regression_with_its_reason():
    lines = documents()
    lines[1]["ours"] = [own for own in lines[1]["ours"] if own["name"] != "selection"]
    lines[1]["wrong"] = {"selection": "relative error 1"}
    found = compare(read_run(LINEAR), run_in(lines))
    assert found.changes[0].verdict == "broken"
    assert found.changes[0].why == "relative error 1"
    assert len(found.only_a) == 1


def test_another_backend_is_shown_where_it_changed():
    tile = {"block_m": 64, "block_n": 32, "block_k": 128, "num_warps": 4, "num_stages": 8}
    before, after = documents(), documents()
    before[1]["ours"][0] |= {"backend": "triton_row", "config": tile}
    after[1]["ours"][0] |= {"backend": "torch_scaled_mm", "config": {}}
    x = before[1]["m"]
    changes = compare(run_in(before), run_in(after)).changes
    served = {c.served for c in changes if (c.name, c.x) == ("selection", x)}
    assert "triton_row 64x32x128 w4 s8 → torch_scaled_mm" in served


def test_runs_of_other_things_are_not_compared(decode_lines):
    a = read_run(LINEAR)
    for b, what in (
        (read_run(BASELINES / "nvidia_h200-gemm.jsonl"), "operation"),
        (replace(a, header={**a.header, "gpu": "NVIDIA A100"}), "GPU"),
    ):
        with pytest.raises(InputError, match=what):
            compare(a, b)
    lines = documents()
    for cell in lines[1:-1]:
        cell["scheme"] = "w8a8-tensor-static"
    with pytest.raises(InputError, match="no cell in common"):
        compare(a, run_of(Path("b"), lines))
    with pytest.raises(InputError, match="noise"):
        compare(a, a, noise=1.5)


def test_versions_that_differ_are_told():
    a = read_run(LINEAR)
    b = replace(a, header={**a.header, "torch": "2.12"})
    assert compare(a, b).differs == {"torch": (a.header["torch"], "2.12")}


def command(*paths, **options):
    options = {"html": None, "noise": 0.04, "anchored": False, "as_json": False} | options
    report_command.command(paths, **options)


def test_the_command_exits_with_1_on_a_regression(tmp_path, capsys):
    command(LINEAR, LINEAR)
    assert re.search(r"(?m)^\d+ same \(beyond 4%\)$", capsys.readouterr().out)
    paths, lines = [tmp_path / "before.jsonl", tmp_path / "slower.jsonl"], plain()
    for path in paths:
        path.write_text("\n".join(map(json.dumps, lines)))
        for cell in lines[1:-1]:
            cell["ours"][0]["us"] *= 1.2
    with pytest.raises(typer.Exit) as caught:
        command(*paths)
    assert caught.value.exit_code == 1
    shown = capsys.readouterr()
    count = len(lines) - 2
    assert f"{count} slower, {FIGURES - count} same (beyond 4%)" in shown.out
    assert "1.200-1.200" in shown.out
    assert "slower in B" in shown.err


def test_documents_are_as_their_schema_says(capsys, hold_to_schema, decode_lines, tmp_path):
    path = tmp_path / "decode.jsonl"
    path.write_text("\n".join(map(json.dumps, decode_lines)))
    for paths in ((LINEAR,), (TABLE,), (path,), (LINEAR, LINEAR)):
        command(*paths, as_json=True)
        hold_to_schema("report", json.loads(capsys.readouterr().out))


def test_text_of_a_run_names_the_page(capsys):
    command(LINEAR)
    shown, summary = capsys.readouterr(), documents()[-1]
    assert read_run(LINEAR).panels[-1].title in shown.out
    assert f"{summary['worst']['ratio']:.3f} {summary['worst']['verdict']}" in shown.out
    assert "--html" in shown.err


def test_wrong_use_is_told(tmp_path):
    with pytest.raises(InputError, match="of one run"):
        command(LINEAR, LINEAR, html=tmp_path / "x.html")
    with pytest.raises(InputError, match="one run, or two"):
        command(LINEAR, LINEAR, LINEAR)
    result = CliRunner().invoke(cli.app, ["report", str(tmp_path / "absent")])
    assert isinstance(result.exception, InputError)


def test_a_benchmark_writes_its_page_too(tmp_path, decode_lines):
    out, html = tmp_path / "run.jsonl", tmp_path / "pages" / "run.html"
    with bench_command._sink(out, html) as sink:
        for entry in decode_lines:
            sink(entry)
    assert html.read_text() == page(read_run(out))


@pytest.mark.parametrize("name", ["nvidia_h200-gemm", "nvidia_h200-linear"])
def test_committed_pages_are_those_of_the_committed_runs(name):
    run, shown = BASELINES / f"{name}.jsonl", ROOT / "docs" / "reports" / f"{name}.html"
    made = page(read_run(run))
    assert shown.read_text(encoding="utf-8") == made, (
        f"anyfp8 report benchmarks/baselines/{name}.jsonl --html docs/reports/{name}.html"
    )
