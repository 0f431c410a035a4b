"""anyfp8 tables list, show, check, import, export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anyfp8.cli.options import Json

group = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
Table = Annotated[str, typer.Option("--device", help="GPU name, or the path of a .jsonl table.")]


@group.command("list")
def tables_list(json: Json = False) -> None:
    """Every table: of which GPU, how many rows, from where."""
    from anyfp8.tools import tables_command as tool

    tool.list_command(as_json=json)


@group.command("show")
def tables_show(
    device: Table,
    n: Annotated[int | None, typer.Option(help="Only rows of this N.")] = None,
    k: Annotated[int | None, typer.Option(help="Only rows of this K.")] = None,
    json: Json = False,
) -> None:
    """The rows of one table."""
    from anyfp8.tools import tables_command as tool

    tool.show_command(device, n=n, k=k, as_json=json)


@group.command("check")
def tables_check(
    device: Annotated[
        str | None,
        typer.Option(help="GPU name, or the path of a .jsonl table  [default: this GPU's]"),
    ] = None,
    compile: Annotated[bool, typer.Option(help="Compile each configuration for its GPU.")] = True,
    measure: Annotated[
        bool, typer.Option("--measure", help="Race rows against the default path, on this GPU.")
    ] = False,
    device_index: Annotated[int | None, typer.Option(min=0, help="Of this machine's GPUs.")] = None,
    shape: Annotated[
        list[str] | None, typer.Option(help="Only rows of this N,K, or of a model; repeatable.")
    ] = None,
    m: Annotated[str | None, typer.Option("--m", help="Only these Ms, such as 1,16.")] = None,
    drop: Annotated[
        bool, typer.Option("--drop", help="Write the table without the rows that lose.")
    ] = False,
    to: Annotated[
        Path | None, typer.Option(help="Where --drop writes  [default: in place]")
    ] = None,
    seconds: Annotated[float, typer.Option(help="For all races; rounds shrink to fit.")] = 150.0,
    json: Json = False,
) -> None:
    """What does not fit, compile or count; no GPU needed. --measure: what loses, on its GPU."""
    from anyfp8.tools import tables_command as tool

    if measure:
        tool.measure_command(
            device, index=device_index, shapes=shape or [], m=m, drop=drop, to=to,
            seconds=seconds, as_json=json,
        )  # fmt: skip
    else:
        measuring = {"--device-index": device_index, "--shape": shape, "--m": m, "--drop": drop}
        tool.check_command(
            device, compiles=compile, as_json=json, measuring=measuring | {"--to": to}
        )


@group.command("import")
def tables_import(
    files: Annotated[list[Path], typer.Argument(help="SGLang's or vLLM's JSON files.")],
    to: Annotated[Path | None, typer.Option(help="Folder  [default: ANYFP8_TABLE_DIR]")] = None,
    source: Annotated[str, typer.Option(help="Where they come from.")] = "imported",
    json: Json = False,
) -> None:
    """Add SGLang's or vLLM's files to your tables."""
    from anyfp8.tools import tables_command as tool

    tool.import_command(files, folder=to, source=source, as_json=json)


@group.command("export")
def tables_export(
    device: Table,
    format: Annotated[str, typer.Option(help="sglang or vllm.")] = "sglang",
    to: Annotated[Path, typer.Option(help="Folder to write.")] = Path("."),
    json: Json = False,
) -> None:
    """Write a table as SGLang's or vLLM's files."""
    from anyfp8.tools import tables_command as tool

    tool.export_command(device, folder=to, engine=format, as_json=json)
