"""anyfp8 env."""

from __future__ import annotations

from anyfp8.cli.options import Json


def environment(json: Json = False) -> None:
    """Every environment variable: value, source, meaning."""
    from anyfp8.tools import env_command as tool

    tool.command(as_json=json)
