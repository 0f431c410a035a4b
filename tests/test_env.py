"""Environment variables: defaults, aliases, precedence, and errors that name the variable."""

from __future__ import annotations

import logging

import pytest

from anyfp8 import env
from anyfp8.errors import EnvError

TUNE = "ANYFP8_ENABLE_FP8_GEMM_CONFIG_TUNE"
TUNE_ALIAS = "SGLANG_ENABLE_FP8_GEMM_CONFIG_TUNE"
MARLIN = "ANYFP8_FORCE_FP8_MARLIN"
MARLIN_ALIAS = "SGLANG_FORCE_FP8_MARLIN"


def test_defaults():
    assert env.flag(TUNE, {}) is True
    assert env.flag(MARLIN, {}) is False
    for name in ("BACKEND", "DEVICE_NAME", "TABLE_DEVICE", "TABLE_DIR", "CACHE_DIR", "LOG"):
        assert env.text(f"ANYFP8_{name}", {}) == ""


@pytest.mark.parametrize("text", ["1", "true", "True", "YES", "on", " 1 ", "oN"])
def test_what_is_true(text):
    assert env.flag(MARLIN, {MARLIN: text}) is True


@pytest.mark.parametrize("text", ["0", "false", "False", "NO", "off", " 0"])
def test_what_is_false(text):
    assert env.flag(TUNE, {TUNE: text}) is False


@pytest.mark.parametrize("text", ["", " ", "\t"])
def test_empty_is_the_default(text):
    assert env.flag(TUNE, {TUNE: text}) is True
    assert env.flag(MARLIN, {MARLIN: text, MARLIN_ALIAS: text}) is False
    assert env.read(TUNE, {TUNE: text}).source == "default"


@pytest.mark.parametrize("text", ["2", "maybe", "tru", "-1", "None", "0.0"])
def test_anything_else_is_an_error_naming_the_variable_that_was_set(text):
    with pytest.raises(EnvError) as caught:
        env.flag(TUNE, {TUNE: text})
    assert f"{TUNE}={text!r}" in str(caught.value)
    with pytest.raises(EnvError) as caught:
        env.flag(TUNE, {TUNE_ALIAS: text})
    assert TUNE_ALIAS in caught.value.what
    assert TUNE not in caught.value.what


def test_the_alias_counts_when_ours_is_unset():
    setting = env.read(MARLIN, {MARLIN_ALIAS: "1"})
    assert (setting.value, setting.source) == (True, MARLIN_ALIAS)
    assert env.flag(TUNE, {TUNE: "", TUNE_ALIAS: "0"}) is False


def test_ours_wins_over_the_alias_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        assert env.flag(MARLIN, {MARLIN: "0", MARLIN_ALIAS: "1"}) is False
    assert MARLIN in caplog.text
    assert MARLIN_ALIAS in caplog.text


def test_two_spellings_of_the_same_value_are_no_conflict(caplog):
    assert env.flag(MARLIN, {MARLIN: "yes", MARLIN_ALIAS: "1"}) is True
    assert not caplog.records


def test_text_is_kept_as_it_is():
    assert (
        env.text("ANYFP8_TABLE_DIR", {"ANYFP8_TABLE_DIR": "/data/My Tables"}) == "/data/My Tables"
    )
    assert env.text("ANYFP8_BACKEND", {"ANYFP8_BACKEND": " triton_row "}) == "triton_row"


def test_the_process_environment_is_read_at_the_call(monkeypatch):
    assert env.text("ANYFP8_BACKEND") == ""
    monkeypatch.setenv("ANYFP8_BACKEND", "dequant")
    assert env.text("ANYFP8_BACKEND") == "dequant"
    monkeypatch.setenv(TUNE_ALIAS, "0")
    assert env.flag(TUNE) is False


class TestSnapshot:
    def test_it_keeps_every_value_and_is_a_cache_key(self):
        one = env.snapshot({MARLIN: "1", "ANYFP8_BACKEND": "dequant"})
        assert one[MARLIN] is True
        assert one["ANYFP8_BACKEND"] == "dequant"
        assert one[TUNE] is True
        assert {one: "x"}[env.snapshot({MARLIN: "1", "ANYFP8_BACKEND": "dequant"})] == "x"
        assert one != env.snapshot({MARLIN: "1"})

    def test_one_unreadable_variable_is_an_error(self):
        with pytest.raises(EnvError, match=MARLIN_ALIAS):
            env.snapshot({MARLIN_ALIAS: "perhaps"})


def test_the_documented_table():
    names = [v.name for v in env.VARIABLES]
    assert len(set(names)) == len(names)
    for variable in env.VARIABLES:
        assert variable.name.startswith("ANYFP8_")
        assert variable.kind in ("bool", "str", "path")
        assert variable.meaning
    aliases = {v.name: v.alias for v in env.VARIABLES if v.alias}
    assert aliases == {TUNE: TUNE_ALIAS, MARLIN: MARLIN_ALIAS}
