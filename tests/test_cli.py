"""The command line as a terminal, a pipe and a log see it: snapshots of text and exit status.

`UPDATE_SNAPSHOTS=1 pytest tests/test_cli.py` writes tests/snapshots anew; read the diff before you
commit it. Figures, versions, times and paths are masked, so that only the wording is held. Verbs
that load a model are held in tests/integrations/test_verb_snapshots.py.

A verb has at least three snapshots: help-VERB, VERB (it worked) and VERB-... (it did not).
"""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import typer

from anyfp8 import cli
from anyfp8.device import CPU

HERE = Path(__file__).parent
SNAPSHOTS = HERE / "snapshots"
CHECKPOINTS = HERE / "data" / "checkpoints"
RUN = HERE / "data" / "runs" / "linear.jsonl"

# whose versions word usage errors and lay out help differently
TYPERS = "0.29"
same_typer = pytest.mark.skipif(
    not typer.__version__.startswith(TYPERS), reason=f"written with typer {TYPERS}"
)

USAGE = {
    "no-such-verb": ["explode"],
    "no-such-option": ["explain", "--colour"],
    "no-argument": ["explain"],
}
ENGINE_FILE = "N=64,K=128,device_name=NVIDIA_L40S,dtype=fp8_w8a8_channelwise.json"
SCENES = {
    "version": ["--version"],
    "env": ["env"],
    "env-unreadable": ["env"],
    "doctor": ["doctor"],
    "doctor-wrong": ["doctor"],
    "inspect": ["inspect", "CHECKPOINTS/modelopt-fp8"],
    "inspect-16-bits": ["inspect", "CHECKPOINTS/bf16"],
    "inspect-absent": ["inspect", "CHECKPOINTS/absent"],
    "run-absent": ["run", "CHECKPOINTS/absent", "-p", "Hello"],
    "eval-absent": ["eval", "CHECKPOINTS/absent"],
    "quantize-absent": ["quantize", "CHECKPOINTS/absent", "TMP/out"],
    "demo-absent": ["demo", "--model", "CHECKPOINTS/absent"],
    "tables-list": ["tables", "list"],
    "tables-list-broken": ["tables", "list"],
    "tables-show": ["tables", "show", "--device", "l40s", "--n", "6144", "--k", "4096"],
    "tables-show-absent": ["tables", "show", "--device", "3090"],
    "tables-check": ["tables", "check", "--device", "l40s", "--no-compile"],
    "tables-check-wrong": ["tables", "check", "--device", "TMP/tables/wrong.jsonl"],
    "tables-import": ["tables", "import", f"TMP/{ENGINE_FILE}", "--to", "TMP/mine"],
    "tables-import-nowhere": ["tables", "import", f"TMP/{ENGINE_FILE}"],
    "tables-export": ["tables", "export", "--device", "l40s", "--to", "TMP/engine"],
    "tables-export-no-such-engine": ["tables", "export", "--device", "l40s", "--format", "trt"],
    "explain": ["explain", "6144,4096", "--device", "a100", "--m", "1,4096"],
    "explain-unknown-gpu": ["explain", "6144,4096", "--device", "sm_130", "--m", "16"],
    "explain-kv-cache": ["explain", "CHECKPOINTS/quark-kv", "--device", "a100", "--m", "1"],
    "explain-no-such-gpu": ["explain", "6144,4096", "--device", "h2000"],
    "explain-no-such-model": ["explain", "CHECKPOINTS/absent", "--device", "h200"],
    "explain-no-such-scheme": ["explain", "64,64", "--device", "h200", "--scheme", "w9a9"],
    "bench-quantize-no-gpu": ["bench", "quantize"],
    "bench-gemm-no-gpu": ["bench", "gemm"],
    "bench-linear-no-gpu": ["bench", "linear"],
    "bench-decode-no-such-scheme": ["bench", "decode", "--layers", "1", "--scheme", "w9a9"],
    "report": ["report", "TMP/runs/before.jsonl"],
    "report-slower": ["report", "TMP/runs/before.jsonl", "TMP/runs/after.jsonl"],
    "report-no-run": ["report", "TMP/tables/wrong.json"],
    "tune": ["tune", "256,384", "--device", "h200", "--dry-run", "--output", "TMP/h200.jsonl"],
    "tune-no-gpu": ["tune", "256,384"],
    "warm-no-such-gpu": ["warm", "256,384", "--device", "h2000", "--cache", "TMP/kernels"],
}
ENVIRONMENT = {
    "env-unreadable": {"ANYFP8_FORCE_FP8_MARLIN": "perhaps"},
    "tables-list-broken": {"ANYFP8_TABLE_DIR": "TMP/broken"},
}
# what a GPU alone can do has no snapshot of success
NEEDS_GPU = {"bench-quantize", "bench-gemm", "bench-linear", "bench-decode"}

WRONG_ROW = {
    "op": "gemm",
    "scheme": "w8a8-channel-token",
    "n": 4096,
    "k": 4096,
    "m": 16,
    "accumulate": "fast",
    "backend": "triton_row",
    "config": {
        "block_m": 256,
        "block_n": 256,
        "block_k": 256,
        "group_m": 8,
        "num_warps": 8,
        "num_stages": 4,
    },
    "us": 10.0,
}


@pytest.fixture
def call(call, monkeypatch, tmp_path):
    """Run a verb in a folder of its own, 80 columns wide."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("ANYFP8_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def run(arguments):
        texts = [a.replace("CHECKPOINTS", str(CHECKPOINTS)) for a in arguments]
        return call(*(a.replace("TMP", str(tmp_path)) for a in texts))

    return run


@pytest.fixture
def scene(call, monkeypatch, tmp_path):
    """Run a scene as on a machine without a GPU."""
    from anyfp8.gemm.dequant import Dequant
    from anyfp8.tools import doctor

    monkeypatch.setattr(doctor, "current_device", lambda: CPU)
    monkeypatch.setattr(doctor, "_devices", lambda: [CPU])
    monkeypatch.setattr(doctor, "runtime", lambda: "none")
    monkeypatch.setattr(doctor, "_driver", lambda: "")
    tile = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "num_warps": 4}
    files = {
        ENGINE_FILE: json.dumps({"1": {**tile, "num_stages": 4}, "64": None}),
        "broken/nvidia_l40s.jsonl": "{",
        "tables/wrong.jsonl": f'{{"format": 1, "device": "NVIDIA L40S"}}\n{json.dumps(WRONG_ROW)}',
    }
    run_lines = RUN.read_text().splitlines()
    files["runs/before.jsonl"] = "\n".join(run_lines)
    files["runs/after.jsonl"] = "\n".join(slower(line) for line in run_lines)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    def run(name):
        if name == "doctor-wrong":
            right = Dequant.run
            monkeypatch.setattr(Dequant, "run", lambda *a, **k: right(*a, **k) * 1.1)
        for variable, value in ENVIRONMENT.get(name, {}).items():
            monkeypatch.setenv(variable, value.replace("TMP", str(tmp_path)))
        return call(SCENES[name])

    return run


def slower(line: str) -> str:
    """A line of a benchmark, what the selection took at M = 8 a quarter longer."""
    found = json.loads(line)
    if found.get("m") == 8:
        found["ours"][0]["us"] *= 1.25
    return json.dumps(found)


def commands() -> dict[str, list[str]]:
    """tables-list -> ["tables", "list"], ...: every verb that does something, from the help."""
    found = {}
    for name, command in typer.main.get_command(cli.app).commands.items():
        for sub in getattr(command, "commands", None) or [""]:
            found[f"{name}-{sub}".strip("-")] = [name, *filter(None, [sub])]
    return found


@same_typer
@pytest.mark.parametrize("name", [*commands(), "tables", "bench"])
def test_help_reads_as_before(call, hold_snapshot, name):
    arguments = commands().get(name, [name])
    status, out, err = call([*arguments, "--help"])
    assert (status, err) == (0, "")
    text = textwrap.fill(re.sub(r"\s+", " ", out), 96, break_on_hyphens=False)
    hold_snapshot(f"help-{name}", text)


@same_typer
@pytest.mark.parametrize("name", USAGE)
def test_wrong_usage_reads_as_before(call, hold_snapshot, name):
    hold_snapshot(name, USAGE[name], call(USAGE[name]))


def without_gpu(names):
    """The verbs that ask for a GPU find one where there is one."""
    skip = pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
    return [pytest.param(n, marks=[skip] if n.endswith("no-gpu") else []) for n in names]


@pytest.mark.parametrize("colour", [False, True], ids=["plain", "colour"])
@pytest.mark.parametrize("name", without_gpu(SCENES))
def test_verbs_read_as_before(scene, hold_snapshot, monkeypatch, name, colour):
    if colour:
        monkeypatch.setenv("FORCE_COLOR", "1")
    status, out, err = scene(name)
    # data is never coloured, and colour says nothing that the text does not
    assert "\x1b" not in out
    labels = re.findall(r"(?m)^(?:\x1b\[[\d;]+m)?(?:error|warning|hint|next|note):", err)
    assert all(label.startswith("\x1b") == colour for label in labels)
    assert not status or labels or "error: " in out
    hold_snapshot(name, SCENES[name], (status, out, re.sub(r"\x1b\[[\d;]*m", "", err)))


@pytest.mark.parametrize("name", [n for n in without_gpu(SCENES) if "doctor" not in n.values[0]])
def test_a_narrow_terminal_loses_no_word(scene, monkeypatch, name):
    wide = scene(name)
    monkeypatch.setenv("COLUMNS", "40")
    narrow = scene(name)
    assert narrow[0] == wide[0]
    assert narrow[1].split() == wide[1].split()


def test_running_text_fits_a_narrow_terminal(scene, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    lines = scene("env")[1].splitlines()
    assert max(len(line) for line in lines if line.startswith(" ")) <= 40


@pytest.mark.parametrize("verb", commands())
def test_every_verb_has_snapshots_of_help_success_and_failure(verb):
    assert (SNAPSHOTS / f"help-{verb}.txt").is_file()
    works = SNAPSHOTS / f"{verb}.txt"
    assert verb in NEEDS_GPU or "exit status 0" in works.read_text().splitlines()[1]
    failures = [p.read_text().splitlines() for p in SNAPSHOTS.glob(f"{verb}-*.txt")]
    assert any(lines[1] in ("exit status 1", "exit status 2") for lines in failures)


def test_every_snapshot_is_held_by_a_test():
    tests = "".join(p.read_text() for p in HERE.rglob("test_*.py"))
    helps = {f"help-{name}" for name in [*commands(), "tables", "bench"]}
    for path in SNAPSHOTS.glob("*.txt"):
        assert path.stem in helps or f'"{path.stem}"' in tests, f"{path.name} is of no test"


def verbs() -> list[list[str]]:
    """Every verb, from the help itself."""
    root = typer.main.get_command(cli.app)
    found = [[]]
    for name, command in root.commands.items():
        found.append([name])
        found += [[name, sub] for sub in getattr(command, "commands", {})]
    return found


@pytest.mark.parametrize("verb", verbs(), ids=" ".join)
@pytest.mark.parametrize("width", [40, 80])
def test_every_verb_has_help_without_escapes_that_fits(call, monkeypatch, verb, width):
    monkeypatch.setenv("COLUMNS", str(width))
    status, out, err = call([*verb, "-h"])
    assert (status, err) == (0, "")
    assert "\x1b" not in out
    assert re.search(r"(?m)^Usage: anyfp8", out)
    # click needs a few columns more than 40 for its two; nothing is cut off there
    assert max(map(len, out.splitlines())) <= max(width, 80)


@pytest.mark.parametrize(
    "arguments",
    [
        ["explain", "64,64", "--device", "l40s", "--m", "1"],
        ["doctor"],
        ["env"],
        ["inspect", "CHECKPOINTS/modelopt-fp8"],
        ["tables", "list"],
    ],
    ids=lambda a: a[0],
)
def test_json_is_one_document_and_nothing_else_on_stdout(call, arguments):
    status, out, _ = call([*arguments, "--json"])
    assert status == 0
    json.loads(out)


def command_line(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "anyfp8", *arguments]


def in_terminal(arguments: list[str], **environment: str) -> str:
    """What a verb writes to a terminal."""
    master, slave = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", **environment}
    process = subprocess.Popen(command_line(*arguments), stdout=slave, stderr=slave, env=env)
    os.close(slave)
    chunks = []
    while True:
        try:
            chunk = os.read(master, 65536)
        except OSError:
            break
        if not chunk:
            break
        chunks.append(chunk)
    os.close(master)
    process.wait()
    return b"".join(chunks).decode().replace("\r\n", "\n")


@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_a_terminal_gets_the_data_that_a_pipe_gets(environment):
    piped = subprocess.run(command_line("env"), capture_output=True, text=True, check=True).stdout
    assert in_terminal(["env"], **environment) == piped
    assert "\x1b" not in piped


def test_labels_are_coloured_on_a_terminal_that_has_colour():
    environment = {"ANYFP8_FORCE_FP8_MARLIN": "perhaps"}
    shown = in_terminal(["env"], **environment)
    assert shown.startswith("\x1b[1;31merror:\x1b[0m cannot read")
    assert "\n\x1b[1;36mhint:\x1b[0m " in shown
    plain = re.sub(r"\x1b\[[\d;]*m", "", shown)
    for quiet in ({"NO_COLOR": "1"}, {"TERM": "dumb"}, {"NO_COLOR": "1", "FORCE_COLOR": "1"}):
        assert in_terminal(["env"], **environment, **quiet) == plain


def test_a_reader_that_leaves_early_sees_no_traceback():
    process = subprocess.Popen(
        command_line("env"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.close()
    stderr = process.stderr.read()
    process.stderr.close()
    process.wait()
    assert "Traceback" not in stderr
    assert "BrokenPipe" not in stderr


def test_talk_goes_to_stderr_and_data_to_stdout(call):
    _, out, err = call(["explain", "64,64", "--device", "h200", "--m", "1"])
    assert "note: a bare shape" in err
    assert "note:" not in out
    assert "64x64 on NVIDIA H200" in out
