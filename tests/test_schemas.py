"""Every verb with `--json` prints what docs/schemas says, and has a schema at all.

A new verb needs docs/schemas/VERB.json, its row in docs/schemas/README.md, and real output held to
it: a command in `EXAMPLES` here or, where it needs more, `hold_to_schema("VERB", found)` in the
verb's own test.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
import typer

from anyfp8 import cli
from anyfp8.device import CPU
from anyfp8.tools import bench_quantize, console, env_command
from anyfp8.tools.timing import Ratio

HERE = Path(__file__).parent
SCHEMAS = HERE.parent / "docs" / "schemas"
BASELINES = HERE.parent / "benchmarks" / "baselines"

# `CHECKPOINTS` and `TMP` stand for folders; each command must end with exit status 0
EXAMPLES = {
    "explain": [
        ["explain", "6144,4096", "--device", "h200", "--device", "sm_130"],
        ["explain", "CHECKPOINTS/modelopt-fp8", "--device", "a100"],
    ],
    "doctor": [["doctor"]],
    "env": [["env"]],
    "inspect": [
        ["inspect", "CHECKPOINTS/quark-kv"],
        ["inspect", "CHECKPOINTS/bf16"],
    ],
    "tables-list": [["tables", "list"]],
    "tables-show": [["tables", "show", "--device", "l40s"], ["tables", "show", "--device", "h200"]],
    "tables-check": [["tables", "check", "--device", "l40s", "--no-compile"]],
    "quantize": [
        ["quantize", "CHECKPOINTS/modelopt-fp8", "TMP/out", "--from-fp8", "--format", "finegrained"]
    ],
}
# files that a measurement wrote
RECORDED = {
    "bench-gemm": BASELINES / "nvidia_h200-gemm.jsonl",
    "bench-linear": BASELINES / "nvidia_h200-linear.jsonl",
}


def verbs_with_json() -> set[str]:
    """explain, tables-list, ...: every verb with an option --json, from the command line itself."""
    found = set()
    for name, command in typer.main.get_command(cli.app).commands.items():
        parts = getattr(command, "commands", None) or {"": command}
        for sub, leaf in parts.items():
            if any("--json" in parameter.opts for parameter in leaf.params):
                found.add(f"{name}-{sub}".strip("-"))
    return found


@pytest.fixture
def printed(call, monkeypatch, tmp_path):
    """What a command prints with --json, as on a machine without a GPU."""
    from anyfp8.tools import doctor

    monkeypatch.setattr(doctor, "current_device", lambda: CPU)
    monkeypatch.setattr(doctor, "_devices", lambda: [CPU])
    monkeypatch.setattr(doctor, "runtime", lambda: "none")
    monkeypatch.chdir(tmp_path)

    def run(arguments):
        words = [a.replace("CHECKPOINTS", str(HERE / "data" / "checkpoints")) for a in arguments]
        words = [a.replace("TMP", str(tmp_path)) for a in words]
        status, out, _ = call(*words, "--json")
        assert status == 0
        return json.loads(out)

    return run


@pytest.mark.parametrize(
    ("name", "arguments"),
    [(name, arguments) for name, many in EXAMPLES.items() for arguments in many],
    ids=lambda value: value if isinstance(value, str) else value[-1],
)
def test_a_verb_prints_what_its_schema_says(hold_to_schema, printed, name, arguments):
    hold_to_schema(name, printed(arguments))


def test_tables_go_out_and_come_back_as_their_schemas_say(hold_to_schema, printed):
    written = printed(["tables", "export", "--device", "l40s", "--to", "TMP/engine"])
    hold_to_schema("tables-export", written)
    hold_to_schema("tables-import", printed(["tables", "import", *written, "--to", "TMP/mine"]))


@pytest.mark.parametrize("name", RECORDED)
def test_lines_of_a_benchmark_are_as_their_schema_says(hold_to_schema, name):
    lines = RECORDED[name].read_text().splitlines()
    for line in (*lines[:3], lines[-1]):
        hold_to_schema(name, json.loads(line))


@pytest.mark.parametrize("verb", sorted(verbs_with_json()))
def test_every_verb_with_json_has_a_schema_a_row_and_real_output_held_to_it(verb):
    assert (SCHEMAS / f"{verb}.json").is_file(), f"docs/schemas/{verb}.json is missing"
    command = verb.replace("-", " ")
    row = f"| `anyfp8 {command}` | [{verb}.json]({verb}.json) |"
    assert row in (SCHEMAS / "README.md").read_text().splitlines()
    tests = "\n".join(path.read_text() for path in HERE.rglob("test_*.py"))
    assert verb in {*EXAMPLES, *RECORDED} or f'hold_to_schema("{verb}"' in tests


def test_every_schema_is_one_and_of_a_verb():
    for path in SCHEMAS.glob("*.json"):
        schema = json.loads(path.read_text())
        jsonschema.Draft202012Validator.check_schema(schema)
        assert path.stem in verbs_with_json()
        assert schema["title"] == f"anyfp8 {path.stem.replace('-', ' ')} --json"
        # a field that nobody wrote down is a finding, unless the object is a map
        assert re.search(r'"additionalProperties": false', path.read_text()) or (
            schema.get("items", {}).get("type") == "string"
        )


def test_a_fault_is_found(hold_to_schema):
    row = env_command.rows()[0]
    hold_to_schema("env", [row])
    for wrong in (
        [row | {"extra": 1}],
        [{k: v for k, v in row.items() if k != "value"}],
        [row | {"value": 3}],
        row,
    ):
        with pytest.raises(jsonschema.ValidationError):
            hold_to_schema("env", wrong)


def test_what_bench_quantize_writes_is_as_its_schema_says(hold_to_schema, monkeypatch):
    race = {"a peer": [Ratio(1.1, 1.0, 1.2), Ratio(1.2, 1.1, 1.3)]}

    def measure(kind, k, m, peers, runs, rounds):
        times = (2.0, 900.0, 2.0, 1.0, 0.7, 2.9, 1.02, 2.1, 4)
        return bench_quantize.Cell(kind, k, m, *times, race, {"a peer": 2.2}, {"other": "why"})

    monkeypatch.setattr(bench_quantize.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench_quantize, "measure", measure)
    monkeypatch.setattr(bench_quantize.timing, "header", lambda: recorded_header())
    found = bench_quantize.run(kinds=["token"], columns=[4096], rows=[1, 4096])
    hold_to_schema("bench-quantize", json.loads(json.dumps(found)))


def recorded_header():
    header = json.loads(RECORDED["bench-gemm"].read_text().splitlines()[0])
    return {name: header[name] for name in ("date", "gpu", "torch", "driver", "clocks_mhz")}


def test_a_figure_that_is_not_finite_is_null_in_json(capsys):
    console.data_json({"perplexity": float("nan"), "layers": [{"error": float("inf")}, (1.5,)]})
    assert json.loads(capsys.readouterr().out) == {
        "perplexity": None,
        "layers": [{"error": None}, [1.5]],
    }
