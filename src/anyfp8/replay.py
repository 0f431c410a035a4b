"""Replay: the launches of a call, made again on other tensors; nothing is decided twice.

What a call launched the first time (which compiled kernels, with which arguments, on how much
scratch memory) is all of it where the call consists of our kernels only. A repeat allocates, puts
pointers in and launches.

The surprise: scratch is allocated by each repeat, from the caching allocator. A buffer that is kept
would be shared by two streams, or freed under a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from anyfp8.launcher import Runner, Started, recording

# with more rows the GPU is busy for longer than a full path takes; and prompts have any length
MAX_ROWS = 1024

# what a scratch tensor's address is a multiple of; the caching allocator's blocks are too
_ALIGNED = 256

# what may happen between launches: it allocates or looks, and computes nothing
_HARMLESS = frozenset(
    (
        *("empty", "empty_strided", "new_empty", "new_empty_strided", "view", "_unsafe_view"),
        *("reshape", "_reshape_alias", "as_strided", "alias", "detach", "expand", "slice"),
        *("select", "unsqueeze", "squeeze", "t", "transpose", "permute", "narrow", "empty_like"),
    )
)


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """What to do for a call.

    Attributes:
        like: an empty uint8 tensor on the GPU, which scratch is allocated like.
        scratch: bytes. offsets: of the scratch tensors in it.
        constants: of every launch.
        steps: (runner, arguments out of stream-less pool: inputs, y, scratch, constants).
    """

    like: torch.Tensor
    scratch: int
    offsets: tuple[int, ...]
    constants: tuple[Any, ...]
    steps: tuple[tuple[Runner, itemgetter[Any]], ...]
    device: int

    def __call__(self, pointers: Sequence[int], y: torch.Tensor) -> None:
        """Launch with the inputs at `pointers`, into y, on the GPU of them all."""
        if self.device != torch._C._cuda_getDevice():
            with torch.cuda.device(self.device):
                self(pointers, y)
            return
        if self.scratch:
            # referenced until the last launch; then the stream's order protects it
            memory = self.like.new_empty(self.scratch)
            base = memory.data_ptr()
            where = [base + offset for offset in self.offsets]
            pool = (*pointers, y.data_ptr(), *where, *self.constants)
        else:
            pool = (*pointers, y.data_ptr(), *self.constants)
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        for runner, arguments in self.steps:
            runner(*arguments(pool), stream=stream)


class _Watch(TorchDispatchMode):
    """Notes whether torch computes anything."""

    def __init__(self) -> None:
        super().__init__()
        self.computed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.computed |= func.overloadpacket.__name__ not in _HARMLESS
        return func(*args, **(kwargs or {}))


def pointers_of(inputs: Sequence[torch.Tensor], device: int) -> list[int] | None:
    """Addresses for a replay; None where one lies elsewhere or is not aligned as kernels expect."""
    pointers, low = [], 0
    for tensor in inputs:
        if tensor.get_device() != device:
            return None
        pointer = tensor.data_ptr()
        pointers.append(pointer)
        low |= pointer
    return None if low & 15 else pointers


def first(
    call: Callable[[], torch.Tensor], inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, Replay | None]:
    """Make a call on the GPU; returns what it returns, and how to repeat it.

    Args:
        inputs: every tensor that it reads. All must lie on one GPU.

    Returns:
        (y, None) where the call did anything but launch kernels of ours on whole tensors.
    """
    watch = _Watch()
    with recording() as started, watch:
        y = call()
    return y, None if watch.computed else replay_of(started, inputs, y)


def replay_of(
    started: Sequence[Started], inputs: Sequence[torch.Tensor], y: torch.Tensor
) -> Replay | None:
    """How to repeat launches; None where one took part of a tensor, or not every input was read."""
    given = [*inputs, y]
    numbers = {t.data_ptr(): number for number, t in enumerate(given)}
    own = {t.untyped_storage().data_ptr() for t in given}
    if not started or len(numbers) < len(given):
        return None
    offsets: list[int] = []
    size = 0
    launches: list[tuple[Runner, list[int | _Constant]]] = []
    constants: list[Any] = []
    used: set[int] = set()
    for runner, arguments in started:
        if runner is None:
            return None
        places: list[int | _Constant] = []
        for argument in arguments:
            if not isinstance(argument, torch.Tensor):
                places.append(_Constant(len(constants)))
                constants.append(argument)
                continue
            at = argument.data_ptr()
            if at not in numbers:
                storage = argument.untyped_storage()
                if storage.data_ptr() in own or storage.data_ptr() != at:
                    return None
                numbers[at] = len(numbers)
                offsets.append(size)
                size += -(-storage.nbytes() // _ALIGNED) * _ALIGNED
            places.append(numbers[at])
            used.add(numbers[at])
        launches.append((runner, places))
    if not used.issuperset(range(len(given))):
        return None
    before = len(numbers)
    steps = tuple(
        (runner, itemgetter(*(p.number + before if isinstance(p, _Constant) else p for p in at)))
        for runner, at in launches
    )
    like = y.new_empty(0, dtype=torch.uint8)
    return Replay(like, size, tuple(offsets), tuple(constants), steps, y.get_device())


@dataclass(frozen=True)
class _Constant:
    number: int
