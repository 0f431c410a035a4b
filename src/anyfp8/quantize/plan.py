"""A call in a form that came before: allocate, put the pointers in, launch; decide nothing twice.

Quantizers of activations go through `planned` on a CUDA or HIP GPU. A plan is what the full path
did the first time: which compiled kernels it started, with which arguments, and what it returned.
The surprise: a plan is found by form (shapes, strides, dtypes, devices, 16-byte alignment,
options), which is also all that the checks of the full path look at: a repeat checks nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from anyfp8.launcher import Launcher, Started, recorded, recording
from anyfp8.problem import QTensor
from anyfp8.quantize.launch import target_of
from anyfp8.replay import Replay, empty_strided, replay_of

MAX_PLANS = 4096

_plans: dict[tuple[Any, ...], Plan] = {}


@dataclass(frozen=True)
class Plan:
    """What to do for a call.

    Attributes:
        replay: its launches on the inputs, the data and the scale.
        make_data, make_scale: allocate what is not given.
        scale_shape: of the result's scale.
        rest: block, fmt and packed of the result.
    """

    replay: Replay
    make_data: Callable[[], torch.Tensor]
    make_scale: Callable[[], torch.Tensor]
    scale_shape: torch.Size
    rest: tuple[Any, ...]

    def run(
        self, inputs: Sequence[torch.Tensor], data: torch.Tensor | None, scale: torch.Tensor | None
    ) -> QTensor:
        q = self.make_data() if data is None else data
        s = self.make_scale() if scale is None else scale
        pointers = [tensor.data_ptr() for tensor in inputs]
        pointers.append(q.data_ptr())
        self.replay.launch(pointers, s.data_ptr())
        if s.shape != self.scale_shape:
            s = s.reshape(self.scale_shape)
        return QTensor(q, s, *self.rest)


def planned(
    options: tuple[Hashable, ...],
    inputs: tuple[torch.Tensor, ...],
    data: torch.Tensor | None,
    scale: torch.Tensor | None,
    full: Callable[[], QTensor],
) -> QTensor:
    """`full()`, or the launches that it made for a call in this form.

    Args:
        options: everything else that `full` depends on, the function first.
        inputs: every tensor that `full` reads, x first.
        data, scale: outputs where they were given; a static scale stands for an output.
        full: checks, allocates and launches.
    """
    device = inputs[0].get_device()
    if device < 0:
        return full()
    target = target_of(inputs[0].device)
    if target is None or type(target.run) is not Launcher or recorded():
        return full()
    given = inputs if data is None and scale is None else (*inputs, data, scale)
    key = (*options, *map(_form_of, given))
    plan = _plans.get(key)
    if plan is None:
        with recording() as launches:
            result = full()
        plan = _plan_of(launches, inputs, result)
        if plan is not None:
            if len(_plans) >= MAX_PLANS:
                _plans.clear()
            _plans[key] = plan
        return result
    if device == torch._C._cuda_getDevice():
        return plan.run(inputs, data, scale)
    with torch.cuda.device(device):
        return plan.run(inputs, data, scale)


def _form_of(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return None
    return (
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.get_device(),
        tensor.data_ptr() % 16 == 0,
    )


def _plan_of(
    launches: Sequence[Started], inputs: Sequence[torch.Tensor], result: QTensor
) -> Plan | None:
    """None where a launch took part of a tensor or a copy, or tensors share memory."""
    data, scale = result.data, result.scale
    tensors = [*inputs, data, scale]
    if len({t.untyped_storage().data_ptr() for t in tensors}) < len(tensors):
        return None
    replay = replay_of(launches, tensors[:-1], scale)
    if replay is None:
        return None
    rest = (result.block, result.fmt, result.packed)
    return Plan(replay, _maker(data), _maker(scale), scale.shape, rest)


def _maker(like: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Allocates a tensor of the same shape and strides, padding behind it included."""
    size, strides = like.shape, like.stride()
    dtype, device = like.dtype, like.device
    elements = like.untyped_storage().nbytes() // like.element_size()
    if like.is_contiguous() and elements == like.numel():
        if like.is_cuda:
            # a plan runs with its GPU current
            size, strides = tuple(size), tuple(strides)
            return lambda: empty_strided(size, strides, dtype)
        return lambda: torch.empty(size, dtype=dtype, device=device)
    return lambda: torch.empty(elements, dtype=dtype, device=device).as_strided(size, strides)
