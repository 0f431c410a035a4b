"""experts.gate_up_proj_scale_inv[e] → experts.e.gate_proj.weight_scale_inv and ….up_proj….

transformers' fine-grained quantizer writes a mixture's FP8 weights one by one and their scales for
all experts of a layer together. Slices of a file are tensors too: nothing is read or copied here,
the planner sees every expert's scale under its own name.

The surprise: gate and up are quantized as one matrix. Where the block does not divide the experts'
width, one row of blocks lies in both, and no scale of the one is right for the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from anyfp8.checkpoint.files import StoredTensor, TensorFiles
from anyfp8.errors import CheckpointError

_FUSED = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)(|_scale_inv|_activation_scale)")
_LEAVES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def split_experts(files: TensorFiles, block: tuple[int, int] | None) -> TensorFiles:
    """The files with fused FP8 experts and their scales as tensors of single experts.

    Args:
        block: of the weight scales, None for a scale for each tensor.

    Raises:
        CheckpointError: an expert's scale that is there twice, or one that gate and up share.
    """
    rows = block[0] if block else 1
    split: dict[str, StoredTensor] = {}
    for name, stored in files.tensors.items():
        match = _FUSED.fullmatch(name)
        if match is None or not _is_split(stored, match[3]):
            split[name] = stored
            continue
        for part in _parts(stored, match, files.tensors, rows):
            if part.name in files.tensors:
                raise CheckpointError(
                    f"two tensors for {part.name} in {stored.file.name}",
                    got=f"{name} beside it",
                    want="one of them",
                    hint="export the checkpoint again",
                )
            split[part.name] = part
    return replace(files, tensors=split)


def _is_split(stored: StoredTensor, suffix: str) -> bool:
    if suffix == "_activation_scale":
        return len(stored.shape) == 1
    # 16-bit experts that are fused stay what they are
    return len(stored.shape) == 3 and (suffix != "" or stored.dtype == "F8_E4M3")


def _parts(
    stored: StoredTensor, match: re.Match[str], tensors: Mapping[str, StoredTensor], rows: int
) -> Iterator[StoredTensor]:
    experts, fused, suffix = match.groups()
    leaves = _LEAVES[fused]
    count, shape = stored.shape[0], stored.shape[1:]
    shared = not shape or shape[0] == 1
    if len(leaves) > 1 and not shared:
        width = _width(experts, tensors)
        if shape[0] % 2 or (suffix and width % rows):
            raise CheckpointError(
                f"cannot share out {stored.name} in {stored.file.name} between gate and up",
                got=f"{list(stored.shape)} for experts of width {width}",
                want=f"a width that is a multiple of the block's {rows} rows",
                hint="export the checkpoint with a scale for each expert's own linears",
            )
    pieces = 1 if shared else len(leaves)
    size = stored.size // (count * pieces)
    leaf_of_layer = suffix[1:] if suffix == "_activation_scale" else f"weight{suffix}"
    for expert in range(count):
        for i, leaf in enumerate(leaves):
            yield replace(
                stored,
                name=f"{experts}.{expert}.{leaf}.{leaf_of_layer}",
                shape=(shape[0] // pieces, *shape[1:]) if shape else (),
                start=stored.start + size * (expert * pieces + (0 if shared else i)),
                size=size,
            )


def _width(experts: str, tensors: Mapping[str, StoredTensor]) -> int:
    """Rows of an expert's gate; 0 where there is none."""
    fused, own = (tensors.get(f"{experts}.{n}") for n in ("gate_up_proj", "0.gate_proj.weight"))
    if fused is not None:
        return fused.shape[1] // 2
    return own.shape[0] if own is not None and own.shape else 0
