"""layer → plan: the facts that a plan depends on, as one string, and the plans made so far.

The module, the op that `torch.compile` sees and `explain` all come here, so they hold equal
choices.

The surprise: the string is no id. A second process that loads a compiled graph from Inductor's
cache makes the same plan from it.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Protocol

import torch

from anyfp8.device import Device, device_of
from anyfp8.errors import InputError
from anyfp8.gemm import probe
from anyfp8.launcher import refuse_capture
from anyfp8.linear import calls
from anyfp8.problem import DTYPE_NAMES, DTYPES, Problem, Scheme
from anyfp8.select import M_GRID, Plan, Request, plan
from anyfp8.select.selection import Probe


@dataclass(frozen=True)
class LayerFacts:
    """Everything that a layer's plan depends on besides device, environment and tables.

    Attributes:
        problem: of the layer, with m = 1.
        request: what it asks of the selection.
    """

    problem: Problem
    request: Request

    @property
    def key(self) -> str:
        """Canonical string; `parse` reads it back."""
        default = asdict(Request())
        asked = {k: v for k, v in asdict(self.request).items() if v != default[k]}
        return f"{self.problem.key}|{json.dumps(asked, sort_keys=True)}"

    @classmethod
    def parse(cls, key: str) -> LayerFacts:
        """The facts of a canonical string. Raises InputError for any other text."""
        problem, _, asked = key.rpartition("|")
        try:
            options = json.loads(asked)
            unknown = set(options) - {f.name for f in fields(Request)}
        except (ValueError, TypeError) as error:
            raise InputError(
                "not the key of a layer", got=repr(key), want="what LayerFacts.key gives"
            ) from error
        if unknown:
            raise InputError(
                "not the key of a layer",
                got=", ".join(sorted(unknown)),
                want="the fields of a Request",
            )
        return cls(Problem.from_key(problem), Request(**options))


def facts_of(
    scheme: Scheme, n: int, k: int, x_dtype: torch.dtype, bias: bool, request: Request
) -> LayerFacts:
    """The facts of a layer [N, K]. Raises InputError for no dtype of activations."""
    name = DTYPE_NAMES.get(x_dtype)
    if name is None:
        raise InputError(
            "not a dtype of activations", got=str(x_dtype), want=", ".join(DTYPE_NAMES.values())
        )
    return LayerFacts(Problem("linear", scheme, 1, n, k, name, name, bias), request)


@lru_cache(maxsize=4096)
def plan_of(layer: str, device: torch.device) -> Plan:
    """The plan of a layer, by its key, on a torch device: made once, until `replan`.

    Raises:
        DeviceError: the first time inside a CUDA graph's capture, where no backend can be tried.
        And what `select.plan` raises.
    """
    refuse_capture("a layer is placed", f"a first call for {layer.partition('|{')[0]}")
    facts = LayerFacts.parse(layer)
    p = facts.problem
    x_dtype = DTYPES[p.x_dtype]
    # backends are tried on the current GPU
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        return plan_for(p.scheme, p.n, p.k, device_of(device), x_dtype, p.bias, facts.request)


class Prepared(Protocol):
    """A layer that holds a plan."""

    def ask(self) -> None:
        """Read the environment again."""
        ...


# so that `replan` reaches them; none is kept alive by it
PREPARED: weakref.WeakSet[Prepared] = weakref.WeakSet()


def replan() -> None:
    """Make every layer's plan again: after the tables or the environment changed.

    Backends that failed their trial on this GPU are tried again.
    A layer whose new plan wants its weight in another layout prepares it again.
    """
    plan_of.cache_clear()
    calls.forget()
    probe.forget()
    for layer in list(PREPARED):
        layer.ask()


def plan_for(
    scheme: Scheme,
    n: int,
    k: int,
    device: Device,
    x_dtype: torch.dtype = torch.bfloat16,
    bias: bool = False,
    request: Request | None = None,
    ms: Iterable[int] = M_GRID,
    probe: Probe | None = None,
) -> Plan:
    """The plan of a layer [N, K]: what `Fp8Linear` follows and `anyfp8 explain` shows.

    Args:
        device: the layer's, or any other that is asked about.
        x_dtype: of the activations and of the result.
        ms: for which numbers of rows to decide at once; others are decided when asked.
        probe: says whether a backend works there; by default it is tried where `device` is here.

    Raises:
        InputError: not a dtype of activations. And what `select.plan` raises.
    """
    p = facts_of(scheme, n, k, x_dtype, bias, request or Request()).problem
    return plan(scheme, n, k, device, p.x_dtype, p.out_dtype, bias, request, ms, probe=probe)
