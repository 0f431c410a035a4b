"""Checkpoint: the tensors of a plan, read one layer at a time into canonical form.

Canonical, whatever the format: codes [N, K] uint8 e4m3fn, weight_scale fp32 [] or [N, 1] or
[ceil(N/bn), ceil(K/bk)], input_scale fp32 [] or None. NaN codes (0x7F, 0xFF) are refused here, the
first time that a weight's bytes are seen, so that no kernel has to test for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from anyfp8 import reference
from anyfp8.checkpoint.files import StoredTensor
from anyfp8.checkpoint.plan import CheckpointPlan, LayerPlan
from anyfp8.checkpoint.planner import read_plan
from anyfp8.checkpoint.scales import canonical_scale
from anyfp8.errors import CheckpointError, InputError
from anyfp8.problem import QTensor, Scheme

# searched for NaN codes at a time: 26 ms for 512 MiB; 34 in half of it, 50 in a sixteenth (EPYC)
_NAN_BYTES = 1 << 19
_largest = np.maximum.reduce


@dataclass(frozen=True, eq=False)
class LayerData:
    """The tensors of one quantized linear, canonical, on the CPU.

    Attributes:
        name: of the module.
        scheme: how it is quantized.
        weight: data [N, K] uint8, e4m3fn codes without NaN, contiguous; scale fp32, [] or [N, 1] or
            [ceil(N/bn), ceil(K/bk)].
        input_scale: fp32 [] of a static layer, else None. Weight-only kernels leave it alone,
            savers write it back.
        bias: [N] in its stored dtype, or None.
        extras: KV-cache and output scales by leaf name, as stored.
    """

    name: str
    scheme: Scheme
    weight: QTensor
    input_scale: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    extras: dict[str, torch.Tensor] = field(default_factory=dict)


class Checkpoint:
    """A checkpoint that reads what it is asked for and keeps nothing.

    Attributes:
        plan: what is in it.
    """

    def __init__(self, plan: CheckpointPlan) -> None:
        self.plan = plan

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor as stored, in memory of its own. Raises CheckpointError for an unknown name."""
        return self.plan.files.read(name)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All unquantized tensors (`plan.plain`), one at a time, in the order of the files."""
        for name in self.plan.plain:
            yield name, self.tensor(name)

    def layers(self) -> Iterator[LayerData]:
        """All quantized linears, one at a time, in the order of the files."""
        for name in self.plan.layers:
            yield self.layer(name)

    def layer(self, name: str, device: torch.device | None = None) -> LayerData:
        """One quantized linear.

        Args:
            device: where its codes go, and are searched for NaN; all else stays on the CPU.

        Raises:
            CheckpointError: no such layer, or its weight holds NaN codes.
        """
        planned = self._planned(name)
        weight = self.tensor(planned.weight).view(torch.uint8).to(device or "cpu")
        _refuse_nan(weight, self.plan.files.tensors[planned.weight])
        return LayerData(
            name,
            planned.scheme,
            QTensor(weight, self.weight_scale(name), planned.scheme.block),
            self.input_scale(name),
            self.tensor(planned.bias) if planned.bias else None,
            {extra[len(name) + 1 :]: self.tensor(extra) for extra in planned.extras},
        )

    def weight_scale(self, name: str) -> torch.Tensor:
        """The canonical weight scale of a quantized linear, fp32."""
        planned = self._planned(name)
        if planned.weight_scale is None:
            return torch.ones(())
        stored = self.tensor(planned.weight_scale)
        return canonical_scale(stored, planned.scheme, planned.n, planned.k)

    def input_scale(self, name: str) -> torch.Tensor | None:
        """The static activation scale of a quantized linear, fp32 []; None without one."""
        stored = self._planned(name).input_scale
        return self.tensor(stored).float().reshape(()) if stored else None

    def _planned(self, name: str) -> LayerPlan:
        planned = self.plan.layers.get(name)
        if planned is None:
            raise CheckpointError(
                f"no quantized layer {name} in {self.plan.path.name}",
                got=f"{len(self.plan.layers)} other layers",
                want="the name of one of them",
                hint="anyfp8 inspect FOLDER --layers lists them",
            )
        return planned


def open_checkpoint(
    path: str | Path,
    *,
    allow_missing_scale: bool = False,
    dynamic_fallback: bool = False,
    strict: bool = True,
) -> Checkpoint:
    """Plan a checkpoint folder and open it for reading; arguments and errors are `read_plan`'s."""
    return Checkpoint(
        read_plan(path, allow_missing_scale=allow_missing_scale, dynamic_fallback=dynamic_fallback)
    )


def _refuse_nan(codes: torch.Tensor, stored: StoredTensor) -> None:
    if not (_nan_here(codes) if codes.device.type == "cpu" else _nan_there(codes)):
        return
    bad = ((codes & 0x7F) == 0x7F).nonzero()
    raise CheckpointError(
        f"NaN codes in the weight {stored.name} in {stored.file.name}",
        got=f"{len(bad)} of them, the first at {bad[0].tolist()}",
        want="finite FP8 values",
        hint="the model was quantized with NaN or overflowing weights: quantize it again",
    )


def _nan_here(codes: torch.Tensor) -> bool:
    # 0xFF is the largest byte and 0x7F the largest signed one: two maxima instead of a mask, the
    # second out of the cache, and numpy's, which are many times as fast as torch's on bytes
    unsigned = codes.view(-1).numpy()
    signed = unsigned.view(np.int8)
    parts = (slice(i, i + _NAN_BYTES) for i in range(0, len(unsigned), _NAN_BYTES))
    return any(_largest(unsigned[p]) == 0xFF or _largest(signed[p]) == 0x7F for p in parts)


def _nan_there(codes: torch.Tensor) -> bool:
    # one answer comes back from the device
    return bool((codes.amax() == 0xFF) | (codes.view(torch.int8).amax() == 0x7F))


@dataclass(frozen=True, eq=False)
class Merge:
    """Several linears over one input as one.

    Attributes:
        layer: the fused linear, parts stacked along N.
        sizes: rows of each part.
        relative_error: of requantizing, in the Frobenius norm over all parts; 0 without it.
    """

    layer: LayerData
    sizes: tuple[int, ...]
    relative_error: float = 0.0


def merge_layers(name: str, parts: Sequence[LayerData], *, requantize: bool = False) -> Merge:
    """Stack linears over the same input (q/k/v, gate/up) into one, exactly.

    Equal per-tensor scales stay one scale. Different ones are repeated per row, so that the merged
    layer is per-channel and no code changes. A static input_scale becomes the largest of the parts'
    (x is quantized once; the larger range holds all). Extras are kept under the part's leaf name.

    Args:
        name: of the fused layer.
        parts: in order; same K, same scheme.
        requantize: where per-tensor scales differ, keep one (the largest) and encode the other
            parts again: lossy, the loss is reported.

    Raises:
        InputError: no parts, or parts that don't fit together.
    """
    _check_parts(name, parts)
    first = parts[0]
    scheme, error = first.scheme, 0.0
    weights = [part.weight.codes for part in parts]
    scales = [part.weight.scale for part in parts]
    if scheme.weight == "tensor":
        if all(torch.equal(scale, scales[0]) for scale in scales):
            scale = scales[0]
        elif requantize:
            scale = torch.stack(scales).amax()
            weights, error = _requantize(parts, scale)
        else:
            scheme = replace(scheme, weight="channel")
            rows = [s.expand(len(w), 1) for s, w in zip(scales, weights, strict=True)]
            scale = torch.cat(rows)
    else:
        scale = torch.cat(scales)
    inputs = [part.input_scale for part in parts if part.input_scale is not None]
    biases = [part.bias for part in parts if part.bias is not None]
    layer = LayerData(
        name,
        scheme,
        QTensor(torch.cat(weights), scale, scheme.block),
        torch.stack(inputs).amax() if inputs else None,
        torch.cat(biases) if biases else None,
        {
            f"{part.name.rpartition('.')[2]}.{key}": value
            for part in parts
            for key, value in part.extras.items()
        },
    )
    return Merge(layer, tuple(len(weight) for weight in weights), error)


def _check_parts(name: str, parts: Sequence[LayerData]) -> None:
    described = ", ".join(f"{p.name} {p.scheme.name} {list(p.weight.data.shape)}" for p in parts)
    kinds = {(p.scheme, p.weight.data.shape[1], p.bias is None) for p in parts}
    if len(kinds) != 1 or len({part.input_scale is None for part in parts}) != 1:
        raise InputError(
            f"cannot merge layers into {name}",
            got=described or "no layers",
            want="layers of one scheme and K, all with or all without bias and input_scale",
        )
    block = parts[0].scheme.block
    if block is not None and any(len(p.weight.data) % block[0] for p in parts[:-1]):
        raise InputError(
            f"cannot merge layers into {name}",
            got=described,
            want=f"parts whose rows are a multiple of the block's {block[0]}, but for the last",
            hint="keep the layers apart",
        )


def _requantize(
    parts: Sequence[LayerData], scale: torch.Tensor
) -> tuple[list[torch.Tensor], float]:
    weights, lost, total = [], 0.0, 0.0
    for part in parts:
        values = reference.dequantize(part.weight)
        codes = part.weight.codes
        if not torch.equal(part.weight.scale, scale):
            again = reference.quantize_per_tensor(values, scale)
            codes = again.codes
            lost += float((reference.dequantize(again) - values).double().square().sum())
        total += float(values.double().square().sum())
        weights.append(codes)
    return weights, (lost / total) ** 0.5 if total else 0.0
