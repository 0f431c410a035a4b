"""What a killed run leaves behind: the table's rows, and a journal of every timing.

Both files only grow, a whole line at a time, so that `kill -9` can cut the last line and nothing
else; it is removed when the file is opened again. Rows go to the table before the journal says that
their cell is done. A lock keeps two tuners off one table.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyfp8.errors import TableError
from anyfp8.select.table import Header, Row, Table, file_name, merged, read_table, write_table

# how a candidate can be refused
KINDS = ("failed", "wrong", "hung", "crashed")


@dataclass(frozen=True)
class Refusal:
    """A candidate without a time: one of KINDS, and the reason in words."""

    kind: str
    reason: str


Outcome = float | Refusal


class Book:
    """The table and the journal of one run.

    Attributes:
        done: keys of the cells whose rows are in the table.
        refusals: every one so far: (cell key, backend, configuration, Refusal).
        resumed: cells and timings that an earlier run left.
    """

    def __init__(self, path: Path, header: Header, request: Mapping[str, Any]) -> None:
        """Open or create both files.

        Args:
            path: of the table. header: of a table that is created now.
            request: what is tuned and with what; a journal of another request stays untouched.

        Raises:
            TableError: another tuner holds the table, or it cannot be written or read.
        """
        from filelock import FileLock, Timeout

        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(str(path.with_suffix(".lock")))
            self._lock.acquire(timeout=0)
        except Timeout:
            raise TableError(
                f"another tuner is writing {path.name}",
                got=f"a lock on {path.with_suffix('.lock')}",
                want="one tuner a table",
                hint="wait until it ends, or set --output to another file",
            ) from None
        except OSError as error:
            raise TableError(
                f"cannot write the table {path}",
                got=str(error),
                want="a folder that you may write",
                hint="set ANYFP8_TABLE_DIR or --output",
            ) from error
        self._writing = threading.Lock()
        mend(path)
        if path.is_file() and path.stat().st_size:
            self._check_device(header)
        else:
            write_table(path, Table(header, ()))
        digest = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()[:12]
        self.journal = path.with_suffix(f".{digest}.journal")
        self.done: dict[str, dict[str, Any]] = {}
        self.refusals: list[tuple[str, str, dict[str, Any], Refusal]] = []
        self._times: dict[tuple[str, ...], Outcome] = {}
        mend(self.journal)
        self._read()
        self.resumed = (len(self.done), len(self._times))
        if not self.resumed[0] and not self.resumed[1]:
            self._append(self.journal, [dict(request)])

    def known(self, cell: str, backend: str, config: Mapping[str, Any], share: int) -> Any:
        """What an earlier run measured, or None."""
        return self._times.get(_key(cell, backend, config, share))

    def timed(
        self, cell: str, backend: str, config: Mapping[str, Any], share: int, outcome: Outcome
    ) -> None:
        """Keep one timing."""
        line: dict[str, Any] = {
            "cell": cell, "backend": backend, "config": dict(config), "share": share
        }  # fmt: skip
        if isinstance(outcome, Refusal):
            line |= {"refused": outcome.reason, "kind": outcome.kind}
            self.refusals.append((cell, backend, dict(config), outcome))
        else:
            line["us"] = round(outcome, 4)
        self._append(self.journal, [line])
        self._times[_key(cell, backend, config, share)] = outcome

    def finished(self, cell: str, rows: Sequence[Row], summary: Mapping[str, Any]) -> None:
        """Write the rows of a cell, then that it is done."""
        self._append(self.path, [row.to_dict() for row in rows])
        self._append(self.journal, [{"cell": cell, "done": dict(summary)}])
        self.done[cell] = dict(summary)

    def close(self, complete: bool) -> None:
        """Release the table; a complete run leaves one row a key and no journal."""
        if complete:
            table = read_table(self.path)
            write_table(self.path, merged(Table(table.header, ()), table.rows))
            self.journal.unlink(missing_ok=True)
        self._lock.release()

    def _check_device(self, header: Header) -> None:
        found = read_table(self.path).header
        if found.device != header.device:
            raise TableError(
                f"{self.path} is a table of another GPU",
                got=found.device,
                want=header.device,
                hint=f"name it {file_name(header.device)}, or set --output to another file",
            )

    def _read(self) -> None:
        if not self.journal.is_file():
            return
        lines = self.journal.read_text(encoding="utf-8").splitlines()
        for line in map(json.loads, lines[1:]):
            if "done" in line:
                self.done[line["cell"]] = line["done"]
                continue
            outcome: Outcome
            if "refused" in line:
                outcome = Refusal(line["kind"], line["refused"])
                self.refusals.append((line["cell"], line["backend"], line["config"], outcome))
            else:
                outcome = line["us"]
            key = _key(line["cell"], line["backend"], line["config"], line["share"])
            self._times[key] = outcome

    def _append(self, path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        # one write: a killed process leaves it out, or cuts it, but never tears two apart
        with self._writing:
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(file, text.encode())
            finally:
                os.close(file)


def mend(path: Path) -> None:
    """Cut a half-written last line off."""
    if not path.is_file():
        return
    with path.open("rb+") as file:
        content = file.read()
        if content and not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)


def _key(cell: str, backend: str, config: Mapping[str, Any], share: int) -> tuple[str, ...]:
    return cell, backend, json.dumps(dict(config), sort_keys=True), str(share)
