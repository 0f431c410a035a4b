"""`anyfp8 tune` from the words to the table: the plan without a GPU, and a run whose GPU is a
script that answers as a measuring process does."""

import json
import sys
import textwrap
import time

import pytest
import torch
import typer

from anyfp8 import select
from anyfp8.device import find_device
from anyfp8.errors import DeviceError, InputError
from anyfp8.problem import Scheme
from anyfp8.select import M_GRID, Request
from anyfp8.select.table import file_name, read_table
from anyfp8.tools import tune_command, tune_plan, tune_session
from anyfp8.tools.tune_cells import cells_of, read_shapes
from anyfp8.tools.tune_compile import Ready
from anyfp8.tools.tune_devices import to_json
from anyfp8.tools.tune_search import FULL

PLAIN = {
    "device": "h200", "effort": "full", "m": None, "tp": 1, "scheme": None, "op": None,
    "missed": None, "dry_run": False, "explain": False, "output": None, "peers": None,
    "as_json": False,
}  # fmt: skip
HEADER = {
    "date": "2026-01-01", "anyfp8": "0", "torch": "t", "triton": "3", "driver": "d", "gpu": "g",
}  # fmt: skip
GPU = textwrap.dedent(
    """
    import json, os, sys
    answers = os.fdopen(int(os.environ["ANYFP8_ANSWERS"]), "w")
    told = json.loads(os.environ["TOLD"])
    def us_of(entry):
        config = entry["config"]
        if entry["backend"] == "torch_scaled_mm":
            return 20.0
        return 5.0 + abs(config["num_warps"] - 4)
    for line in sys.stdin:
        asked = json.loads(line)
        answer = {"refused": {}}
        if asked["do"] == "hello":
            answer = told
        if asked["do"] == "time" and "SEEN" in os.environ:
            with open(os.environ["SEEN"], "a") as file:
                file.write(os.environ["CUDA_VISIBLE_DEVICES"] + "\\n")
        if asked["do"] == "time":
            answer = {"us": us_of(asked)}
            if os.environ.get("LIE") and asked["config"]["num_warps"] == 4:
                answer = {"kind": "wrong", "refused": "errs by 1.00e+00, allowed 3.91e-03"}
            if os.environ.get("FAIL"):
                answer = {"kind": "failed", "refused": "OutOfResources: shared memory"}
        if asked["do"] == "race" and os.environ.get("FAIL"):
            answer = {"us": {}, "ratios": {}, "refused": {}, "peers": []}
        elif asked["do"] == "race":
            us = {name: us_of(entry) for name, entry in asked["entries"].items()}
            base = us[asked["default"]]
            ratios = {n: [base / u, base / u - 0.01, base / u + 0.01] for n, u in us.items()}
            answer = {"us": us, "ratios": ratios, "refused": {}, "peers": []}
        answers.write(json.dumps(answer) + "\\n")
        answers.flush()
    """
)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """One visible H200, whose process is the script."""
    monkeypatch.setattr(tune_session, "runtime", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    told = {"header": HEADER, "device": to_json(find_device("h200"))}
    monkeypatch.setenv("TOLD", json.dumps(told))
    monkeypatch.setenv("ANYFP8_TABLE_DIR", str(tmp_path))
    return {"command": (sys.executable, "-S", "-c", GPU), "compiler": lambda device: Ready()}


def tune(models, **options):
    tune_command.command(models, **PLAIN | options)


def test_a_run_ends_with_rows_that_are_used_and_says_how(gpu, tmp_path, capsys, hold_to_schema):
    tune(["512,1024"], device=None, m="1,16", effort="quick", **gpu)
    out = capsys.readouterr()
    assert "4 of 4 have rows" in out.out
    assert "beats the default path in 4" in out.out
    assert "ANYFP8_TABLE_DIR names its folder" in out.out
    assert "512x1024 M=16  gemm: triton_row 5.0 µs; linear: triton_row 5.0 µs" in out.err
    table = read_table(tmp_path / file_name("NVIDIA H200"))
    assert dict(table.header.facts)["sms"] == 132
    best = next(r for r in table.rows if (r.m, r.op, r.role) == (16, "gemm", "ours"))
    assert (dict(best.config)["num_warps"], best.us) == (4, 5.0)
    assert dict(best.extra)["runner_up"]["us"] >= 5.0
    assert "2026-01-01" in dict(best.extra)["measured"]
    began = time.monotonic()
    tune(["512,1024"], device="cuda:0", m="16", as_json=True, **gpu)
    took = time.monotonic() - began
    found = json.loads(capsys.readouterr().out)
    hold_to_schema("tune", found)
    assert found["cells"][0]["winners"]["gemm"]["us"] == 5.0
    assert found["missed"] == []
    assert found["gpus"] == 1
    # of a script, which takes milliseconds: rounded to 0.01 and 0.1
    assert 0 <= found["cells"][0]["seconds"] <= took + 0.005
    assert 0 <= found["seconds"] <= took + 0.05


def test_every_visible_gpu_works_and_each_process_sees_one(gpu, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-8932f937")
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    tune(["512,1024", "1024,1024", "2048,1024"], device=None, effort="quick", **gpu)
    assert "126 of 126 have rows" in capsys.readouterr().out
    seen = (tmp_path / "seen").read_text().split()
    assert set(seen) == {"3", "GPU-8932f937"}
    table = read_table(tmp_path / file_name("NVIDIA H200"))
    assert len({row.key for row in table.rows}) == 126


def test_a_folder_that_is_not_looked_up_is_named_to_the_shell(gpu, tmp_path, capsys, monkeypatch):
    tune(["512,1024"], device=None, m="16", output=tmp_path / "mine", **gpu)
    assert f"export ANYFP8_TABLE_DIR={tmp_path / 'mine'}" in capsys.readouterr().out
    tune(["512,1024"], device=None, m="16", output=tmp_path / "x.jsonl", **gpu)
    assert "move it to a folder as nvidia_h200.jsonl" in capsys.readouterr().out


def test_a_wrong_candidate_is_reported_as_a_bug_and_not_written(
    gpu, tmp_path, capsys, monkeypatch, hold_to_schema
):
    monkeypatch.setenv("LIE", "1")
    with pytest.raises(typer.Exit) as stop:
        tune(["512,1024"], device=None, m="16", as_json=True, **gpu)
    assert stop.value.exit_code == 1
    out = capsys.readouterr()
    assert "computes a wrong product" in out.err
    assert "report this as a bug" in out.err
    hold_to_schema("tune", found := json.loads(out.out))
    assert {r["kind"] for r in found["refused"]} == {"wrong"}
    rows = read_table(tmp_path / file_name("NVIDIA H200")).rows
    assert all(dict(r.config)["num_warps"] != 4 for r in rows if r.backend == "triton_row")


def test_where_every_candidate_fails_the_exit_status_says_so_and_the_ranker_serves(
    gpu, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("FAIL", "1")
    with pytest.raises(typer.Exit) as stop:
        tune(["512,1024"], device=None, m="16", **gpu)
    assert stop.value.exit_code == 1
    out = capsys.readouterr()
    assert "0 of 2 have rows" in out.out
    assert "failed; --json lists them" in out.out
    assert "no row for linear 512x1024 M=16: the ranker decides there" in out.err
    found = select.plan(Scheme("channel", "token", True), 512, 1024, find_device("h200"), ms=(16,))
    assert found.choice(16).source == "ranker"


def test_another_gpu_than_the_one_here_is_refused(gpu):
    with pytest.raises(DeviceError, match="no such GPU here") as error:
        tune(["512,1024"], device="l40s", m="16", **gpu)
    assert "NVIDIA H200" in error.value.got


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_without_a_gpu_a_run_is_a_clear_error(monkeypatch, hidden):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(tune_session, "runtime", lambda: "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    with pytest.raises(DeviceError) as error:
        tune(["512,1024"], device=None)
    assert f"CUDA_VISIBLE_DEVICES={hidden!r}" in error.value.got
    assert "--dry-run" in error.value.hint


def test_the_plan_needs_no_gpu_and_names_what_will_be_timed(capsys, hold_to_schema):
    tune(["qwen3-8b"], dry_run=True, tp=2)
    out = capsys.readouterr().out
    for words in ("12288x4096", "4096x2048", "84 cells on NVIDIA H200", "nvidia_h200.jsonl"):
        assert words in out
    tune(["512,1024"], explain=True, m="16")
    out = capsys.readouterr().out
    assert "µs estimated, number 1\n" in out
    assert out.count("µs estimated") >= 12
    tune(["512,1024"], explain=True, m="16", as_json=True)
    hold_to_schema("tune", found := json.loads(capsys.readouterr().out))
    assert len(found["cells"][0]["first"]) >= 12


def test_no_effort_shows_what_serves_an_untuned_gpu_and_writes_nothing(
    capsys, hold_to_schema, tmp_path, monkeypatch
):
    monkeypatch.setenv("ANYFP8_TABLE_DIR", str(tmp_path))
    tune(["512,1024"], effort="none", m="16,64")
    assert "block_m=" in capsys.readouterr().out
    tune(["512,1024"], effort="none", m="16,64", as_json=True)
    hold_to_schema("tune", found := json.loads(capsys.readouterr().out))
    assert {c["source"] for c in found["choices"]} <= {"ranker", "default"}
    assert not list(tmp_path.iterdir())


def test_words_that_cannot_be_read_are_errors():
    for options in ({"effort": "some"}, {"op": "conv"}, {"m": "few"}):
        with pytest.raises(InputError):
            tune(["512,1024"], **options)
    with pytest.raises(InputError, match="no product of quantized operands"):
        tune(["512,1024"], scheme="w8a16-channel", op="gemm", dry_run=True)
    with pytest.raises(DeviceError, match="no GPU to plan for"):
        tune(["512,1024"], device="cpu", dry_run=True)


def test_shapes_are_tuned_one_after_another_on_the_whole_grid(capsys):
    tune(["512,1024", "1024,1024"], effort="quick", dry_run=True, as_json=True)
    cells = json.loads(capsys.readouterr().out)["cells"]
    assert [(c["n"], c["m"]) for c in cells] == [(n, m) for n in (512, 1024) for m in M_GRID]


def test_what_the_runtime_missed_is_tuned_and_then_found(gpu, tmp_path, monkeypatch, capsys):
    missed = tmp_path / "missed.jsonl"
    monkeypatch.setenv("ANYFP8_RECORD_MISSED", str(missed))
    monkeypatch.setenv("ANYFP8_ENABLE_FP8_GEMM_CONFIG_TUNE", "1")
    h200, row = find_device("h200"), Scheme("channel", "token", True)

    def layer(n, k, **options):
        return select.plan(row, n, k, h200, probe=lambda *_: None, **options)

    made = [layer(512, 1024), layer(512, 1024), layer(1000, 512, x_dtype="fp16")]
    assert {c.source for plan in made for _, c in plan.choices} <= {"ranker", "default"}
    # not by a look at another machine's GPU, nor where the caller decides
    select.plan(row, 640, 1024, h200)
    layer(768, 1024, request=Request(tune=False))
    layer(896, 1024, request=Request(backend="triton_row"))
    lines = [json.loads(line) for line in missed.read_text().splitlines()]
    assert [(one["n"], one["k"], one["dtype"]) for one in lines] == [
        (512, 1024, "bf16"), (1000, 512, "fp16"),
    ]  # fmt: skip
    tune([], missed=missed, device=None, **gpu)
    assert "84 of 84 have rows" in capsys.readouterr().out
    missed.unlink()
    again = layer(512, 1024)
    assert {c.source for _, c in again.choices} == {"user table"}
    layer(1000, 512, x_dtype="fp16")
    assert not missed.exists()


def test_recorded_shapes_follow_the_models_and_other_gpus_ones_are_left_out(tmp_path, capsys):
    missed = tmp_path / "missed.jsonl"
    row = {"device": "NVIDIA H200", "scheme": "w8a8-channel-token", "k": 1024, "dtype": "bf16"}
    lines = [row | {"n": 640}, row | {"n": 512}, row | {"n": 640}, row | {"n": 8, "device": "X"}]
    missed.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tune(["512,1024"], missed=missed, m="16", dry_run=True, as_json=True)
    out = capsys.readouterr()
    assert [layer["n"] for layer in json.loads(out.out)["layers"]] == [512, 640]
    assert "shapes of X in missed.jsonl are left out" in out.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file"),
        ("{}", "line 1"),
        ("[1]", "line 1"),
        ('{"n"', "line 1"),
        ("", "no shape"),
    ],
)
def test_a_record_that_cannot_be_read_is_named(tmp_path, text, said):
    missed = tmp_path / "missed.jsonl"
    if text is not None:
        missed.write_text(text)
    with pytest.raises(InputError) as error:
        tune([], missed=missed, dry_run=True)
    assert said in error.value.got
    with pytest.raises(InputError, match="nothing to tune"):
        tune([], dry_run=True)


def test_a_record_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("ANYFP8_RECORD_MISSED", str(tmp_path / "absent" / "missed.jsonl"))
    row = Scheme("channel", "token", True)
    made = select.plan(row, 512, 1152, find_device("h200"), probe=lambda *_: None)
    assert made.choices
    assert "are not recorded" in caplog.text


def test_models_come_in_their_order_with_each_scheme_in_turn(capsys):
    schemes = ("w8a8-channel-token", "w8a8-block128x128-group128")
    tune(
        ["llama-3-70b-tp8", "qwen3-8b"], scheme=",".join(schemes), m="16", dry_run=True,
        as_json=True,
    )  # fmt: skip
    cells = json.loads(capsys.readouterr().out)["cells"]
    llama = [(7168, 8192), (8192, 3584), (1280, 8192), (8192, 1024)]
    qwen = [(24576, 4096), (4096, 12288), (6144, 4096), (4096, 4096)]
    wanted = [(scheme, n, k) for model in (llama, qwen) for scheme in schemes for n, k in model]
    assert [(c["scheme"], c["n"], c["k"]) for c in cells] == wanted


def test_rows_so_far_apart_that_they_lose_between_them_are_noted(capsys):
    tune(["512,1024"], dry_run=True, m="1,2,64,256")
    assert "apart: M = 2 and 64, 64 and 256" in capsys.readouterr().err
    tune(["512,1024"], dry_run=True)
    assert "apart" not in capsys.readouterr().err


def test_the_estimated_time_is_near_what_a_run_on_an_h200_took(monkeypatch):
    # 513 s of two GPUs, with 32 cores; 21 cells of one shape took 35 s of one
    monkeypatch.setattr(tune_plan, "cores", lambda: 32)
    h200, schemes = find_device("h200"), ("w8a8-channel-token", "w8a8-block128x128-group128")
    models = ["qwen3-8b", "llama-3-70b-tp8"]
    for texts, kinds, seconds in (
        (models, schemes, 513 + 20),
        (["4096,4096"], schemes[:1], 35 + 20),
    ):
        shapes, _ = read_shapes(texts, *map(Scheme.parse, kinds))
        found = tune_plan.seconds_of(cells_of(shapes, h200, M_GRID), h200, FULL)
        assert found == pytest.approx(seconds, rel=0.25)
    monkeypatch.setattr(tune_plan, "cores", lambda: 4)
    assert tune_plan.seconds_of(cells_of(shapes, h200, M_GRID), h200, FULL) > 2 * found
