"""tensor → its place: part of a layer, unquantized, kept for saving, redundant; or none, refused.

No tensor is skipped because its name is unknown: a scale that nobody asks for is the commonest sign
that a weight has lost its own.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import NoReturn

from anyfp8.checkpoint.beside import INPUT_SCALES, KNOWN, OPTIONAL, WEIGHT_SCALES
from anyfp8.checkpoint.files import StoredTensor
from anyfp8.checkpoint.plan import LayerPlan
from anyfp8.errors import CheckpointError

FP8 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
_SCALE_LIKE = re.compile(r"(weight|input|activation|act)_?(scale|zero_point)|scale_(weight|input)")


def find_places(
    tensors: Mapping[str, StoredTensor], layers: Mapping[str, LayerPlan], redundant: Sequence[str]
) -> dict[str, str]:
    """tensor name -> "layer", "plain", "optional", "redundant", or "" for none.

    Args:
        tensors: of the checkpoint. layers: the quantized linears.
        redundant: names of tensors that say nothing.
    """
    places = dict.fromkeys(tensors, "")
    for layer in layers.values():
        places.update(dict.fromkeys(layer.tensors, "layer"))
    places.update(dict.fromkeys(redundant, "redundant"))
    for name, stored in tensors.items():
        if not places[name]:
            module, _, leaf = name.rpartition(".")
            module = module.removesuffix(".weight") if leaf == "scale" else module
            places[name] = _place(tensors, layers, module, leaf, stored.dtype)
    return places


def _place(
    tensors: Mapping[str, StoredTensor],
    layers: Mapping[str, LayerPlan],
    module: str,
    leaf: str,
    dtype: str,
) -> str:
    if dtype in FP8 or module in layers:
        # nothing but the known names may stand beside a quantized weight
        unused = module in layers and leaf in INPUT_SCALES
        return "optional" if unused and layers[module].scheme.dynamic else ""
    if leaf in OPTIONAL:
        return "optional"
    if _SCALE_LIKE.search(leaf):
        known = leaf in WEIGHT_SCALES or leaf in INPUT_SCALES
        return "optional" if known and f"{module}.weight" in tensors else ""
    return "plain"


def refuse_unaccounted(tensors: Mapping[str, StoredTensor], names: Sequence[str]) -> NoReturn:
    """Raise CheckpointError for tensors without a place, naming the first."""
    fused = next((n for n in names if tensors[n].dtype in FP8 and len(tensors[n].shape) > 2), None)
    if fused is not None:
        raise CheckpointError(
            f"cannot use the FP8 tensor {fused} in {tensors[fused].file.name}",
            got=f"{tensors[fused].dtype} {list(tensors[fused].shape)}, experts in one tensor",
            want="a weight [N, K] and its scale for each expert",
            hint="export it with an expert's linears apart, as llm-compressor and ModelOpt do",
        )
    name = names[0]
    stored = tensors[name]
    module, _, leaf = name.rpartition(".")
    near = difflib.get_close_matches(leaf, KNOWN, 1)
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    raise CheckpointError(
        f"no place for the tensor {name} in {stored.file.name}{more}",
        got=f"{stored.dtype} {list(stored.shape)}",
        want=f"known names beside a weight, such as {module}.{near[0] if near else KNOWN[0]}",
        hint="a misspelt or foreign scale: rename or remove it"
        if "scale" in leaf
        else "export the checkpoint again",
    )
