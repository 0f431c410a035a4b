"""anyfp8 VERB: the table of verbs, in the order in which `anyfp8 --help` lists them.

A verb is one file here with its options; the file imports its work from `anyfp8.tools` when it is
called, so that help and wrong usage never wait for torch.
"""

from __future__ import annotations

from typing import Annotated

import typer

from anyfp8 import __version__
from anyfp8.cli import (
    bench,
    demo,
    doctor,
    env,
    eval,
    explain,
    inspect,
    quantize,
    report,
    run,
    tables,
    tune,
    warm,
)

app = typer.Typer(
    name="anyfp8",
    help="FP8 LLM linear layers on the GPU you have, with the fastest kernel that is right there.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

VERBS = {
    "quantize": quantize.quantize,
    "run": run.run,
    "eval": eval.evaluate,
    "inspect": inspect.inspect,
    "explain": explain.explain,
    "tune": tune.tune,
    "warm": warm.warm,
    "report": report.report,
    "doctor": doctor.doctor,
    "env": env.environment,
    "demo": demo.demo,
}
GROUPS = {
    "tables": (tables.group, "Tuned tables: list, show, check, import, export."),
    "bench": (bench.group, "Timed against other libraries: quantize, gemm, linear, decode."),
}

for name, verb in VERBS.items():
    app.command(name)(verb)
for name, (group, help) in GROUPS.items():
    app.add_typer(group, name=name, help=help)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(f"anyfp8 {__version__}")
        raise typer.Exit
