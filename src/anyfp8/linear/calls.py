"""(layer, M, GPU) → the launches that the first such call made, made again.

`Fp8Linear` and the op that `torch.compile` sees come here before anything else. A call with M rows
that came before on this GPU is a `Replay`: allocate, put pointers in, launch. Others take the full
path, which also records them.

The surprise: being here is what "warmed" means. Inside a CUDA graph's capture a call that is not
here is refused before the stream is touched, because deciding may try backends, compile and tune.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from anyfp8.errors import DeviceError
from anyfp8.gemm.base import PreparedWeight
from anyfp8.gemm.launch import on_device_of
from anyfp8.gemm.launch import redirected as products_redirected
from anyfp8.launcher import capturing
from anyfp8.linear.dispatch import linear
from anyfp8.quantize.launch import redirected as quantizers_redirected
from anyfp8.replay import MAX_ROWS, Replay, first, pointers_of
from anyfp8.select import Plan


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """What is known of the calls of a layer with M rows on a GPU.

    Attributes:
        layout: of the stored weight that it is for.
        scaled: whether the activation scale is read.
        replay: None where a backend does more than launch kernels of ours, where there are many
            rows, or where it is not `settled`.
        settled: False while only inputs came that cannot be recorded.
    """

    n: int
    k: int
    dtype: torch.dtype
    layout: str
    scaled: bool
    replay: Replay | None
    settled: bool


_calls: dict[tuple[str, int, int], Call] = {}


def forget() -> None:
    """Drop every recorded call: plans are made again."""
    _calls.clear()


def replayed(
    layer: str,
    x: torch.Tensor,
    weight: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    layout: str | None = None,
) -> torch.Tensor | None:
    """y [..., N] by the launches of an earlier call; None where the full path has to be taken.

    Args:
        layer: its key. weight: as stored. layout: of it, where the caller knows.

    Raises:
        DeviceError: a first call with so many rows inside a CUDA graph's capture.
    """
    device = x.get_device()
    if device < 0:
        return None
    shape = x.shape
    m = x.numel() // shape[-1] if shape and shape[-1] else 0
    call = _calls.get((layer, m, device))
    if call is None:
        if m and capturing():
            raise DeviceError(
                "this layer has not run with so many rows before the capture of a CUDA graph",
                got=f"M={m} for {layer.partition('|{')[0]} on cuda:{device}",
                want="a call with as many rows before the capture: it may try, compile and tune",
                hint=f"anyfp8.warmup(model, ms=[{m}]) before torch.cuda.graph",
            )
        return None
    replay = call.replay
    if (
        replay is None
        or shape[-1] != call.k
        or x.dtype is not call.dtype
        or (layout is not None and layout != call.layout)
        or not x.is_contiguous()
        or _redirected()
    ):
        return None
    inputs = [x, *weight]
    if bias is not None:
        inputs.append(bias)
    if call.scaled:
        assert input_scale is not None
        inputs.append(input_scale)
    pointers = pointers_of(inputs, device)
    if pointers is None:
        return None
    y = x.new_empty((*shape[:-1], call.n))
    replay(pointers, y)
    return y


def in_full(
    layer: str,
    plan: Plan,
    prepared: PreparedWeight,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    input_scale: torch.Tensor | None,
) -> torch.Tensor:
    """y [..., N] by the full path; on a GPU it is recorded for `replayed`.

    Raises:
        InputError: as `linear`.
    """
    with on_device_of(x):
        if not x.is_cuda or x.ndim == 0 or x.shape[-1] != plan.problem.k or not x.numel():
            return linear(x, prepared, plan, bias=bias, input_scale=input_scale)
        return _recorded(layer, plan, prepared, x, bias, input_scale)


def _recorded(
    layer: str,
    plan: Plan,
    prepared: PreparedWeight,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    input_scale: torch.Tensor | None,
) -> torch.Tensor:
    def call() -> torch.Tensor:
        return linear(x, prepared, plan, bias=bias, input_scale=input_scale)

    p, scheme = plan.problem, plan.problem.scheme
    m = x.numel() // p.k
    old = _calls.get((layer, m, x.get_device()))
    if (old is not None and old.settled) or capturing():
        return call()
    scaled = plan.choice(m).quantizes and scheme.activation == "tensor" and not scheme.dynamic
    inputs = [x, *prepared.tensors().values()]
    inputs += [t for t in (bias, input_scale if scaled else None) if t is not None]
    placed = x.is_contiguous() and pointers_of(inputs, x.get_device()) is not None
    settled = placed and not _redirected()
    y, replay = first(call, inputs) if settled and m <= MAX_ROWS else (call(), None)
    _calls[layer, m, x.get_device()] = Call(
        p.n, p.k, x.dtype, prepared.layout, scaled, replay, settled
    )
    return y


def _redirected() -> bool:
    """Whether a test runs these launches as another GPU's."""
    return products_redirected() or quantizers_redirected()
