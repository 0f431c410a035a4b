"""The last step of tuning: every row is looked up as a layer would, in the file that was written.

A tuner that writes what the runtime never opens is the classic failure, so the answer of
`select.select` is compared, not the file's text.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from anyfp8 import env
from anyfp8.device import Device
from anyfp8.errors import AnyFp8Error
from anyfp8.gemm.base import Backend
from anyfp8.problem import Problem
from anyfp8.select import Request
from anyfp8.select.selection import select
from anyfp8.select.table import load_tables
from anyfp8.tools.tune import Tuned
from anyfp8.tools.tune_cells import Cell


@dataclass(frozen=True)
class Missed:
    """A cell whose look-up does not give what was won."""

    cell: Cell
    op: str
    why: str


def read_back(tuned: Iterable[Tuned], folder: Path, device: Device) -> list[Missed]:
    """Look every winner up through the runtime; what the GPU refused is not asked again.

    Args:
        folder: as ANYFP8_TABLE_DIR names it.
    """
    settings = env.snapshot({**os.environ, "ANYFP8_TABLE_DIR": str(folder)})
    missed = []
    won = [(t, op, row) for t in tuned for op, row in t.winners.items() if row is not None]
    for one, op, row in won:
        cell = one.cell
        probe = partial(_refusal, one.refused)
        try:
            tables = load_tables(device, settings)
            choice = select(cell.problem(op), device, Request(tune=True), tables, probe=probe)
        except AnyFp8Error as error:
            missed.append(Missed(cell, op, str(error)))
            continue
        if choice.source != "user table":
            why = f"the {choice.source} answers, not the table: {choice.reason}"
            missed.append(Missed(cell, op, why))
        elif choice.backend != row.backend:
            missed.append(Missed(cell, op, f"{choice.backend} is taken, {row.backend} won"))
        elif row.config is not None and dict(row.config) != choice.config.to_dict():
            missed.append(Missed(cell, op, f"{choice.config} is taken, not the winner's"))
    return missed


def _refusal(refused: Mapping[str, str], backend: Backend, problem: Problem) -> str | None:
    return refused.get(backend.name)
