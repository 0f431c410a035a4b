"""Replay: the launches of a call, made again on other tensors; nothing is decided twice.

What a call launched the first time (which compiled kernels, with which arguments, on how much
scratch memory) is all of it where the call consists of our kernels only. A repeat puts pointers in
and launches.

The surprise: scratch is allocated by each repeat, from the caching allocator. A buffer that is kept
would be shared by two streams, or freed under a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from anyfp8.launcher import Runner, Started, flat_of, recording

# with more rows the GPU is busy for longer than a full path takes; and prompts have any length
MAX_ROWS = 512

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


@dataclass(frozen=True, slots=True)
class Given:
    """An argument that is the address of an input, or of y after them."""

    number: int


@dataclass(frozen=True, slots=True)
class Scratch:
    """An argument that is an address so many bytes into the scratch."""

    offset: int


Step = tuple[Runner, tuple[Any, ...]]


def _empty_strided(size: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, strides, dtype=dtype, device="cuda")


# (size, strides, dtype) -> a tensor on this GPU. What Inductor's generated code calls is past
# torch's dispatcher and takes half the time, but nothing promises that it stays there
_guards: Any = getattr(torch._C._dynamo, "guards", None)
empty_strided: Callable[..., torch.Tensor] = getattr(_guards, "_empty_strided_cuda", _empty_strided)


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """What to do for a call.

    Attributes:
        device: index of the GPU. size: (rows, columns) of y. strides, dtype: of y.
        scratch: bytes.
        steps: runners with their arguments: `Given`, `Scratch` and constants.
        written: all steps past Triton's hooks: written(stream, scratch, y, *inputs); or None.
        knobs: Triton's, which say whether there are hooks.
    """

    device: int
    size: tuple[int, int]
    strides: tuple[int, int]
    dtype: torch.dtype
    scratch: int
    steps: tuple[Step, ...]
    written: Callable[..., None] | None
    knobs: Any

    def __call__(
        self,
        pointers: Sequence[int],
        out: torch.Tensor | None = None,
        leading: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Launch with the inputs at `pointers`, on the GPU of them all.

        Args:
            out: y; by default a new tensor. leading: what that has for [rows].
        """
        device = self.device
        if device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return self(pointers, out, leading)
        if out is not None:
            y = out
        elif leading is None:
            y = empty_strided(self.size, self.strides, self.dtype)
        else:
            size = (*leading, self.size[1])
            y = empty_strided(size, _strides(size), self.dtype)
        self.launch(pointers, y.data_ptr())
        return y

    def launch(self, pointers: Sequence[int], y: int) -> None:
        """Launch with the inputs and y at these addresses, on the current GPU."""
        written = self.written
        if written is None or self.knobs.launch_enter_hook.calls:
            written = self._one_by_one
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        if not self.scratch:
            written(stream, 0, y, *pointers)
            return
        # no tensor: making one takes longer than the memory. Given back before the kernels have
        # run, it goes to work that comes after them on this stream
        scratch = torch._C._cuda_cudaCachingAllocator_raw_alloc(self.scratch, stream)
        try:
            written(stream, scratch, y, *pointers)
        finally:
            torch._C._cuda_cudaCachingAllocator_raw_delete(scratch)

    def _one_by_one(self, stream: int, scratch: int, y: int, *inputs: int) -> None:
        given = (*inputs, y)
        for runner, arguments in self.steps:
            values = (
                given[a.number]
                if isinstance(a, Given)
                else scratch + a.offset
                if isinstance(a, Scratch)
                else a
                for a in arguments
            )
            runner(*values, stream=stream)


def _strides(size: Sequence[int]) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    step, strides = 1, ()
    for length in size[::-1]:
        strides = (step, *strides)
        step *= length
    return strides


def _written(steps: Sequence[Step], inputs: int) -> tuple[Callable[..., None] | None, Any]:
    """The steps as one Python function, and Triton's knobs; None where a runner has no parts.

    Put together at each call, two kernels' seventy arguments take as long as half a launch.
    """
    names = [f"p{number}" for number in range(inputs)]
    lines = [f"def written({', '.join(('stream', 'scratch', 'y', *names))}):"]
    known: dict[str, Any] = {}
    knobs = None

    def word(argument: Any) -> str:
        if isinstance(argument, Given):
            return (*names, "y")[argument.number]
        if isinstance(argument, Scratch):
            return f"scratch + {argument.offset}"
        if argument is None or type(argument) in (bool, int):
            return repr(argument)
        known[f"c{len(known)}"] = argument
        return f"c{len(known) - 1}"

    for runner, arguments in steps:
        flat = flat_of(runner)
        if flat is None:
            return None, None
        knobs = flat.knobs
        words = [*map(word, flat.grid), "stream", *map(word, (*flat.rest, *arguments))]
        lines.append(f"    {word(flat.launch)}({', '.join(words)})")
    exec("\n".join(lines), known)
    return known["written"], knobs


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
    places: dict[int, Any] = {t.data_ptr(): Given(number) for number, t in enumerate(given)}
    own = {t.untyped_storage().data_ptr() for t in given}
    if not started or len(places) < len(given):
        return None
    size = 0
    steps: list[Step] = []
    for runner, arguments in started:
        if runner is None:
            return None
        found: list[Any] = []
        for argument in arguments:
            if not isinstance(argument, torch.Tensor):
                found.append(argument)
                continue
            at = argument.data_ptr()
            if at not in places:
                storage = argument.untyped_storage()
                if storage.data_ptr() in own or storage.data_ptr() != at:
                    return None
                places[at] = Scratch(size)
                size += -(-storage.nbytes() // _ALIGNED) * _ALIGNED
            found.append(places[at])
        steps.append((runner, tuple(found)))
    used = {a.number for _, arguments in steps for a in arguments if isinstance(a, Given)}
    if len(used) < len(given):
        return None
    written, knobs = _written(steps, len(inputs))
    columns = y.shape[-1] if y.ndim else 1
    shape = (y.numel() // columns, columns)
    return Replay(y.get_device(), shape, (columns, 1), y.dtype, size, tuple(steps), written, knobs)
