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
        device: index of the GPU. layout: of the stored weight that it is for.
        scaled: whether the activation scale is read.
        replay: None where a backend does more than launch kernels of ours, where there are many
            rows, or where it is not `settled`.
        settled: False while only inputs came that cannot be recorded.
    """

    n: int
    k: int
    dtype: torch.dtype
    device: int
    layout: str
    scaled: bool
    replay: Replay | None
    settled: bool

    def again(
        self,
        x: torch.Tensor,
        weight: Sequence[int],
        bias: torch.Tensor | None,
        input_scale: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """y [..., N] by the same launches for M rows; None where this x needs the full path.

        Args:
            weight: `pointers_of` it.
        """
        shape, replay = x.shape, self.replay
        if (
            replay is None
            or shape[-1] != self.k
            or x.dtype is not self.dtype
            or x.get_device() != self.device
            or not x.is_contiguous()
            or _redirected()
        ):
            return None
        low = x.data_ptr()
        pointers = [low, *weight]
        for tensor in (bias, input_scale if self.scaled else None):
            if tensor is not None:
                pointer = tensor.data_ptr()
                low |= pointer
                pointers.append(pointer)
                if tensor.get_device() != self.device:
                    return None
        if low & 15:
            return None
        return replay(pointers, None, None if len(shape) == 2 else shape[:-1])


_calls: dict[tuple[str, int, int], Call] = {}


def forget() -> None:
    """Drop every recorded call: plans are made again."""
    _calls.clear()


def find(layer: str, x: torch.Tensor) -> Call | None:
    """What is known of a layer's calls with as many rows on x's GPU.

    Args:
        layer: its key.

    Raises:
        DeviceError: nothing, inside a CUDA graph's capture.
    """
    device, shape = x.get_device(), x.shape
    if device < 0 or not shape or not shape[-1]:
        return None
    m = x.numel() // shape[-1]
    call = _calls.get((layer, m, device))
    if call is None and m and capturing():
        raise DeviceError(
            "this layer has not run with so many rows before the capture of a CUDA graph",
            got=f"M={m} for {layer.partition('|{')[0]} on cuda:{device}",
            want="a call with as many rows before the capture: it may try, compile and tune",
            hint=f"anyfp8.warmup(model, ms=[{m}]) before torch.cuda.graph",
        )
    return call


def in_full(
    layer: str,
    plan: Plan,
    prepared: PreparedWeight,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    input_scale: torch.Tensor | None,
) -> torch.Tensor:
    """y [..., N] by the full path; on a GPU it is recorded for `find`.

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
        p.n, p.k, x.dtype, x.get_device(), prepared.layout, scaled, replay, settled
    )
    return y


def _redirected() -> bool:
    """Whether a test runs these launches as another GPU's."""
    return products_redirected() or quantizers_redirected()
