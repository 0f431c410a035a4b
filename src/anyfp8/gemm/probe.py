"""works(backend, recipe, GPU)? Tried once on small numbers before a library's kernel is trusted.

A kernel that raises, or whose result is not the product, takes its backend out of the running on
that GPU; the reason is kept and shown.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from anyfp8 import reference
from anyfp8.device import current_device
from anyfp8.gemm.base import Backend, canonical_weight
from anyfp8.problem import DTYPES, Problem, QTensor, Scheme

log = logging.getLogger(__name__)

# a wrong scale layout errs by tens of percent, a short accumulator by less than one
_TOLERANCE = 0.02


def judged(backend: Backend, problem: Problem) -> str | None:
    """Why a backend fails on the GPU at hand, as a clause; None where it works.

    Remembered by all of the problem but its shape.
    """
    return _judged(backend, torch.cuda.current_device(), replace(problem, m=64, n=256, k=640))


@cache
def _judged(backend: Backend, index: int, problem: Problem) -> str | None:
    place = torch.device("cuda", index)
    try:
        x, weight, bias, want = trial(problem, place)
        config = backend.default_config(problem, current_device())
        y = backend.run(x, weight, problem, config, bias).double().cpu()
    except (RuntimeError, ValueError, NotImplementedError, AttributeError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        log.info("%s does not work on %s: %s", backend.name, place, first)
        return f"failed its trial on this GPU: {first}"
    error = ((y - want).norm(dim=1) / want.norm(dim=1)).max().item()
    if not error < _TOLERANCE:
        log.warning("%s computes wrong products on %s: error %.3g", backend.name, place, error)
        return f"gave a wrong product in its trial on this GPU (relative error {error:.3g})"
    return None


def trial(problem: Problem, place: torch.device) -> tuple[Any, ...]:
    """(x [M, K], weight [N, K], bias, x · wᵀ in fp64) with scales that all differ."""
    m, n, k, scheme = problem.m, problem.n, problem.k, problem.scheme
    generator = torch.Generator().manual_seed(0)
    spread = torch.logspace(-2, 2, n)[torch.randperm(n, generator=generator)]
    w = torch.randn(n, k, generator=generator) * spread[:, None]
    x = torch.randn(m, k, generator=generator) * torch.logspace(-1, 1, m)[:, None]
    dynamic = scheme if scheme.dynamic else Scheme(scheme.weight, "tensor", True)
    q = reference.quantize_activation(x, dynamic)
    weight = reference.quantize_weight(w, scheme)
    assert q is not None, "probes are for schemes that quantize activations"
    want = reference.dequantize(q).double() @ reference.dequantize(weight).double().T
    moved = QTensor(q.data.to(place), q.scale.to(place), q.block)
    stored = canonical_weight(
        QTensor(weight.data.to(place), weight.scale.to(place), weight.block), scheme
    )
    bias = torch.zeros(n, dtype=DTYPES[problem.out_dtype], device=place) if problem.bias else None
    return moved, stored, bias, want
