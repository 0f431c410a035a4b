"""Request → Choice: what the caller asks of the selection, and what it answers with its reasons."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from weakref import ref

import torch

from anyfp8 import env, gemm
from anyfp8.errors import InputError
from anyfp8.gemm.base import Backend, Config, PreparedWeight
from anyfp8.gemm.launch import redirected
from anyfp8.launcher import capturing, recorded
from anyfp8.problem import ACCUMULATES, DTYPES, NUMERICS, Problem, QTensor
from anyfp8.replay import MAX_ROWS, Replay, first, pointers_of

log = logging.getLogger(__name__)

SOURCES = ("argument", "environment", "user table", "shipped table", "ranker", "default")


@dataclass(frozen=True)
class Request:
    """What a caller may ask for; None means "as the environment says, else the default".

    Attributes:
        backend: force this one.
        strict: a forced backend that refuses a layer is an error; otherwise that layer falls back.
        tune: use tables and the ranker; False is the default path.
        force_weight_only: never quantize activations.
        numerics: "scheme" (the arithmetic the checkpoint asks for) or "at_least" (weight-only too).
        accumulate: "auto", "fast" or "fp32_128".
        batch_invariant: one configuration and reduction order for all M.
        emulate: without FP8 units, compute what they would.
        memory: of `dequant`: "load", "per_call", or None to let it decide.
        backend_source: where `backend` came from, "argument" or "environment".
    """

    backend: str | None = None
    strict: bool = False
    tune: bool | None = None
    force_weight_only: bool | None = None
    numerics: str | None = None
    accumulate: str = "auto"
    batch_invariant: bool = False
    emulate: bool = False
    memory: str | None = None
    backend_source: str = "argument"

    def __post_init__(self) -> None:
        if self.numerics not in (None, *NUMERICS) or self.accumulate not in ACCUMULATES:
            raise InputError(
                "not an arithmetic mode",
                got=f"numerics={self.numerics!r}, accumulate={self.accumulate!r}",
                want=f"numerics in {NUMERICS}, accumulate in {ACCUMULATES}",
            )
        if self.memory not in (None, "load", "per_call"):
            raise InputError(
                "not a memory policy", got=repr(self.memory), want="'load', 'per_call' or None"
            )

    def with_environment(self, snapshot: env.Snapshot | None = None) -> Request:
        """The request with what it leaves open filled in from the environment.

        Raises:
            EnvError: a variable cannot be read.
        """
        found = env.snapshot() if snapshot is None else snapshot
        changes: dict[str, object] = {}
        if self.backend is None and found["ANYFP8_BACKEND"]:
            changes |= {"backend": found["ANYFP8_BACKEND"], "backend_source": "environment"}
        if self.tune is None:
            changes["tune"] = bool(found["ANYFP8_ENABLE_FP8_GEMM_CONFIG_TUNE"])
        if self.force_weight_only is None:
            changes["force_weight_only"] = bool(found["ANYFP8_FORCE_FP8_MARLIN"])
        return replace(self, **changes)


@dataclass(frozen=True)
class Choice:
    """The backend and configuration that serve a problem, and why.

    Attributes:
        backend: its name. config: of its `config_class`.
        source: one of SOURCES.
        reason: one sentence.
        refused: (backend, clause) of each that was asked and said no.
        accumulate, numerics: as resolved.
        quantizes: whether the activations are quantized before the product.
        provenance: of the table row: device, date, versions; "" without one.
    """

    backend: str
    config: Config
    source: str
    reason: str
    refused: tuple[tuple[str, str], ...]
    accumulate: str
    numerics: str
    quantizes: bool
    provenance: str = ""

    def run(
        self,
        x: torch.Tensor | QTensor,
        prepared: PreparedWeight,
        problem: Problem,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Multiply as chosen; x must be quantized exactly when `quantizes` says so."""
        return gemm.backend(self.backend).run(x, prepared, problem, self.config, bias, out)


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """A product on a GPU that is known.

    Attributes:
        weight: the one it was recorded with, not kept alive by this. where: its addresses.
        stored: `_form_of` that weight: others of this form are multiplied as well.
        shape: of x. form: strides and dtype of its scale; strides are the layout of a group's.
    """

    replay: Replay
    weight: ref[PreparedWeight]
    where: Sequence[int]
    stored: tuple[object, ...]
    shape: torch.Size
    form: tuple[tuple[int, ...], torch.dtype] | None
    biased: bool

    def again(
        self,
        data: torch.Tensor,
        scale: torch.Tensor | None,
        prepared: PreparedWeight,
        bias: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """y by the same launches; None where these need the full path."""
        replay = self.replay
        device = replay.device
        if (
            data.shape != self.shape
            or data.get_device() != device
            or not data.is_contiguous()
            or (bias is not None) != self.biased
            or recorded()
            or redirected()
        ):
            return None
        where = self.where
        if self.weight() is not prepared:
            # another layer's, or the same one's in an object made for this call
            if _form_of(prepared) != self.stored:
                return None
            where = pointers_of(prepared.stored, device)
            if where is None:
                return None
        low = data.data_ptr()
        pointers = [low, *where]
        if scale is not None:
            if scale.get_device() != device or (scale.stride(), scale.dtype) != self.form:
                return None
            pointer = scale.data_ptr()
            low |= pointer
            pointers.append(pointer)
        if bias is not None:
            if bias.get_device() != device:
                return None
            pointer = bias.data_ptr()
            low |= pointer
            pointers.append(pointer)
        if out is not None:
            if (
                out.shape != replay.size
                or out.dtype is not replay.dtype
                or out.get_device() != device
                or not out.is_contiguous()
            ):
                return None
            low |= out.data_ptr()
        # kernels expect operands that are aligned
        if low & 15:
            return None
        return replay(pointers, out)


def _form_of(weight: PreparedWeight) -> tuple[object, ...]:
    """What of a weight a launch depends on besides its addresses."""
    tensors = weight.stored
    return (type(weight), weight.layout, *((t.shape, t.stride(), t.dtype) for t in tensors))


@dataclass(frozen=True)
class Plan:
    """One layer's choices for every M, and the one layout in which its weight is stored.

    Attributes:
        problem: with m = 1; `choice(m)` replaces m.
        choices: (m, Choice) on the grid that it was made for, ascending.
        layout: of the stored weight.
        weight_backend: whose `prepare` makes that layout.
    """

    problem: Problem
    choices: tuple[tuple[int, Choice], ...]
    layout: str
    weight_backend: str
    decide: Callable[[int], Choice] = field(repr=False, compare=False)
    _seen: dict[int, tuple[Choice, Problem]] = field(
        default_factory=dict, repr=False, compare=False
    )
    # (elements of x, GPU) -> how such a product is made again
    _known: dict[tuple[int, int], Product] = field(default_factory=dict, repr=False, compare=False)
    # of which a product was recorded, successfully or not
    _tried: set[tuple[int, int]] = field(default_factory=set, repr=False, compare=False)

    def choice(self, m: int) -> Choice:
        """The choice for m rows: decided once per m, then a dictionary look-up."""
        return self._at(m)[0]

    def problem_at(self, m: int) -> Problem:
        return self._at(m)[1]

    def _at(self, m: int) -> tuple[Choice, Problem]:
        found = self._seen.get(m)
        if found is None:
            choice = dict(self.choices).get(m) or self.decide(m)
            found = self._seen[m] = (choice, replace(self.problem, m=m))
        return found

    def prepare(self, weight: QTensor) -> PreparedWeight:
        """Store a canonical weight in the plan's layout."""
        owner = gemm.backend(self.weight_backend)
        if self.layout == "canonical":
            return Backend.prepare(owner, weight, self.problem.scheme, self.problem.x_dtype)
        return owner.prepare(weight, self.problem.scheme, self.problem.x_dtype)

    def run(
        self,
        x: torch.Tensor | QTensor,
        prepared: PreparedWeight,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Multiply x [M, K]; quantized exactly when `choice(M).quantizes`.

        On a GPU a product that came before is launched again, and decides nothing.
        """
        data, scale = (x.data, x.scale) if isinstance(x, QTensor) else (x, None)
        device = data.get_device()
        key = data.numel(), device
        known = self._known.get(key)
        y = None if known is None else known.again(data, scale, prepared, bias, out)
        if y is not None:
            return y
        m = data.shape[0]
        choice, problem = self._at(m)

        def product() -> torch.Tensor:
            return choice.run(x, prepared, problem, bias, out)

        if (
            device < 0
            or not 0 < m <= MAX_ROWS
            or key in self._tried
            or not self._is_plain(data, out)
            or capturing()
        ):
            return product()
        inputs = [data, *prepared.stored, *(t for t in (scale, bias) if t is not None)]
        if pointers_of(inputs, device) is None:
            return product()
        y, replay = first(product, inputs)
        # once: recording takes longer than a product
        self._tried.add(key)
        if replay is not None:
            where = pointers_of(prepared.stored, device) or []
            form = None if scale is None else (scale.stride(), scale.dtype)
            self._known[key] = Product(
                replay,
                ref(prepared),
                where,
                _form_of(prepared),
                data.shape,
                form,
                bias is not None,
            )
        return y

    def _is_plain(self, data: torch.Tensor, out: torch.Tensor | None) -> bool:
        """Whether a product of these is launched the same way each time."""
        if recorded() or redirected() or not data.is_contiguous():
            return False
        p = self.problem
        return data.shape[1] == p.k and (
            out is None
            or (
                out.shape == (data.shape[0], p.n)
                and out.dtype is DTYPES[p.out_dtype]
                and out.get_device() == data.get_device()
                and out.is_contiguous()
                and out.data_ptr() % 16 == 0
            )
        )

    def describe(self) -> str:
        """One line per run of Ms with the same choice, for `explain` and logs."""
        lines = []
        start = 0
        for i, (_, choice) in enumerate(self.choices):
            last = i + 1 == len(self.choices)
            if last or _same(choice, self.choices[i + 1][1]) is False:
                low, high = self.choices[start][0], self.choices[i][0]
                ms = f"M={low}" if low == high else f"M={low}-{high}"
                config = " ".join(f"{k}={v}" for k, v in choice.config.to_dict().items())
                lines.append(f"{ms}: {choice.backend} {config} ({choice.source}) {choice.reason}")
                start = i + 1
        return "\n".join(lines)


def _same(a: Choice, b: Choice) -> bool:
    return (a.backend, a.config, a.source) == (b.backend, b.config, b.source)
