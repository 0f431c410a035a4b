"""y = x · Wᵀ: the backends, in the order in which the default path asks them.

W8A8 first, weight-only after it; each file here is one backend, its kernels lie in `kernels/`.
Adding one is a file and an entry below; other packages add theirs through the entry point group
`anyfp8.backends` (the object is a `Backend`), which are asked after ours of the same kind.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib.metadata import entry_points

from anyfp8.errors import InputError
from anyfp8.gemm import (
    cutlass,
    deep_gemm,
    dequant,
    flashinfer,
    marlin,
    torch_scaled_mm,
    triton_block,
    triton_row,
    triton_w8a16,
)
from anyfp8.gemm.base import Backend

log = logging.getLogger(__name__)

BACKENDS: tuple[Backend, ...] = (
    cutlass.BACKEND,
    torch_scaled_mm.BACKEND,
    triton_row.BACKEND,
    triton_block.BACKEND,
    deep_gemm.BACKEND,
    flashinfer.BACKEND,
    marlin.BACKEND,
    triton_w8a16.BACKEND,
    dequant.BACKEND,
)


@cache
def backends() -> tuple[Backend, ...]:
    """Ours and other packages' backends, W8A8 first; one that does not load is left out, logged."""
    found = list(BACKENDS)
    for entry in entry_points(group="anyfp8.backends"):
        try:
            backend = entry.load()
        except Exception as error:
            log.warning("backend %s of entry point %s does not load: %s", entry.name, entry, error)
            continue
        names = [b.name for b in found]
        if isinstance(backend, Backend) and backend.name not in names:
            kinds = [b.kind for b in found]
            # before our first weight-only backend, or before dequant, which refuses nothing
            after = kinds.index("weight_only") if backend.kind == "w8a8" else len(found) - 1
            found.insert(after, backend)
    return tuple(found)


def backend(name: str) -> Backend:
    """The backend of a name. Raises InputError for an unknown one, listing those there are."""
    for found in backends():
        if found.name == name:
            return found
    raise InputError(
        "no such backend",
        got=repr(name),
        want=", ".join(b.name for b in backends()),
        hint="anyfp8 doctor says which of them work here",
    )
