"""y = run(x, prepare(w), config): what a backend is; every file beside this one is one of them.

A backend serves problems of one kind: "w8a8" multiplies quantized activations, "weight_only" takes
them in 16 or 32 bits. It refuses with a reason, names its configurations, prepares a weight once at
load time and runs. Everything but `run` works on a machine without Triton and without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from anyfp8.errors import InputError
from anyfp8.problem import Problem, QTensor, Scheme

if TYPE_CHECKING:
    from anyfp8.device import Device


@dataclass(frozen=True)
class Config:
    """What a tuned table may store for a backend; backends without parameters use it as it is."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Config:
        """The configuration of a table row. Raises InputError for a field that it does not have."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise InputError(
                f"not a {cls.__name__}",
                got=", ".join(unknown),
                want=", ".join(sorted(known)) or "no fields",
            )
        return cls(**values)


class PreparedWeight:
    """A weight as one backend stores it. `layout` says which backends can read it."""

    scheme: Scheme

    @property
    def layout(self) -> str:
        raise NotImplementedError

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) of the checkpoint's weight."""
        raise NotImplementedError

    def canonical(self) -> QTensor:
        """The codes [N, K] and fp32 scales that the checkpoint had, bit for bit."""
        raise NotImplementedError

    def tensors(self) -> dict[str, torch.Tensor]:
        """What is kept, by name; a module registers these as buffers and moves them."""
        raise NotImplementedError

    @cached_property
    def stored(self) -> tuple[torch.Tensor, ...]:
        """`tensors()` without their names, in order."""
        return tuple(self.tensors().values())

    def replaced(self, tensors: dict[str, torch.Tensor]) -> PreparedWeight:
        """The same weight on other storage (another device, shared memory)."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors().values())


@dataclass(frozen=True, eq=False)
class CanonicalWeight(PreparedWeight):
    """Codes [N, K] uint8 row-major and fp32 scales, as they are stored in memory by most backends.

    Attributes:
        codes: [N, K] uint8.
        scale: fp32; [] , [N, 1] or [ceil(N/bn), ceil(K/bk)].
    """

    codes: torch.Tensor
    scale: torch.Tensor
    scheme: Scheme

    @property
    def layout(self) -> str:
        return "canonical"

    @property
    def shape(self) -> tuple[int, int]:
        return (self.codes.shape[0], self.codes.shape[1])

    def canonical(self) -> QTensor:
        return QTensor(self.codes.view(torch.float8_e4m3fn), self.scale, self.scheme.block)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"codes": self.codes, "scale": self.scale}

    def replaced(self, tensors: dict[str, torch.Tensor]) -> CanonicalWeight:
        return CanonicalWeight(tensors["codes"], tensors["scale"], self.scheme)


def canonical_weight(weight: QTensor, scheme: Scheme) -> CanonicalWeight:
    """Check a weight against its scheme and make its codes and scales contiguous.

    Raises:
        InputError: the scale's shape is not the one that the scheme and [N, K] ask for.
    """
    n, k = weight.codes.shape
    want = scheme.weight_scale_shape(n, k)
    scale = weight.scale.float()
    if scheme.weight == "tensor" and scale.numel() == 1:
        scale = scale.reshape(())
    if tuple(scale.shape) != want:
        raise InputError(
            f"the weight scale does not fit a {scheme.name} weight of {n}x{k}",
            got=f"shape {tuple(weight.scale.shape)}",
            want=f"shape {want}",
        )
    return CanonicalWeight(weight.codes.contiguous(), scale.contiguous(), scheme)


class Backend:
    """One way to multiply. Subclasses set the class attributes and override the methods.

    Attributes:
        name: file name, table string, command line string, environment value.
        kind: "w8a8" or "weight_only".
        layout: layout of the weight that `prepare` returns.
        reads: layouts that `run` accepts; "any" where it goes through `canonical()`.
        config_class: its `Config`.
        default: whether the default path may take it; False for those only a table or a user names.
        batch_invariant: whether one config gives a row the same bits whatever M is.
        accumulates: accumulate modes that it can honour.
    """

    name: ClassVar[str]
    kind: ClassVar[str]
    layout: ClassVar[str] = "canonical"
    reads: ClassVar[tuple[str, ...]] = ("canonical",)
    config_class: ClassVar[type[Config]] = Config
    default: ClassVar[bool] = True
    batch_invariant: ClassVar[bool] = False
    accumulates: ClassVar[tuple[str, ...]] = ("fast", "fp32_128")

    def missing(self) -> str | None:
        """Which package it needs and does not find, as a clause; None when it can be imported."""
        return None

    def layout_of(self, config: Config) -> str:
        """Layout that `prepare` should give when this configuration was chosen."""
        return self.layout

    def can_read(self, layout: str) -> bool:
        return layout in self.reads or "any" in self.reads

    def why_not(self, problem: Problem, device: Device) -> str | None:
        """A clause that completes "it was refused because it …", or None when it is willing.

        Depends on the problem, the device's facts and the installed packages only.
        """
        raise NotImplementedError

    def probe(self, problem: Problem, device: Device) -> str | None:
        """Ask the GPU at hand, once per recipe, whether the kernel works; like `why_not`."""
        return None

    def default_config(self, problem: Problem, device: Device) -> Config:
        return self.config_class()

    def configs(self, problem: Problem, device: Device) -> Iterable[Config]:
        """Every legal configuration: the tuner's search space."""
        return (self.default_config(problem, device),)

    def illegal(self, config: Config, problem: Problem, device: Device) -> str | None:
        """Why a configuration cannot run there ("needs 245,760 B of shared memory …"), or None.

        The one legality predicate: search space, table loader and default all ask it.
        """
        return None

    def waves(self, config: Config, problem: Problem, device: Device) -> int:
        """How often the SMs are filled with tiles of a configuration; 1 where that is not known."""
        return 1

    def tiles_an_sm(self, config: Config, problem: Problem, device: Device) -> int:
        """How many tiles the busiest SM computes, at once or not; 1 where that is not known."""
        return 1

    def lowered(self, config: Config, problem: Problem, device: Device) -> Config | None:
        """The nearest legal configuration to one that is not, or None."""
        return None

    def prepare(self, weight: QTensor, scheme: Scheme, x_dtype: str) -> PreparedWeight:
        """Turn a canonical weight into what `run` reads, once at load time.

        Args:
            weight: codes [N, K] and fp32 scales in the canonical layout of `scheme`.
            x_dtype: "bf16", "fp16" or "fp32", of the activations to come.
        """
        return canonical_weight(weight, scheme)

    def restored(
        self, layout: str, tensors: Sequence[torch.Tensor], problem: Problem
    ) -> PreparedWeight:
        """The prepared weight whose `tensors()` these are, in their order: the way back for ops.

        Args:
            layout: "canonical", or this backend's own.
        """
        codes, scale = tensors
        return CanonicalWeight(codes, scale, problem.scheme)

    def run(
        self,
        x: torch.Tensor | QTensor,
        prepared: PreparedWeight,
        problem: Problem,
        config: Config,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Multiply.

        Args:
            x: [M, K]; a QTensor for "w8a8", else a tensor of the problem's x_dtype.
            bias: [N] or None. out: [M, N] of the problem's out_dtype, or None to allocate it.

        Returns:
            [M, N] of the problem's out_dtype.
        """
        raise NotImplementedError
