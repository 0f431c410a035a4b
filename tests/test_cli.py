"""The command line as a terminal, a pipe and a log see it: snapshots of text and exit status.

`UPDATE_SNAPSHOTS=1 pytest tests/test_cli.py` writes tests/snapshots anew; read the diff before you
commit it. Figures, versions, times and paths are masked, so that only the wording is held.
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
import typer

from anyfp8 import cli
from anyfp8.device import CPU

HERE = Path(__file__).parent
SNAPSHOTS = HERE / "snapshots"
CHECKPOINTS = HERE / "data" / "checkpoints"

# whose versions word usage errors and lay out help differently
TYPERS = "0.29"
same_typer = pytest.mark.skipif(
    not typer.__version__.startswith(TYPERS), reason=f"written with typer {TYPERS}"
)

HELP = {
    "help-quantize": ["quantize"],
    "help-run": ["run"],
    "help-eval": ["eval"],
    "help-inspect": ["inspect"],
    "help-explain": ["explain"],
    "help-doctor": ["doctor"],
    "help-env": ["env"],
    "help-tables": ["tables"],
}
USAGE = {
    "no-such-verb": ["explode"],
    "no-such-option": ["explain", "--colour"],
    "no-argument": ["explain"],
}
VERBS = {
    "version": ["--version"],
    "env": ["env"],
    "doctor": ["doctor"],
    "inspect": ["inspect", "CHECKPOINTS/modelopt-fp8"],
    "inspect-absent": ["inspect", "CHECKPOINTS/absent"],
    "run-absent": ["run", "CHECKPOINTS/absent", "-p", "Hello"],
    "eval-absent": ["eval", "CHECKPOINTS/absent"],
    "quantize-absent": ["quantize", "CHECKPOINTS/absent", "TMP/out"],
    "tables-show-absent": ["tables", "show", "--device", "3090"],
    "explain": ["explain", "6144,4096", "--device", "a100", "--m", "1,4096"],
    "explain-unknown-gpu": ["explain", "6144,4096", "--device", "sm_130", "--m", "16"],
    "explain-kv-cache": ["explain", "CHECKPOINTS/quark-kv", "--device", "a100", "--m", "1"],
    "explain-no-such-gpu": ["explain", "6144,4096", "--device", "h2000"],
    "explain-no-such-model": ["explain", "CHECKPOINTS/absent", "--device", "h200"],
    "explain-no-such-scheme": ["explain", "64,64", "--device", "h200", "--scheme", "w9a9"],
}


@pytest.fixture
def call(call, monkeypatch, tmp_path):
    """Run a verb in a folder of its own, 80 columns wide."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("ANYFP8_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def run(arguments):
        texts = [a.replace("CHECKPOINTS", str(CHECKPOINTS)) for a in arguments]
        texts = [a.replace("TMP", str(tmp_path)) for a in texts]
        return call(*texts)

    return run


def masked(text: str, tmp: Path) -> str:
    """The wording alone."""
    text = text.replace(str(CHECKPOINTS), "CHECKPOINTS").replace(str(tmp), "TMP")
    text = re.sub(r"\b(how|split_k|slices)=\w+ ?", "", text)
    text = re.sub(r"(?<![\w.])\d[\d,.]*(e[-+]\d+)?(x\d+)?\+?\w*", "#", text)
    text = re.sub(r"\b(block_m|block_n|block_k|group_m|num_warps|num_stages)=#", r"\1=#", text)
    text = re.sub(r"(?m)^estimates of .*$", "estimates of ...", text)
    # which other libraries are installed is this machine's affair
    text = re.sub(r"(?m)^.*needs (the package|Triton).*\n", "", text)
    text = re.sub(r" {3,}", "   ", re.sub(r"-{3,}", "---", text))
    return "\n".join(line.rstrip() for line in text.splitlines())


def hold(name: str, text: str) -> None:
    path = SNAPSHOTS / f"{name}.txt"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path.write_text(text + "\n")
    assert path.is_file(), "run this test once with UPDATE_SNAPSHOTS=1"
    assert text + "\n" == path.read_text(), "if it reads better now: UPDATE_SNAPSHOTS=1"


@same_typer
@pytest.mark.parametrize("name", HELP)
def test_help_reads_as_before(call, name):
    status, out, err = call([*HELP[name], "--help"])
    assert (status, err) == (0, "")
    hold(name, textwrap.fill(re.sub(r"\s+", " ", out), 96, break_on_hyphens=False))


@same_typer
@pytest.mark.parametrize("name", USAGE)
def test_wrong_usage_reads_as_before(call, name, tmp_path):
    hold(name, seen(USAGE[name], call(USAGE[name]), tmp_path))


@pytest.mark.parametrize("name", VERBS)
def test_verbs_read_as_before(call, name, tmp_path, monkeypatch):
    from anyfp8.tools import doctor

    monkeypatch.setattr(doctor, "current_device", lambda: CPU)
    monkeypatch.setattr(doctor, "_devices", lambda: [CPU])
    monkeypatch.setattr(doctor, "runtime", lambda: "none")
    monkeypatch.setattr(doctor, "_driver", lambda: "")
    hold(name, seen(VERBS[name], call(VERBS[name]), tmp_path))


def seen(arguments: list[str], found: tuple[int, str, str], tmp: Path) -> str:
    status, out, err = found
    shown = [f"$ anyfp8 {' '.join(arguments)}", f"exit status {status}"]
    for title, text in (("stdout", out), ("stderr", err)):
        if text:
            shown += [f"--- {title}", masked(text, tmp)]
    return "\n".join(shown)


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
    assert process.wait() == 0
    return b"".join(chunks).decode().replace("\r\n", "\n")


@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_a_terminal_gets_the_text_that_a_pipe_gets(environment):
    piped = subprocess.run(command_line("env"), capture_output=True, text=True, check=True).stdout
    assert in_terminal(["env"], **environment) == piped
    assert "\x1b" not in piped


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
