"""Texts and token windows for calibration and evaluation, none of which is downloaded.

The default text is `pydoc_data.topics`, 465 kB of English about Python that ships with Python
itself. Evaluation reads it from the front, calibration from the middle, so that they share no
window.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from anyfp8.errors import InputError

BUILTIN = "pydoc_data.topics"


def read_text(path: str | Path | None) -> tuple[str, str]:
    """The text of a file, or the built-in one for None; and its name for reports.

    Raises:
        InputError: the file is absent, empty, a folder, or not UTF-8 text.
    """
    if path is None:
        try:
            from pydoc_data.topics import topics
        except ImportError as error:
            raise InputError(
                "the built-in text is missing from this Python",
                got="no module pydoc_data.topics",
                want="a UTF-8 text file of a few hundred kB",
                hint="name one with --text or --calib",
            ) from error
        return "\n\n".join(topics[key] for key in sorted(topics)), BUILTIN
    path = Path(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InputError(
            f"cannot read the text {path}",
            got=error.strerror or str(error),
            want="a UTF-8 text file",
            hint="leave the text out to take one that ships in Python",
        ) from error
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not text",
            got=f"byte {error.object[error.start]:#04x} at offset {error.start}",
            want="a UTF-8 text file",
            hint="convert it to UTF-8, or name another file",
        ) from error
    if "\0" in text:
        raise InputError(f"{path} is not text", got="NUL bytes", want="a UTF-8 text file")
    if not text.strip():
        raise InputError(f"the text {path} is empty", got=f"{len(raw)} bytes", want="some text")
    return text, path.name


def windows(
    tokenizer: Any, text: str, length: int, count: int, *, from_middle: bool = False
) -> list[torch.Tensor]:
    """Cut a text into `count` windows of `length` tokens, without special tokens.

    Args:
        tokenizer: a transformers tokenizer.
        from_middle: start at half of the text (calibration) instead of its front (evaluation); a
            text too short for that is read from the front.

    Returns:
        Up to `count` tensors [1, length] int64; one shorter window when the text is short.

    Raises:
        InputError: fewer than two tokens, or length or count below their minimum.
    """
    if length < 2 or count < 1:
        raise InputError(
            "not a number of windows", got=f"{count} x {length} tokens", want="at least 1 x 2"
        )
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < 2:
        raise InputError(
            "the text is too short",
            got=f"{len(ids)} tokens",
            want=f"at least 2, better {count * length}",
            hint="name a longer text, or ask for fewer or shorter windows",
        )
    start = len(ids) // 2 if from_middle and len(ids) // 2 + count * length <= len(ids) else 0
    rows = [ids[i : i + length] for i in range(start, len(ids), length)][:count]
    if len(rows) > 1 and len(rows[-1]) < length:
        rows.pop()
    return [torch.tensor([row], dtype=torch.int64) for row in rows]
