"""Which weights are linears: by name and shape, since a file of tensors has no modules.

A 2-D `*.weight` is a linear unless its module is an embedding, a router or a norm. Whoever has the
model at hand (`linear.convert`, calibration) knows better and passes the list instead.
"""

from __future__ import annotations

import re

_EMBEDDING = re.compile(r"(^|\.)(\w*embed\w*|wte|wpe|shared|relative_attention_bias)$")
# routers choose experts: a flipped choice costs more than the bytes saved, so tools leave them
_ROUTER = re.compile(r"(^|\.)(gate|router|shared_expert_gate|router\.\w+)$")
_NORM = re.compile(r"(norm\w*|ln_\w+|layernorm\w*)$", re.IGNORECASE)


def not_linear(name: str, shape: tuple[int, ...]) -> str:
    """Why a tensor is not the weight of a linear, a word or two; "" when it is one."""
    if not name.endswith(".weight"):
        return "not a weight"
    module = name[: -len(".weight")]
    if len(shape) != 2:
        return f"{len(shape)}-D"
    if _EMBEDDING.search(module):
        return "embedding"
    if _ROUTER.search(module):
        return "router"
    return "norm" if _NORM.search(module) else ""


def is_linear(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is the weight of a linear."""
    return not not_linear(name, shape)
