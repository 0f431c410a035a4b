"""anyfp8 doctor."""

from __future__ import annotations

from anyfp8.cli.options import Json


def doctor(json: Json = False) -> None:
    """What works on this machine; self-test."""
    from anyfp8.tools import doctor as tool

    tool.command(as_json=json)
