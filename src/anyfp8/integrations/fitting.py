"""checkpoint ↔ model: what one has and the other has not, where that is no fault.

A model may leave out what its files hold, and a head may be the embedding or its own. transformers
knows both while it loads; here they are settled before anything is read.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from anyfp8.checkpoint import Checkpoint
from anyfp8.checkpoint.files import StoredTensor, TensorFiles

log = logging.getLogger(__name__)


def fitted(model: Any, checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint without what the model itself leaves out, such as DeepSeek's MTP layer."""
    plan = checkpoint.plan
    layers = {name: layer for name, layer in plan.layers.items() if not _left_out(model, name)}
    left = len(plan.layers) - len(layers)
    if left == 0:
        return checkpoint
    log.warning(
        "%s: %d layers that %s leaves out are not loaded",
        plan.path.name,
        left,
        type(model).__name__,
    )
    return Checkpoint(replace(plan, layers=layers))


def untied(config: Mapping[str, Any], files: TensorFiles) -> Mapping[str, Any]:
    """The config, untied where the files hold an lm_head that is not the embedding.

    What transformers does too. A tool that quantizes the head of a tied model stores it so.
    """
    head, embedding = (_tensor(files, leaf) for leaf in ("lm_head.weight", "embed_tokens.weight"))
    if not config.get("tie_word_embeddings") or head is None or embedding is None:
        return config
    same = head.dtype == embedding.dtype and head.shape == embedding.shape
    if same and torch.equal(files.read(head.name), files.read(embedding.name)):
        return config
    log.warning(
        "%s: tie_word_embeddings, but %s is not %s: kept apart",
        files.path.name,
        head.name,
        embedding.name,
    )
    return {**config, "tie_word_embeddings": False}


def _tensor(files: TensorFiles, leaf: str) -> StoredTensor | None:
    names = [name for name in files.tensors if name == leaf or name.endswith(f".{leaf}")]
    return files.tensors[names[0]] if len(names) == 1 else None


def _left_out(model: Any, name: str) -> bool:
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return submodule_of(model, name) is None and any(
        re.search(pattern, f"{name}.weight") for pattern in patterns
    )


def submodule_of(model: Any, name: str) -> Any | None:
    """A module by its name, None where there is none."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None
