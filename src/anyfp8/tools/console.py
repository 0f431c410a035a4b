"""Data on stdout, talk on stderr: the voice of the command line.

Progress is one line that rewrites itself on a terminal; elsewhere (a pipe, a log) a line now and
then, so that long work is never silent and logs stay short. Colour repeats what a label says, on a
terminal only: data is never coloured, and NO_COLOR or TERM=dumb leave everything plain.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

# seconds between progress lines where stderr is no terminal
QUIET_INTERVAL = 15.0


# what a line of talk may start with -> how a terminal shows it
_LABELS = {"error": "1;31", "warning": "1;33", "hint": "1;36", "next": "1;36", "note": "1;34"}


def talk(text: str = "") -> None:
    """A line for the person, on stderr."""
    label, colon, rest = text.partition(":")
    if colon and label in _LABELS and coloured(sys.stderr):
        text = f"\x1b[{_LABELS[label]}m{label}:\x1b[0m{rest}"
    print(text, file=sys.stderr, flush=True)


def rewrites(stream: TextIO) -> bool:
    """Whether a stream is a terminal that can erase a line."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def coloured(stream: TextIO) -> bool:
    """Whether a stream shows colour; https://no-color.org and its opposite FORCE_COLOR decide."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or rewrites(stream)


def columns(most: int = 80) -> int:
    """Width for running text: the terminal's, and never more than `most`."""
    return max(20, min(most, shutil.get_terminal_size().columns))


def data(text: str) -> None:
    """A line of the result, on stdout."""
    print(text, flush=True)


def data_json(value: Any) -> None:
    """The result as one JSON document, on stdout; NaN and infinity, which JSON lacks, are null."""
    print(json.dumps(_finite(value), indent=2, default=str, allow_nan=False), flush=True)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


class Progress:
    """Counts steps of one piece of work; used through `progress`."""

    def __init__(self, title: str, total: int | None) -> None:
        self.title, self.total = title, total
        self.start = self.last = time.monotonic()
        self.terminal = rewrites(sys.stderr)
        self.done = 0

    def step(self, done: int | None = None, note: str = "") -> None:
        """Report that `done` steps are finished (one more by default)."""
        self.done = self.done + 1 if done is None else done
        now = time.monotonic()
        if now - self.last < (0.1 if self.terminal else QUIET_INTERVAL):
            return
        self.last = now
        line = f"{self.title} {self._count()} {now - self.start:.0f} s {note}".rstrip()
        if self.terminal:
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
        else:
            talk(line)

    def _count(self) -> str:
        return f"{self.done}" if self.total is None else f"{self.done}/{self.total}"

    def finish(self) -> None:
        if self.terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


@contextmanager
def progress(title: str, total: int | None = None) -> Iterator[Progress]:
    """Show the progress of one piece of work, and its seconds when it ends."""
    shown = Progress(title, total)
    try:
        yield shown
    finally:
        shown.finish()
    talk(f"{title}: {time.monotonic() - shown.start:.1f} s")


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Columns of text: the first `left` ones aligned left, the others right."""
    cells = [list(header), *[list(row) for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = []
    for row in cells:
        parts = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(parts).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths).rstrip())
    return "\n".join(lines)


def counted(number: int, what: str) -> str:
    """1 layer, 2 layers: `what` in the singular, at its end a noun that takes an s."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def size(count: float) -> str:
    """Bytes for people, in decimal units: 162.8 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
