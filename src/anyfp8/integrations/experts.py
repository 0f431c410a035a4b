"""model.layers.0.mlp.experts.3.up_proj.weight → a linear of that name, where a model fuses experts.

transformers renames what it loads, this library does not: a layer has one name, the checkpoint's,
in the plan, in the model and in what is saved. So the model's modules take the checkpoint's names.

The surprise: Mixtral's block is `block_sparse_moe` in every file and `mlp` in transformers 5. The
block is registered by the file's name, and the decoder layer finds it under both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from anyfp8.errors import CheckpointError
from anyfp8.linear.experts import LEAVES, fused_experts, split_experts, why_not_split

_EXPERT = re.compile(r"(.+)\.experts\.\d+\.(\w+)\.\w+")


def place_experts(model: Any, tensors: Iterable[str]) -> None:
    """Give a model, still on meta, the experts that a checkpoint has.

    Args:
        model: changed in place; where the checkpoint fuses experts too, it stays as it is.
        tensors: names of everything in the files.

    Raises:
        CheckpointError: experts that cannot be linears of their own; names the first one.
    """
    found: dict[str, set[str]] = {}
    first: dict[str, str] = {}
    for name in tensors:
        match = _EXPERT.fullmatch(name)
        if match:
            block, leaf = match.groups()
            found.setdefault(block, set()).add(leaf)
            first.setdefault(block, name)
    fused = fused_experts(model) if found else {}
    for block, leaves in found.items():
        own = _own_name(fused, block)
        if own is None:
            # no experts there, or ordinary ones: a tensor without a place is refused by name
            continue
        names = next((names for names in LEAVES if leaves == set(names)), None)
        refusal = why_not_split(fused[own]) if names else f"it has {', '.join(sorted(leaves))}"
        if names is None or refusal:
            raise CheckpointError(
                f"the expert {first[block]} has no place of its own in {type(model).__name__}",
                got=f"{own} holds all experts of a layer in one parameter, and {refusal}",
                want="experts with gate_proj, up_proj and down_proj, or w1, w3 and w2",
                hint="an engine with its own experts, such as SGLang or vLLM, reads these files",
            )
        split_experts(model, own, names)
        _rename(model, own.rpartition(".")[0], block)


def _own_name(fused: dict[str, Any], block: str) -> str | None:
    """The model's fused experts for a block of the checkpoint."""
    if f"{block}.experts" in fused:
        return f"{block}.experts"
    parent = block.rpartition(".")[0]
    near = [name for name in fused if name.rsplit(".", 2)[0] == parent]
    return near[0] if len(near) == 1 else None


def _rename(model: Any, old: str, new: str) -> None:
    if old == new:
        return
    parent, _, leaf = old.rpartition(".")
    layer = model.get_submodule(parent)
    # in its old place among the modules, which is the order of the files
    layer._modules = {
        (new.rpartition(".")[2] if key == leaf else key): module
        for key, module in layer._modules.items()
    }
    # a plain attribute: what the layer's forward asks for, and no second name of the weights
    object.__setattr__(layer, leaf, model.get_submodule(new))
