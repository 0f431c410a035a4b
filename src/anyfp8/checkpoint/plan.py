"""CheckpointPlan: what each layer of a checkpoint is and which tensor is whose.

`planner.read_plan` makes it from headers and config alone; `inspect` prints it, `reader.Checkpoint`
reads by it, `linear` builds layers from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anyfp8.checkpoint.files import TensorFiles
from anyfp8.problem import Scheme


@dataclass(frozen=True)
class LayerPlan:
    """One quantized linear.

    Attributes:
        name: of the module, such as model.layers.0.mlp.up_proj.
        scheme: how it is quantized.
        algorithm: the format's own word for that.
        n, k: rows (outputs) and columns (inputs) of the weight.
        weight: name of the FP8 tensor.
        weight_scale: name of its scale; None only with allow_missing_scale, and means 1.
        scale_shape, scale_dtype: as stored.
        input_scale: name of the static activation scale, None without one.
        bias: name of the bias, None without one.
        extras: names of the layer's KV-cache and output scales.
    """

    name: str
    scheme: Scheme
    algorithm: str
    n: int
    k: int
    weight: str
    weight_scale: str | None
    scale_shape: tuple[int, ...]
    scale_dtype: str
    input_scale: str | None = None
    bias: str | None = None
    extras: tuple[str, ...] = ()

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of all tensors of the layer."""
        named = (self.weight, self.weight_scale, self.input_scale, self.bias, *self.extras)
        return tuple(name for name in named if name is not None)


@dataclass(frozen=True)
class CheckpointPlan:
    """What a checkpoint holds.

    Attributes:
        path: the folder or file.
        format: "modelopt", or "hf16" for an unquantized Hugging Face checkpoint.
        producer: tool and version that wrote it, "" unknown.
        algorithm: the format's word for its quantization, "" for none.
        kv_cache: the format's word for the KV cache, "" for 16 bits.
        config: config.json as it is.
        layers: module name -> quantized linear, in the order of the file.
        plain: names of tensors that are not quantized.
        optional: names of scales that are kept but belong to no quantized linear.
        rules: (ignore pattern, modules with a weight that it matched, a tied lm_head among them).
        warnings: what is odd but harmless, a sentence each.
        unaccounted: tensors without a place; () unless the plan was read with strict=False.
        files: where the tensors lie.
    """

    path: Path
    format: str
    producer: str
    algorithm: str
    kv_cache: str
    config: Mapping[str, Any]
    layers: Mapping[str, LayerPlan]
    plain: tuple[str, ...]
    optional: tuple[str, ...]
    rules: tuple[tuple[str, tuple[str, ...]], ...]
    warnings: tuple[str, ...]
    unaccounted: tuple[str, ...]
    files: TensorFiles = field(repr=False)

    @property
    def skipped(self) -> dict[str, int]:
        """How many optional tensors there are of each kind."""
        return dict(Counter(name.rpartition(".")[2] for name in self.optional))

    @property
    def schemes(self) -> dict[Scheme, int]:
        """How many layers have each scheme."""
        return dict(Counter(layer.scheme for layer in self.layers.values()))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(stored.nbytes for stored in self.files.tensors.values())
