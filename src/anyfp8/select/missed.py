"""Layers that no tuned row serves → lines of a file, which `anyfp8 tune --missed FILE` reads.

Written where a layer is made on the GPU at hand and ANYFP8_RECORD_MISSED names a file: one JSON
line for each (GPU, scheme, N, K, dtype) and process. Several ranks may write to one file.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from anyfp8.errors import InputError
from anyfp8.problem import DTYPES, Problem, Scheme

if TYPE_CHECKING:
    from anyfp8.device import Device
    from anyfp8.select.choice import Choice

log = logging.getLogger(__name__)

# of choices that no table and no caller made
_UNTUNED = ("ranker", "default")


@dataclass(frozen=True)
class Missed:
    """A weight without rows, by the canonical names of its GPU and scheme."""

    device: str
    scheme: str
    n: int
    k: int
    dtype: str


def record(path: str, device: Device, problem: Problem, choices: Iterable[Choice]) -> None:
    """Add a layer to the file unless a table or the caller decided for all its choices."""
    if path and any(choice.source in _UNTUNED for choice in choices):
        p = problem
        _add(path, Missed(device.name, p.scheme.name, p.n, p.k, p.x_dtype))


def read_missed(path: Path) -> list[Missed]:
    """The file's layers, each once, in order. Raises InputError: names the file and the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"cannot read {path}",
            got=str(error),
            want="what ANYFP8_RECORD_MISSED wrote",
            hint="ANYFP8_RECORD_MISSED=FILE records the shapes of the layers that are made then",
        ) from error
    found = []
    for number, line in enumerate(filter(None, map(str.strip, lines)), 1):
        try:
            one = Missed(**json.loads(line))
            Scheme.parse(one.scheme)
            if one.dtype not in DTYPES or not min(int(one.n), int(one.k)) > 0:
                raise ValueError(f"dtype {one.dtype}, {one.n}x{one.k}")
        except (ValueError, TypeError) as error:
            raise InputError(
                f"cannot read {path}",
                got=f"line {number}: {error}",
                want="device, scheme, n, k and dtype",
                hint="remove that line",
            ) from error
        found.append(one)
    return list(dict.fromkeys(found))


@cache
def _add(path: str, missed: Missed) -> None:
    try:
        # in one write, so that lines of several processes do not mix
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, (json.dumps(asdict(missed)) + "\n").encode())
        finally:
            os.close(file)
    except OSError as error:
        log.warning("shapes without a tuned row are not recorded: %s", error)
