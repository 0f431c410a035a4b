"""Fields of a config -> values of the right type, or an error that names the field.

Every format's config is a JSON object written by some tool's version; what is absent, null or of
another type is told apart here, once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anyfp8.errors import CheckpointError


def names(config: Mapping[str, Any], *fields: str) -> tuple[str, ...]:
    """A list of names in the first of the fields that holds something; () for absent and null.

    Raises:
        CheckpointError: something else than a list of strings.
    """
    for field in fields:
        value = config.get(field)
        if not value:
            continue
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise CheckpointError(
                f"cannot read {field} of the quantization config",
                got=repr(value)[:80],
                want="a list of names",
                hint="correct config.json, or export the checkpoint again",
            )
        return tuple(value)
    return ()


def objects(config: Mapping[str, Any], field: str, *, presets: bool = False) -> dict[str, Any]:
    """An object of objects; {} for absent and null.

    Args:
        presets: lists are allowed in place of the inner objects.

    Raises:
        CheckpointError: something else.
    """
    value = config.get(field) or {}
    kinds = (dict, list) if presets else (dict,)
    if not isinstance(value, dict) or not all(isinstance(v, kinds) for v in value.values()):
        raise CheckpointError(
            f"cannot read {field} of the quantization config",
            got=repr(value)[:80],
            want="name -> object",
            hint="correct config.json, or export the checkpoint again",
        )
    return dict(value)


def number_format(args: Mapping[str, Any], default: str = "") -> str:
    """ "FP8", "INT8" and so on of an object with `type` and `num_bits`."""
    kind = {"float": "FP", "int": "INT"}.get(str(args.get("type", "")).lower(), "")
    found = f"{kind}{args.get('num_bits') or ''}"
    return found if kind else default if not args else f"type {args.get('type')!r}"


def version_of(tool: str, version: Any) -> str:
    """ "tool version", "" without one."""
    return f"{tool} {version}" if isinstance(version, (str, int, float)) and version else ""
