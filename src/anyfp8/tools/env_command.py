"""anyfp8 env: every environment variable with its value, where it came from, and its meaning."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from anyfp8 import env
from anyfp8.tools import console


def rows() -> list[dict[str, Any]]:
    """The variables as plain data. Raises EnvError for one that cannot be read."""
    return [
        {
            "name": s.variable.name,
            "value": s.text,
            "source": s.source,
            "default": s.variable.default,
            "alias": s.variable.alias,
            "meaning": s.variable.meaning,
        }
        for s in env.snapshot().settings
    ]


def lines(found: Sequence[dict[str, Any]], width: int = 80) -> list[str]:
    """For a person: name=value (source), then what it means."""
    out = []
    for row in found:
        source = "" if row["source"] == "default" else f"  (from {row['source']})"
        out.append(f"{row['name']}={row['value']}{source}")
        alias = f"; {row['alias']} does the same" if row["alias"] else ""
        text = row["meaning"] + alias
        out += textwrap.wrap(text, width, initial_indent="    ", subsequent_indent="    ")
    return out


def markdown() -> str:
    """The table of docs/environment.md."""
    head = ["| variable | default | alias | meaning |", "|---|---|---|---|"]
    return "\n".join(
        head
        + [
            f"| `{v.name}` | {f'`{v.default}`' if v.default else ''} "
            f"| {f'`{v.alias}`' if v.alias else ''} | {v.meaning} |"
            for v in env.VARIABLES
        ]
    )


def command(*, as_json: bool) -> None:
    """The verb."""
    found = rows()
    if as_json:
        console.data_json(found)
        return
    for line in lines(found, console.columns()):
        console.data(line)
