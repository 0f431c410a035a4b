"""y = Σ_ranks x_r · W_rᵀ: which part of a transformers model a tensor-parallel rank holds.

The model's own plan (`base_model_tp_plan`) says which linears are split by rows of W and which by
columns. Attention is shared out in whole groups of heads and everything else evenly, unevenly where
it must be; embeddings, norms and the head stay whole on every rank.

The surprise: the attention modules need no change. They take the number of heads from the shape of
what the projections return; only their query-to-key ratio is set, where key heads are repeated.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from anyfp8.checkpoint.reader import LayerData
from anyfp8.checkpoint.shard import partition, shard_layer, shard_scheme
from anyfp8.errors import InputError
from anyfp8.linear.experts import LEAVES, Experts
from anyfp8.problem import Scheme

_STYLES = {"colwise": "column", "rowwise": "row"}
# whole on every rank
_WHOLE = ("replicate", "gather", "sequence_parallel")
# whose experts the plan shares out: gate and up by rows, down by columns
_EXPERTS = {
    **dict.fromkeys((names[i] for names in LEAVES for i in (0, 1)), "column"),
    **dict.fromkeys((names[2] for names in LEAVES), "row"),
}
_UNITS = (128, 64, 32, 16, 8, 4, 2, 1)

Bounds = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Part:
    """How one linear is shared out.

    Attributes:
        style: "column" (rows of W) or "row" (columns of W).
        bounds: (start, stop) of every rank.
    """

    style: str
    bounds: Bounds


@dataclass(frozen=True)
class Parallel:
    """A model's shares on one rank.

    Attributes:
        group: process group, None for the default one.
        rank, size: of the group.
        parts: module name -> how it is shared out.
    """

    group: Any
    rank: int
    size: int
    parts: dict[str, Part]

    def scheme(self, name: str, scheme: Scheme) -> Scheme:
        """The scheme of a rank's part of a layer."""
        part = self.parts.get(name)
        return shard_scheme(scheme, part.style, part.bounds) if part else scheme

    def shape(self, name: str, n: int, k: int) -> tuple[int, int]:
        """(N, K) of this rank's part."""
        part = self.parts.get(name)
        if part is None:
            return n, k
        start, stop = part.bounds[self.rank]
        return (stop - start, k) if part.style == "column" else (n, stop - start)

    def keeps_bias(self, name: str) -> bool:
        """Whether this rank adds the bias of a layer."""
        part = self.parts.get(name)
        return part is None or part.style == "column" or self.rank == 0

    def layer(self, layer: LayerData) -> LayerData:
        """This rank's part of a quantized linear."""
        part = self.parts.get(layer.name)
        return shard_layer(layer, part.style, part.bounds, self.rank) if part else layer

    def tensor(self, name: str, value: torch.Tensor) -> torch.Tensor | None:
        """This rank's part of an unquantized tensor; None where another rank holds it."""
        module, _, leaf = name.rpartition(".")
        part = self.parts.get(module)
        if part is None:
            return value
        if leaf == "bias" and part.style == "row":
            return value if self.rank == 0 else None
        start, stop = part.bounds[self.rank]
        return value.narrow(0 if part.style == "column" else 1, start, stop - start).contiguous()


@dataclass(frozen=True)
class _Sum:
    """Forward hook: the sum of a module's outputs over all ranks, in their dtype."""

    group: Any

    def __call__(self, module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(output, group=self.group)
        return output


def group_of(tp: Any, cuda: bool) -> Any:
    """The process group of `load`'s `tp`; None for one rank.

    Args:
        tp: number of ranks, True for all there are, or a process group.
        cuda: whether the ranks have GPUs: NCCL, else gloo, where torchrun has started them.

    Raises:
        InputError: no process group, or one of another size.
    """
    if isinstance(tp, dist.ProcessGroup):
        return tp
    if type(tp) is int and tp == 1:
        return None
    if not dist.is_available() or (
        not dist.is_initialized() and not dist.is_torchelastic_launched()
    ):
        raise InputError(
            f"tp={tp} without a process group",
            got="torch.distributed is not initialised",
            want="one process for each rank",
            hint="torchrun --nproc-per-node N script.py, or torch.distributed.init_process_group",
        )
    if not dist.is_initialized():
        dist.init_process_group("nccl" if cuda else "gloo")
    size = dist.get_world_size()
    if tp is not True and tp != size:
        raise InputError(
            "not the number of ranks",
            got=f"tp={tp!r}",
            want=f"{size}, the processes there are, True, or a process group",
        )
    return dist.group.WORLD


def share_out(model: Any, group: Any) -> Parallel:
    """Decide every linear's part and make the skeleton's linears that small.

    Args:
        model: on meta, of `skeleton`; changed in place.
        group: of `group_of`.

    Raises:
        InputError: a model without a plan, a style that is not run, or more ranks than heads.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    parts: dict[str, Part] = {}
    for name, style in _styles(model).items():
        module = model.get_submodule(name)
        parts[name] = Part(style, _bounds(model, name, module, style, size))
    found = Parallel(group, rank, size, parts)
    for name in parts:
        old = model.get_submodule(name)
        n, k = found.shape(name, old.out_features, old.in_features)
        bias = old.bias is not None and found.keeps_bias(name)
        new = torch.nn.Linear(k, n, bias=bias, device="meta", dtype=old.weight.dtype)
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, new.eval())
    _set_ratios(model, found)
    return found


def add_sums(model: Any, parallel: Parallel) -> None:
    """Add up the outputs of row-parallel linears, once they are what they stay.

    Experts are added up after they are mixed: once for a layer, not once for every expert.
    """
    places = {_summed(model, name): None for name, p in parallel.parts.items() if p.style == "row"}
    for name in places:
        model.get_submodule(name).register_forward_hook(_Sum(parallel.group))


def _summed(model: Any, name: str) -> str:
    experts = name.rsplit(".", 2)[0]
    return experts if isinstance(model.get_submodule(experts), Experts) else name


def _styles(model: Any) -> dict[str, str]:
    plan = getattr(model.config, "base_model_tp_plan", None) or {}
    if not plan:
        raise InputError(
            f"{type(model).__name__} has no tensor-parallel plan",
            want="a model whose config has base_model_tp_plan",
            hint="load it without tp",
            got="base_model_tp_plan is empty",
        )
    prefix = model.base_model_prefix
    found: dict[str, str] = {}
    shared = any(".experts" in pattern for pattern in plan)
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        if shared and re.search(r"\.experts\.\d+\.\w+$", name):
            found[name] = _EXPERTS[name.rpartition(".")[2]]
            continue
        for pattern, style in plan.items():
            if not fnmatch.fnmatchcase(name, f"{prefix}.{pattern}"):
                continue
            if style in _STYLES:
                found[name] = _STYLES[style]
            elif not any(word in style for word in _WHOLE):
                raise InputError(
                    f"cannot share out {name}",
                    got=f"style {style!r} of the model's tensor-parallel plan",
                    want=", ".join(_STYLES),
                    hint="load it without tp",
                )
    return found


def _bounds(model: Any, name: str, module: Any, style: str, size: int) -> Bounds:
    total = module.out_features if style == "column" else module.in_features
    heads = _heads(model, name)
    leaf = name.rpartition(".")[2]
    if heads is None:
        return partition(total, size, _unit(total, size))
    queries, keys, width = heads
    if leaf in ("k_proj", "v_proj"):
        if size > keys and size % keys == 0:
            # every key head serves several ranks
            owners = [rank * keys // size for rank in range(size)]
            return tuple((width * owner, width * (owner + 1)) for owner in owners)
        return _shared(name, total, size, width, keys, queries)
    repeated = size > keys and size % keys == 0
    unit = width if repeated else width * (queries // keys)
    return _shared(name, total, size, unit, keys, queries)


def _shared(name: str, total: int, size: int, unit: int, keys: int, queries: int) -> Bounds:
    if total // unit < size or total % unit:
        raise InputError(
            f"cannot share out {name} among {size} ranks",
            got=f"{queries} query heads over {keys} key heads",
            want=f"at most {keys} ranks, or a multiple of {keys} up to {queries}",
        )
    return partition(total, size, unit)


def _heads(model: Any, name: str) -> tuple[int, int, int] | None:
    """(query heads, key heads, width of a head) of the attention that a linear is part of."""
    parent, _, leaf = name.rpartition(".")
    width = getattr(model.get_submodule(parent), "head_dim", None)
    if leaf not in ("q_proj", "k_proj", "v_proj", "o_proj") or not width:
        return None
    queries = model.config.num_attention_heads
    return queries, getattr(model.config, "num_key_value_heads", None) or queries, width


def _unit(total: int, size: int) -> int:
    if total % size == 0:
        return total // size
    return next(
        unit for unit in _UNITS if total % unit == 0 and (total // unit >= size or unit == 1)
    )


def _set_ratios(model: Any, parallel: Parallel) -> None:
    for name, module in model.named_modules():
        if not hasattr(module, "num_key_value_groups"):
            continue
        parts: Sequence[Part | None] = [
            parallel.parts.get(f"{name}.{leaf}") for leaf in ("q_proj", "k_proj")
        ]
        if parts[0] is not None and parts[1] is not None:
            widths = [stop - start for start, stop in (p.bounds[parallel.rank] for p in parts if p)]
            module.num_key_value_groups = widths[0] // widths[1]
