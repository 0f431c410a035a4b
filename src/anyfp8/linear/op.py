"""anyfp8::linear(x, weight, bias, input_scale, layer) -> y: a layer as one node of a graph.

`torch.compile` sees an opaque op whose only argument besides tensors is a string of pure facts. The
plan behind it is made when the layer is prepared and looked up when the op *runs*, so the M that
meets the tuned table is the real one, whatever M was traced. Elsewhere tuned tables are lost here:
their look-up answers nothing while tracing.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from anyfp8 import gemm
from anyfp8.linear.calls import find, in_full
from anyfp8.linear.plans import LayerFacts, plan_of
from anyfp8.replay import pointers_of


@lru_cache(maxsize=4096)
def _rows_of_weight(layer: str) -> int:
    return LayerFacts.parse(layer).problem.n


def _run(
    x: torch.Tensor,
    weight: list[torch.Tensor],
    bias: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    layer: str,
) -> torch.Tensor:
    call = find(layer, x)
    where = None if call is None else pointers_of(weight, call.device)
    if call is not None and where is not None:
        y = call.again(x, where, bias, input_scale)
        if y is not None:
            return y
    plan = plan_of(layer, weight[0].device)
    owner = gemm.backend(plan.weight_backend)
    prepared = owner.restored(plan.layout, weight, plan.problem)
    return in_full(layer, plan, prepared, x, bias, input_scale)


def _fake(
    x: torch.Tensor,
    weight: list[torch.Tensor],
    bias: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    layer: str,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], _rows_of_weight(layer)))


# kept alive for as long as the process lives: a library takes its ops along when it goes
_LIBRARY = torch.library.Library("anyfp8", "FRAGMENT")
_LIBRARY.define(
    "linear(Tensor x, Tensor[] weight, Tensor? bias, Tensor? input_scale, str layer) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("linear", _run, _key)
torch.library.register_fake("anyfp8::linear", _fake, lib=_LIBRARY)

traced_linear = torch.ops.anyfp8.linear.default
