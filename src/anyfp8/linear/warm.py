"""warmup(model, ms): run each layer once with M rows, so that nothing is left to do in a graph.

Engines call it before they capture CUDA graphs. After it, calls with these Ms decide, try, compile
and tune nothing; others are refused inside a capture. `launches_of` lists the same launches without
a GPU, for compiling them offline.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from anyfp8.device import Device
from anyfp8.errors import InputError
from anyfp8.form import counting
from anyfp8.gemm.base import CanonicalWeight
from anyfp8.gemm.launch import use_target as products_to
from anyfp8.launcher import Launch, refuse_capture
from anyfp8.linear.dispatch import quantize_activation
from anyfp8.linear.layer import Fp8Linear
from anyfp8.problem import DTYPES
from anyfp8.quantize.launch import Target
from anyfp8.quantize.launch import use_target as quantizers_to
from anyfp8.select import M_GRID, Plan


@dataclass(frozen=True)
class Warmed:
    """What a `warmup` did.

    Attributes:
        layers: Fp8Linear modules found. calls: made, one for each kind of layer, GPU and M.
        compiled: kernels that Triton compiled. loaded: those it had on disk.
    """

    layers: int
    calls: int
    compiled: int
    loaded: int
    seconds: float


def warmup(model: torch.nn.Module, ms: Iterable[int] = M_GRID) -> Warmed:
    """Decide, try and compile everything that calls with these numbers of rows need.

    Layers of one kind (scheme, shape, dtypes, request) on one GPU share what is warmed. Memory for
    the largest M's activations is taken and given back.

    Args:
        model: with Fp8Linear modules, which are prepared where they are not.
        ms: rows of x: tokens of a step, all leading dimensions multiplied.

    Raises:
        InputError: an M below 1, or no Fp8Linear in the model.
        DeviceError: inside a CUDA graph's capture.
    """
    wanted = sorted(set(ms), reverse=True)
    layers = [each for each in model.modules() if isinstance(each, Fp8Linear)]
    if not layers or not wanted or wanted[-1] < 1:
        raise InputError(
            "nothing to warm",
            got=f"{len(layers)} Fp8Linear modules, ms={wanted[::-1]}",
            want="a model with FP8 layers and numbers of rows of at least 1",
            hint="anyfp8.load or anyfp8.convert makes such a model",
        )
    refuse_capture("a model is warmed", "warmup in a capture")
    start = time.monotonic()
    kinds: dict[tuple[str, torch.device], Fp8Linear] = {}
    with _counting() as counts, torch.inference_mode():
        for layer in layers:
            layer.prepare()
            kinds.setdefault((layer.key, layer.device), layer)
        for layer in kinds.values():
            x = torch.zeros(wanted[0], layer.in_features, dtype=layer.dtype, device=layer.device)
            for m in wanted:
                layer(x[:m])
        for device in {layer.device for layer in kinds.values() if layer.device.type == "cuda"}:
            torch.cuda.synchronize(device)
    return Warmed(
        len(layers),
        len(kinds) * len(wanted),
        counts["compiled"],
        counts["loaded"],
        round(time.monotonic() - start, 3),
    )


def _counting() -> AbstractContextManager[dict[str, int]]:
    # without Triton there are no kernels of ours
    return counting() if find_spec("triton") else nullcontext({"compiled": 0, "loaded": 0})


def launches_of(plan: Plan, device: Device, ms: Iterable[int]) -> Iterator[Launch]:
    """Every Triton launch that calls of a layer with these Ms make on a device; none is made.

    Args:
        plan: of the layer on `device`, from `plan_for`.
    """
    found: list[Launch] = []
    p = plan.problem
    scheme, meta = p.scheme, torch.device("meta")
    x_dtype = DTYPES[p.x_dtype]
    codes = torch.empty(p.n, p.k, dtype=torch.uint8, device=meta)
    scale = torch.empty(scheme.weight_scale_shape(p.n, p.k), device=meta)
    weight = CanonicalWeight(codes, scale, scheme)
    bias = torch.empty(p.n, dtype=x_dtype, device=meta) if p.bias else None
    input_scale = torch.empty((), device=meta)
    target = Target(device.capability if device.vendor == "nvidia" else None, run=found.append)
    for m in ms:
        choice = plan.choice(m)
        x: Any = torch.empty(m, p.k, dtype=x_dtype, device=meta)
        with quantizers_to(target), products_to(device, found.append):
            if choice.quantizes:
                x = quantize_activation(x, scheme, input_scale)
            # other packages' kernels are theirs to compile
            if choice.backend.startswith("triton_"):
                plan.run(x, weight, bias)
        yield from found
        found.clear()
