"""Layouts: the checkpoint formats that are written, and which of them takes a model's schemes.

ModelOpt's comes first, being what this library's main job speaks; what it has no algorithm for goes
to the first other one that holds it, and whoever writes says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch

from anyfp8.checkpoint import compressed_tensors, finegrained, modelopt
from anyfp8.checkpoint.files import TensorSpec
from anyfp8.checkpoint.formats import formats_for
from anyfp8.errors import InputError
from anyfp8.problem import QTensor, Scheme


class Layout(Protocol):
    """A format file that can write.

    `quantization_configs` returns what goes into config.json and into hf_quant_config.json, or
    None where that file isn't written.
    """

    def algorithm_for(self, scheme: Scheme) -> str: ...

    def layer_specs(self, name: str, scheme: Scheme, n: int, k: int) -> list[TensorSpec]: ...

    def layer_tensors(
        self, name: str, scheme: Scheme, weight: QTensor, input_scale: torch.Tensor | None
    ) -> dict[str, torch.Tensor]: ...

    def quantization_configs(
        self, layers: Mapping[str, Scheme], ignore: Iterable[str], kv_cache: str = ""
    ) -> tuple[dict[str, Any], dict[str, Any] | None]: ...


LAYOUTS: dict[str, Layout] = {
    "modelopt": modelopt,
    "compressed-tensors": compressed_tensors,
    "finegrained": finegrained,
}


def choose_layout(schemes: Iterable[Scheme], format: str | None = None) -> str:
    """The name of the layout to write.

    Args:
        schemes: of all layers.
        format: a name of `LAYOUTS`, which must hold them; None takes the first that does.

    Raises:
        InputError: no such layout, or none that holds all schemes.
    """
    schemes = list(dict.fromkeys(schemes))
    if format is not None and format not in LAYOUTS:
        raise InputError("not a format to write", got=format, want=", ".join(LAYOUTS))
    candidates = [format] if format else list(LAYOUTS)
    for name in candidates:
        several = len(schemes) > 1 and name == "finegrained"
        if not several and all(name in formats_for(scheme) for scheme in schemes):
            return name
    if format is not None:
        # these say what the format holds and which other one would do
        for scheme in schemes:
            LAYOUTS[format].algorithm_for(scheme)
        LAYOUTS[format].quantization_configs({s.name: s for s in schemes}, [])
    raise InputError(
        "no format holds these layers together",
        got=", ".join(scheme.name for scheme in schemes),
        want=", ".join(f"{s.name} in {' or '.join(formats_for(s)) or 'none'}" for s in schemes),
        hint="write it in one scheme: --scheme",
    )
