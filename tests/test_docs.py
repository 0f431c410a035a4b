"""The documents: generated parts are current, commands exist, links lead somewhere, output is real.

`UPDATE_DOCS=1 pytest tests/test_docs.py` writes captured output and docs/environment.md anew.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from anyfp8 import cli, env
from anyfp8.device import CPU
from anyfp8.tools import env_command

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
UPDATE = bool(os.environ.get("UPDATE_DOCS"))
_OUTPUT = re.compile(r"<!-- output: anyfp8 (?P<command>.*?) -->\n```\n(?P<text>.*?)```", re.DOTALL)


@pytest.fixture
def call(call, monkeypatch, tmp_path):
    """Run a command that must pass, as on a machine without a GPU; returns its stdout."""
    from anyfp8.tools import doctor

    monkeypatch.setattr(doctor, "current_device", lambda: CPU)
    monkeypatch.setattr(doctor, "_devices", lambda: [CPU])
    monkeypatch.setattr(doctor, "runtime", lambda: "none")
    monkeypatch.chdir(tmp_path)

    def run(arguments: list[str]) -> str:
        status, out, _ = call(*arguments)
        assert status == 0
        return out

    return run


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_table_of_variables_is_the_programs_own():
    page = DOCS / "environment.md"
    text = page.read_text()
    start = text.index("| variable |")
    if UPDATE:
        page.write_text(text[:start] + env_command.markdown() + "\n")
        text = page.read_text()
    assert text[start:] == env_command.markdown() + "\n"
    assert all(f"`{v.name}`" in text for v in env.VARIABLES)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith(("http:", "https:")):
            assert (page.parent / target).exists(), target


def commands(page: Path) -> list[list[str]]:
    """Every command line in a page's code, without environment and comments."""
    found = []
    blocks = re.findall(r"```\w*\n(.*?)```", page.read_text(), re.DOTALL)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))
    for line in [*"\n".join(blocks).splitlines(), *inline]:
        text = re.sub(r"^(\w+=\S* )*", "", line.removeprefix("$ ").strip())
        if text.startswith("anyfp8 "):
            try:
                words = shlex.split(text, comments=True)
            except ValueError:
                words = text.split()
            found.append(words[1:])
    return found


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_in_documents_exist_with_their_options(page):
    root: Any = typer.main.get_command(cli.app)
    for words in commands(page):
        if not re.fullmatch(r"[a-z]+", words[0]):
            continue
        command = root.commands.get(words[0])
        assert command is not None, f"anyfp8 {words[0]}"
        rest = words[1:]
        if getattr(command, "commands", None) and rest and rest[0] in command.commands:
            command, rest = command.commands[rest[0]], rest[1:]
        known = {option for p in command.params for option in (*p.opts, *p.secondary_opts)}
        for option in (word for word in rest if re.match(r"--?[a-z]", word)):
            assert option in known | {"-h", "--help"}, f"anyfp8 {' '.join(words)}: {option}"


def test_readme_names_every_verb():
    told = {words[0] for words in commands(ROOT / "README.md")}
    assert told >= set(typer.main.get_command(cli.app).commands) - {"demo"}


@pytest.mark.parametrize("page", [p for p in PAGES if _OUTPUT.search(p.read_text())], ids=named)
def test_captured_output_is_what_the_command_prints(call, page):
    text = page.read_text()
    for found in _OUTPUT.finditer(text):
        out = call(shlex.split(found["command"]))
        if UPDATE:
            new = f"<!-- output: anyfp8 {found['command']} -->\n```\n{out}```"
            text = text.replace(found[0], new)
        else:
            assert wording(found["text"]) == wording(out)
    if UPDATE:
        page.write_text(text)


def wording(text: str) -> list[str]:
    """Lines without figures, tiles, and what depends on the packages installed."""
    text = re.sub(
        r"(?m)^.*(needs the package|estimates of|num_warps=|no tuned table|shipped table).*\n",
        "",
        text,
    )
    text = re.sub(r"(?m)^  M=.*\n", "", text)
    text = re.sub(r"\d[\w.+]*", "#", re.sub(r"-{3,}", "", text))
    return [re.sub(r"\s+", " ", line).strip() for line in text.splitlines()]


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_documents_name_no_file_that_is_not_there(page):
    for path in re.findall(r"`((?:src|tests|docs)/[\w./-]+)`", page.read_text()):
        assert (ROOT / path).exists(), path
