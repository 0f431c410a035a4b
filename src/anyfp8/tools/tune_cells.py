"""MODEL or N,K, GPU → cells to tune: each a scheme, a shape and a number of rows.

Shapes are those of the checkpoint's config after fusion (q/k/v in one, gate/up in one) and after
tensor parallelism, from the functions that `explain` uses: what is tuned is what a layer asks for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from anyfp8 import gemm
from anyfp8.device import Device, find_device
from anyfp8.errors import InputError
from anyfp8.gemm.base import Backend, Config
from anyfp8.problem import DTYPE_NAMES, Problem, Scheme
from anyfp8.select import M_GRID, Request
from anyfp8.select.missed import read_missed
from anyfp8.select.predict import guesses
from anyfp8.select.selection import resolve_accumulate, resolve_numerics
from anyfp8.tools.gemm_shapes import MODELS
from anyfp8.tools.shapes import DEFAULT_SCHEME, Layer, Model, fused, read_model, sharded
from anyfp8.tools.tune_devices import named_ordinals

OPS = ("gemm", "linear")


@dataclass(frozen=True)
class Cell:
    """One thing to tune.

    Attributes:
        ops: "gemm" and "linear": with which the finalists race. The search times the product, or
            the whole linear where activations are not quantized.
    """

    scheme: Scheme
    n: int
    k: int
    m: int
    ops: tuple[str, ...]
    dtype: str = "bf16"
    accumulate: str = "fast"
    numerics: str = "scheme"

    @property
    def key(self) -> str:
        return "|".join(
            (self.problem(op := self.ops[0]).key.removeprefix(f"{op}|"), "+".join(self.ops))
        )

    @property
    def shape(self) -> tuple[Scheme, int, int, str]:
        return self.scheme, self.n, self.k, self.dtype

    def problem(self, op: str) -> Problem:
        return Problem(
            op, self.scheme, self.m, self.n, self.k, self.dtype, self.dtype, False,
            self.accumulate, self.numerics,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """As a worker is told; `from_dict` reads it back."""
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"scheme": self.scheme.name}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Cell:
        scheme = Scheme.parse(values["scheme"])
        return cls(**values | {"scheme": scheme, "ops": tuple(values["ops"])})

    def __str__(self) -> str:
        return f"{self.n}x{self.k} M={self.m}"


@dataclass(frozen=True)
class Shape:
    """A weight to tune for: how many layers have it, and what the first of them is called."""

    name: str
    scheme: Scheme
    n: int
    k: int
    dtype: str
    count: int

    @property
    def key(self) -> tuple[Scheme, int, int, str]:
        return self.scheme, self.n, self.k, self.dtype


def read_shapes(
    texts: Iterable[str], *schemes: Scheme | None, tp: int = 1
) -> tuple[list[Shape], list[str]]:
    """Shapes of models, configs, "N,K" and the benchmarks' names, of each the most work first.

    Args:
        schemes: of what has none of its own; with several each text is read once for each.

    Returns:
        (shapes, notes on what was assumed).

    Raises:
        InputError, CheckpointError: as `shapes.read_model`.
    """
    found: dict[tuple[Scheme, int, int, str], Shape] = {}
    notes: list[str] = []
    for text in texts:
        # a checkpoint that has a scheme gives the same with every other
        mine: dict[tuple[Scheme, int, int, str], Shape] = {}
        for scheme in schemes or (None,):
            model = _named(text, scheme) or read_model(text, scheme)
            notes += model.notes
            mine |= {shape.key: shape for shape in _counted(sharded(fused(model), tp))}
        for key, shape in mine.items():
            count = shape.count + (found[key].count if key in found else 0)
            found[key] = replace(found.get(key, shape), count=count)
    return list(found.values()), list(dict.fromkeys(notes))


def with_missed(
    shapes: Iterable[Shape], path: Path, device: str | None
) -> tuple[list[Shape], list[str]]:
    """`shapes`, then those that ANYFP8_RECORD_MISSED recorded and that are not among them.

    Args:
        device: a GPU's name: shapes recorded on others are left out; None or "cuda…" takes all.

    Returns:
        (shapes, notes on what was left out).

    Raises:
        InputError: as `read_missed`. DeviceError: no such GPU is known.
    """
    found = {shape.key: shape for shape in shapes}
    wanted = None if device is None or named_ordinals(device) else find_device(device).name
    others = set()
    for one in read_missed(path):
        if wanted not in (None, one.device):
            others.add(one.device)
            continue
        shape = Shape("missed", Scheme.parse(one.scheme), one.n, one.k, one.dtype, 1)
        found.setdefault(shape.key, shape)
    notes = [f"shapes of {name} in {path.name} are left out" for name in sorted(others)]
    return list(found.values()), notes


def _counted(model: Model) -> list[Shape]:
    """The shapes of one model, the most work first."""
    found: dict[tuple[Scheme, int, int, str], Shape] = {}
    for layer in model.layers:
        shape = Shape(layer.kind, layer.scheme, layer.n, layer.k, DTYPE_NAMES[model.dtype], 0)
        old = found.get(shape.key, shape)
        found[shape.key] = replace(old, count=old.count + 1)
    return sorted(found.values(), key=lambda s: -s.count * s.n * s.k)


def _named(text: str, scheme: Scheme | None) -> Model | None:
    if text not in MODELS:
        return None
    # as checkpoints call them: tensor parallelism goes by the name
    layers = tuple(
        Layer(f"{s.name}_proj", scheme or DEFAULT_SCHEME, s.n, s.k) for s in MODELS[text]
    )
    return Model(text, layers)


def cells_of(
    shapes: Sequence[Shape], device: Device, ms: Sequence[int], ops: Sequence[str] = OPS
) -> list[Cell]:
    """The cells of every shape, one shape after another.

    A run that is stopped then leaves shapes with all their rows, and shapes without any, which the
    ranker serves. Rows far apart would serve Ms between them with tiles that lose there.

    Raises:
        InputError: no op is left, such as "gemm" of a weight-only scheme.
    """
    return [_cell(shape, device, m, ops) for shape in shapes for m in sorted(ms)]


def _cell(shape: Shape, device: Device, m: int, ops: Sequence[str]) -> Cell:
    quantized = shape.scheme.activation != "none" and device.has_fp8
    possible = tuple(op for op in OPS if op in ops and (quantized or op == "linear"))
    if not possible:
        raise InputError(
            "no product of quantized operands can be tuned",
            got=f"--op gemm for {shape.scheme.name} on {device.name}",
            want="--op linear",
        )
    return Cell(
        shape.scheme, shape.n, shape.k, m, possible, shape.dtype,
        resolve_accumulate("auto", shape.k, device), resolve_numerics(Request(), device),
    )  # fmt: skip


def willing(cell: Cell, op: str, device: Device, refused: dict[str, str]) -> list[Backend]:
    """Backends that may serve a cell, in the default path's order, then the others.

    Args:
        refused: what the GPU at hand said no to: {backend: why}.
    """
    problem = cell.problem(op)
    found = []
    for backend in sorted(gemm.backends(), key=lambda b: not b.default):
        if backend.name in refused or backend.missing() or backend.why_not(problem, device):
            continue
        quantizes = backend.kind == "w8a8"
        if quantizes and (cell.scheme.activation == "none" or not device.has_fp8):
            continue
        if quantizes and cell.accumulate not in backend.accumulates:
            continue
        if not quantizes and op == "gemm":
            continue
        found.append(backend)
    kinds = {backend.kind for backend in found}
    # weight-only is no contender where the checkpoint's own arithmetic can be had
    if "w8a8" in kinds and cell.numerics == "scheme":
        found = [backend for backend in found if backend.kind == "w8a8"]
    # the last resort dequantizes the weight in each call
    return [b for b in found if b.name != "dequant"] or found


def space_of(backend: Backend, cell: Cell, device: Device) -> dict[Config, float]:
    """A backend's configurations in the ranker's order, with its µs."""
    return guesses(cell.problem(cell.ops[0]), device, backend)


def searched(backends: Iterable[Backend], cell: Cell, device: Device) -> Iterator[Backend]:
    """Those with something to choose."""
    for backend in backends:
        configs = iter(backend.configs(cell.problem(cell.ops[0]), device))
        if next(configs, None) is not None and next(configs, None) is not None:
            yield backend


def grid(text: str | None) -> tuple[int, ...]:
    """All Ms, or those that the user names. Raises InputError for no list of numbers."""
    if text is None:
        return M_GRID
    parts = text.replace(",", " ").split()
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise InputError("cannot read --m", got=repr(text), want="such as 1,16,4096")
    return tuple(sorted({int(part) for part in parts}))


def gaps(ms: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbours of the ascending Ms more than a factor of 2 apart: rows there lose between them.

    On the H200 rows at M = 64 and 256 served 128 rows at 0.69 to 0.95 of the untuned speed.
    """
    return [(low, high) for low, high in pairwise(ms) if high > 2 * low]
