"""Ours and theirs for one (N, K): a list of calls over weight copies for each name.

Ours go through `select` ("gemm") or `linear.dispatch` ("linear"), as a layer's calls do; the others
are `gemm_peers`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from anyfp8 import gemm, select
from anyfp8.device import Device, device_of
from anyfp8.errors import InputError, NoBackend
from anyfp8.gemm.base import Backend, PreparedWeight
from anyfp8.linear import dispatch
from anyfp8.problem import Problem, Scheme
from anyfp8.select import Choice, Plan, Request
from anyfp8.select.selection import resolve_accumulate
from anyfp8.select.table import Tables, load_tables
from anyfp8.tools.gemm_libraries import Peer
from anyfp8.tools.gemm_operands import Operands, rows_of, slack
from anyfp8.tools.gemm_shapes import Shape
from anyfp8.tools.timing import Call

# names of ours that are not a backend's
SELECTION, KILL_SWITCH = "selection", "kill switch"


@dataclass(frozen=True)
class Setting:
    """What a run measures.

    Attributes:
        op: "gemm" or "linear". scheme: of all layers. accumulate: "auto", "fast" or "fp32_128".
        ours: of SELECTION, KILL_SWITCH and backends' names.
    """

    op: str
    scheme: Scheme
    ms: tuple[int, ...]
    ours: tuple[str, ...]
    accumulate: str = "auto"

    def __post_init__(self) -> None:
        scheme = self.scheme
        known = (None, (128, 128)), (None, 128)
        dynamic = scheme.activation == "tensor" and scheme.dynamic
        if scheme.block not in known[0] or scheme.group not in known[1] or dynamic:
            raise InputError(
                "this scheme cannot be raced",
                got=scheme.name,
                want="static or per-token activations, or 128 columns and 128x128 blocks",
            )
        if self.op == "gemm" and scheme.activation == "none":
            raise InputError(
                "a weight-only scheme has no quantized operands",
                got=f"bench gemm with {scheme.name}",
                want="bench linear",
            )


@dataclass(frozen=True, eq=False)
class Contender:
    """One entry of a cell: a call for each weight copy, and what its result is judged by."""

    name: str
    calls: list[Call]
    weight: str
    activation: str
    allowed: float
    choice: Choice | None = None
    beside: str = ""


class Layer:
    """One shape's contenders, made once and asked for each m."""

    def __init__(
        self, setting: Setting, shape: Shape, operands: Operands, peers: Iterable[Peer]
    ) -> None:
        self.setting, self.shape, self.operands = setting, shape, operands
        self.device = device_of(operands.place)
        self.accumulate = resolve_accumulate(setting.accumulate, shape.k, self.device)
        self.failed: dict[str, str] = {}
        self._plans: dict[str, Plan] = {}
        self._prepared: dict[tuple[str, str], list[PreparedWeight]] = {}
        self._peers = []
        for peer in peers:
            if peer.op == setting.op and peer.shown(setting.scheme):
                try:
                    self._peers.append((peer, peer.make(operands)))
                except Exception as error:  # a library may refuse a shape in its own way
                    self.failed[peer.name] = first_line(error)

    def contenders(self, m: int) -> tuple[list[Contender], dict[str, str]]:
        """(ours first, then the others; {name: why it has no call for this m})."""
        found: list[Contender] = []
        failed = dict(self.failed)
        for name in self.setting.ours:
            try:
                found.append(self._ours(name, m))
            except NoBackend as error:
                reasons = {who: why for who, why in error.reasons.items() if who == name}
                failed[name] = "; ".join((reasons or error.reasons).values())
        for peer, calls in self._peers:
            own = peer.op == "linear" and peer.library != "torch" and peer.activation != "none"
            try:
                found.append(
                    Contender(
                        peer.name,
                        calls(m),
                        peer.weight,
                        peer.activation,
                        slack(peer.accumulate, self.shape.k, own),
                        beside=peer.beside(self.setting.scheme, self.accumulate),
                    )
                )
            except Exception as error:
                failed[peer.name] = first_line(error)
        return found, failed

    def quantizer(self, m: int) -> list[Call]:
        """Quantizing x as a linear does, alone; nothing for products and weight-only schemes."""
        scheme = self.setting.scheme
        if self.setting.op == "gemm" or scheme.activation == "none":
            return []
        x = self.operands.x[:m]
        static = self.operands.input_scale if scheme.activation == "tensor" else None
        return [lambda: dispatch.quantize_activation(x, scheme, static)]

    def contender(self, name: str, m: int) -> Contender:
        """One of ours by name. Raises NoBackend: nothing serves it."""
        return self._ours(name, m)

    def of_tables(self, name: str, m: int, tables: Tables) -> Contender:
        """What the runtime's own look-up makes of these tables, under a name."""
        return self._ours(name, m, tables)

    def _ours(self, name: str, m: int, tables: Tables | None = None) -> Contender:
        setting, scheme = self.setting, self.setting.scheme
        request = _request(SELECTION if tables else name, setting, self.device)
        static = self.operands.input_scale if scheme.activation == "tensor" else None
        if setting.op == "linear":
            plan = self._plan(name, request, m, tables)
            choice = plan.choice(m)
            x = self.operands.x[:m]
            weights = self._copies(gemm.backend(plan.weight_backend), plan.layout)
            calls: list[Call] = [
                lambda w=w: dispatch.linear(x, w, plan, input_scale=static) for w in weights
            ]
        else:
            problem = Problem("gemm", scheme, m, self.shape.n, self.shape.k)
            if request.tune and tables is None:
                tables = _tables(self.device)
            choice = select.select(problem, self.device, request, tables, probe=self._probe)
            problem = replace(problem, accumulate=choice.accumulate, numerics=choice.numerics)
            if not choice.quantizes:
                raise NoBackend(
                    "no backend",
                    reasons={choice.backend: "takes bf16 activations"},
                    want="a backend that takes quantized activations",
                    hint="bench linear",
                )
            q = rows_of(self.operands.activations(scheme.activation), m)
            owner = gemm.backend(choice.backend)
            weights = self._copies(owner, owner.layout_of(choice.config))
            calls = [lambda w=w: choice.run(q, w, problem) for w in weights]
        activation = scheme.activation if choice.quantizes else "none"
        accumulate = choice.accumulate if choice.quantizes else "fp32"
        allowed = slack(accumulate, self.shape.k, own_quantizer=False)
        return Contender(name, calls, scheme.weight, activation, allowed, choice)

    def _plan(self, name: str, request: Request, m: int, tables: Tables | None) -> Plan:
        if name not in self._plans:
            n, k = self.shape.n, self.shape.k
            ms = self.setting.ms if tables is None else (m,)
            self._plans[name] = select.plan(
                self.setting.scheme, n, k, self.device, request=request, ms=ms, tables=tables
            )
        return self._plans[name]

    def _copies(self, owner: Backend, layout: str) -> list[PreparedWeight]:
        key = ("", layout) if layout == "canonical" else (owner.name, layout)
        if key not in self._prepared:
            scheme = self.setting.scheme
            weights = self.operands.weights(scheme.weight)
            if layout == "canonical":
                made = [Backend.prepare(owner, w, scheme, "bf16") for w in weights]
            else:
                made = [owner.prepare(w, scheme, "bf16") for w in weights]
            self._prepared[key] = made
        return self._prepared[key]

    def _probe(self, backend: Backend, problem: Problem) -> str | None:
        return backend.probe(problem, self.device) if self.operands.place.type == "cuda" else None


def first_line(error: BaseException) -> str:
    return (str(error) or repr(error)).splitlines()[0][:200]


def _request(name: str, setting: Setting, device: Device) -> Request:
    # a machine without FP8 units takes part only in tests, doing the same arithmetic
    emulate = not device.has_fp8 and setting.scheme.activation != "none"
    plain = Request(
        tune=name == SELECTION,
        accumulate=setting.accumulate,
        emulate=emulate,
        force_weight_only=False,
    )
    if name in (SELECTION, KILL_SWITCH):
        return plain
    return replace(plain, backend=name, strict=True)


def _tables(device: Device) -> Tables | None:
    return load_tables(device) if device.vendor != "cpu" else None
