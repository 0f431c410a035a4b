"""rule matches module: which linears a config's `ignore` / `exclude_modules` list means.

A plain entry matches whole dotted segments at the start or the end of a module's name, so
"mlp.gate" is not "mlp.gate_proj"; "re:" is a regular expression matched from the start
(compressed-tensors); `*`, `?` and `[` make a glob over the whole name (ModelOpt).

The surprise: one model is named in several ways. Wrappers put "model.", "language_model." in front,
".linear" behind, and engines fuse q/k/v and gate/up; entries written for one naming must hold for
the others, without "*up_proj" catching gate_proj through its fused name.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

from anyfp8.errors import CheckpointError

WRAPPERS = ("model", "language_model")
# fused as engines run them, and the other way round
PARTS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
FUSED = {part: whole for whole, parts in PARTS.items() for part in parts}


@lru_cache(maxsize=65536)
def normalise(module: str) -> str:
    """A module's name without wrapper prefixes and a trailing ".linear"."""
    segments = module.split(".")
    while len(segments) > 1 and segments[0] in WRAPPERS:
        segments.pop(0)
    if len(segments) > 1 and segments[-1] == "linear":
        segments.pop()
    return ".".join(segments)


def fused_name(module: str) -> str | None:
    """`...qkv_proj` for `...q_proj` and so on; None for a module that engines don't fuse."""
    head, _, leaf = module.rpartition(".")
    fused = FUSED.get(leaf)
    if fused is None:
        return None
    return f"{head}.{fused}" if head else fused


def _runs(module: str) -> set[str]:
    """Every run of whole segments at the start or the end of a module's name and its plain form."""
    runs: set[str] = set()
    for name in {module, normalise(module)}:
        segments = name.split(".")
        runs.update(".".join(segments[:i]) for i in range(1, len(segments) + 1))
        runs.update(".".join(segments[i:]) for i in range(len(segments)))
    return runs


@dataclass(frozen=True)
class Rule:
    """One entry of an ignore list.

    Attributes:
        pattern: as it was written.
    """

    pattern: str

    @cached_property
    def kind(self) -> str:
        """ "regex", "glob" or "name"."""
        if self.pattern.startswith("re:"):
            return "regex"
        return "glob" if any(c in self.pattern for c in "*?[") else "name"

    @cached_property
    def _regexes(self) -> tuple[re.Pattern[str], ...]:
        if self.kind == "glob":
            both = (self.pattern, normalise(self.pattern))
            return tuple(re.compile(fnmatch.translate(glob)) for glob in both)
        try:
            return (re.compile(self.pattern[len("re:") :]),)
        except re.error as error:
            raise CheckpointError(
                f"the ignore rule {self.pattern!r} is no regular expression",
                got=str(error),
                want="re: and a Python regular expression",
                hint="without re: an entry is a name or a glob",
            ) from error

    def matches(self, module: str) -> bool:
        """Whether the rule means this module, or the fused module that it is a part of."""
        if self._matches_one(module):
            return True
        fused = fused_name(normalise(module))
        if fused is None:
            return False
        # a pattern that merely ends alike ("*up_proj") must not catch gate_proj as gate_up_proj
        if self.kind != "name" and fused.rpartition(".")[2] not in self.pattern:
            return False
        return self._matches_one(fused)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """What a plain entry may be called: as written and normalised."""
        return tuple(dict.fromkeys((self.pattern, normalise(self.pattern))))

    def _matches_one(self, module: str) -> bool:
        if self.kind == "name":
            return not _runs(module).isdisjoint(self.names)
        plain = normalise(module)
        if self.kind == "glob":
            raw, stripped = self._regexes
            return bool(raw.match(module) or stripped.match(plain))
        (regex,) = self._regexes
        return any(regex.match(name) for name in (module, plain, f"model.{plain}"))


class RuleSet:
    """An ignore list that is asked about many modules: plain entries cost one look-up each."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self.rules = tuple(Rule(pattern) for pattern in dict.fromkeys(patterns))
        self._patterned = tuple(rule for rule in self.rules if rule.kind != "name")
        self._names: dict[str, list[Rule]] = {}
        for rule in self.rules:
            if rule.kind == "name":
                for name in rule.names:
                    self._names.setdefault(name, []).append(rule)

    def matching(self, module: str) -> tuple[Rule, ...]:
        """The rules that match a module, none or several."""
        found = dict.fromkeys(rule for rule in self._patterned if rule.matches(module))
        runs = _runs(module)
        fused = fused_name(normalise(module))
        if fused is not None:
            runs |= _runs(fused)
        for name in runs & self._names.keys():
            found.update(dict.fromkeys(self._names[name]))
        return tuple(found)

    def ignored(self, module: str) -> bool:
        """Whether the module is left unquantized.

        Raises:
            CheckpointError: a fused module of which only some parts are ignored.
        """
        if self.matching(module):
            return True
        head, _, leaf = module.rpartition(".")
        parts = [f"{head}.{part}" if head else part for part in PARTS.get(leaf, ())]
        hits = [part for part in parts if self.matching(part)]
        if hits and len(hits) < len(parts):
            raise CheckpointError(
                f"{module} is ignored in part only",
                got=f"rules for {', '.join(hits)}",
                want="rules for all parts of a fused layer, or for none",
                hint="correct the ignore list in the config",
            )
        return bool(hits)
