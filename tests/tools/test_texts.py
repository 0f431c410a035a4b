"""Texts and windows: what is refused, and that calibration and evaluation share nothing."""

import pytest
import torch

from anyfp8.errors import InputError
from anyfp8.tools.texts import BUILTIN, read_text, windows


def words(text, add_special_tokens, verbose):
    assert not add_special_tokens
    return {"input_ids": [int(w) for w in text.split()]}


def test_the_builtin_text_is_long_english():
    text, name = read_text(None)
    assert name == BUILTIN
    assert len(text) > 300_000
    assert 'The "assert" statement' in text


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "is empty"),
        (b" \n ", "is empty"),
        (b"abc\xff\xfe", "byte 0xff at offset 3"),
        (b"a\0b", "NUL bytes"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path, content, part):
    path = tmp_path / "t.txt"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_text(path)
    assert part in str(caught.value)


def test_an_absent_text_or_a_folder_is_refused(tmp_path):
    for path in (tmp_path / "none.txt", tmp_path):
        with pytest.raises(InputError, match="cannot read the text"):
            read_text(path)


def test_windows_follow_one_another_from_the_front_or_the_middle():
    text = " ".join(str(i) for i in range(100))
    front = windows(words, text, 8, 3)
    assert torch.cat(front, 1).tolist() == [list(range(24))]
    middle = windows(words, text, 8, 3, from_middle=True)
    assert torch.cat(middle, 1).tolist() == [list(range(50, 74))]


def test_a_short_text_gives_what_it_has():
    assert [w.tolist() for w in windows(words, "1 2 3", 8, 3)] == [[[1, 2, 3]]]
    assert len(windows(words, " ".join("7" * 20), 8, 3)) == 2


@pytest.mark.parametrize(("text", "length", "count"), [("1", 8, 1), ("1 2 3", 1, 1), ("1 2", 8, 0)])
def test_too_little_to_predict_is_refused(text, length, count):
    with pytest.raises(InputError):
        windows(words, text, length, count)
