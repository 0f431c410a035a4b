"""Every environment variable that anyfp8 reads: name, type, default, meaning, alias.

Values are read when a plan is made or a command starts, never at import. An ANYFP8_ name wins over
its alias; when both are set and differ, a warning says so. An empty value counts as unset.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

from anyfp8.errors import EnvError

log = logging.getLogger(__name__)

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


@dataclass(frozen=True)
class Variable:
    """One environment variable.

    Attributes:
        name: its name, starting with ANYFP8_.
        kind: "bool", "str" or "path".
        default: value when unset, as the variable would be written.
        meaning: one sentence for the documentation and `anyfp8 doctor`.
        alias: another engine's name for the same switch, or "".
    """

    name: str
    kind: str
    default: str
    meaning: str
    alias: str = ""


VARIABLES: tuple[Variable, ...] = (
    Variable(
        "ANYFP8_ENABLE_FP8_GEMM_CONFIG_TUNE",
        "bool",
        "1",
        "use tuned tables and the ranker; 0 is the kill switch: the default path, byte for byte",
        alias="SGLANG_ENABLE_FP8_GEMM_CONFIG_TUNE",
    ),
    Variable(
        "ANYFP8_FORCE_FP8_MARLIN",
        "bool",
        "0",
        "run FP8 checkpoints weight-only even where the GPU has FP8 tensor cores",
        alias="SGLANG_FORCE_FP8_MARLIN",
    ),
    Variable("ANYFP8_BACKEND", "str", "", "force one backend by name; an error where it can't run"),
    Variable(
        "ANYFP8_DEVICE_NAME",
        "str",
        "",
        "answer look-ups and plans as if on this GPU; never launches a kernel there",
    ),
    Variable("ANYFP8_TABLE_DEVICE", "str", "", "use this GPU's tuned tables on the GPU at hand"),
    Variable("ANYFP8_TABLE_DIR", "path", "", "folder of the user's tuned tables, read first"),
    Variable(
        "ANYFP8_RECORD_MISSED",
        "path",
        "",
        "file to which shapes without a tuned row are added; `anyfp8 tune --missed FILE` reads it",
    ),
    Variable("ANYFP8_CACHE_DIR", "path", "", "folder for probe results and compiled kernels"),
    Variable("ANYFP8_LOG", "str", "", "log level of the command line: debug, info, warning, error"),
)

_BY_NAME = {v.name: v for v in VARIABLES}


@dataclass(frozen=True)
class Setting:
    """A variable's value and where it came from ("default", or the name that was set)."""

    variable: Variable
    text: str
    source: str

    @property
    def value(self) -> str | bool:
        return _parse_bool(self) if self.variable.kind == "bool" else self.text


def _parse_bool(setting: Setting) -> bool:
    lowered = setting.text.strip().lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise EnvError(
        f"cannot read the environment variable {setting.source}",
        got=f"{setting.source}={setting.text!r}",
        want="one of " + ", ".join(_TRUE + _FALSE) + ", in any case",
        hint=f"unset {setting.source} for the default ({setting.variable.default})",
    )


def read(name: str, environ: Mapping[str, str] | None = None) -> Setting:
    """Read one variable, its alias included.

    Args:
        name: an entry of `VARIABLES`.
        environ: the environment to read; `os.environ` by default.

    Raises:
        EnvError: the value cannot be parsed; names the variable that was set.
    """
    env = os.environ if environ is None else environ
    variable = _BY_NAME[name]
    own = env.get(name, "").strip()
    other = env.get(variable.alias, "").strip() if variable.alias else ""
    if own:
        setting = Setting(variable, own, name)
        if other and Setting(variable, other, variable.alias).value != setting.value:
            log.warning("%s=%s wins over %s=%s", name, own, variable.alias, other)
    elif other:
        setting = Setting(variable, other, variable.alias)
    else:
        setting = Setting(variable, variable.default, "default")
    _ = setting.value
    return setting


def flag(name: str, environ: Mapping[str, str] | None = None) -> bool:
    """Read a boolean variable. Raises `EnvError` for a value that is neither true nor false."""
    return bool(read(name, environ).value)


def text(name: str, environ: Mapping[str, str] | None = None) -> str:
    """Read a text or path variable; "" when unset."""
    return str(read(name, environ).value)


@dataclass(frozen=True)
class Snapshot:
    """All variables at one moment; hashable, so that it can be part of a cache key."""

    settings: tuple[Setting, ...]

    def __getitem__(self, name: str) -> str | bool:
        return next(s.value for s in self.settings if s.variable.name == name)


def snapshot(environ: Mapping[str, str] | None = None) -> Snapshot:
    """Read every variable. Raises `EnvError` for the first that cannot be read."""
    return Snapshot(tuple(read(v.name, environ) for v in VARIABLES))
