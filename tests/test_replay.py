"""A replay launches what the first call launched, on its own tensors and its own scratch."""

import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from anyfp8.launcher import runner_of
from anyfp8.replay import _Watch, pointers_of, replay_of

FREED = []


class Runner:
    def __init__(self):
        self.calls = []

    def __call__(self, *arguments, stream):
        self.calls.append((arguments, stream))


@pytest.fixture(autouse=True)
def stream(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)
    # tensors here lie on the CPU, whose number is -1
    allocated = iter(range(1 << 20, 1 << 30, 1 << 20))
    monkeypatch.setattr(
        torch._C,
        "_cuda_cudaCachingAllocator_raw_alloc",
        lambda size, stream: next(allocated),
        raising=False,
    )
    monkeypatch.setattr(
        torch._C, "_cuda_cudaCachingAllocator_raw_delete", FREED.append, raising=False
    )
    FREED.clear()
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)


def tensors(*shapes):
    return [torch.zeros(shape) for shape in shapes]


def test_two_launches_share_new_scratch_and_take_new_tensors():
    x, w, y, scratch = tensors((4, 8), (16, 8), (4, 16), (5, 8))
    first, second = Runner(), Runner()
    started = [(first, (x, scratch, 4, None)), (second, (scratch, w, y, 8, True))]
    replay = replay_of(started, [x, w], y)
    assert replay.scratch >= scratch.untyped_storage().nbytes()
    out = torch.zeros(4, 16)
    replay([111, 222], out)
    replay([333, 222], out)
    (a, stream_a), (c, stream_c) = first.calls
    (b, _), (d, _) = second.calls
    assert stream_a == stream_c == 77
    assert (a[0], a[2:]) == (111, (4, None))
    assert c[0] == 333
    assert b == (a[1], 222, out.data_ptr(), 8, True)
    assert a[1] not in (scratch.data_ptr(), x.data_ptr(), c[0])
    # given back, each its own
    assert [b[0], d[0]] == FREED == [a[1], c[1]]


@pytest.mark.parametrize("leading", [None, (), (4,), (2, 3), (2, 1, 5)])
def test_without_an_output_a_new_one_is_made(monkeypatch, leading):
    rows = torch.Size(leading or ()).numel()
    x, y = torch.zeros(rows, 8), torch.zeros((rows, 16) if leading is None else (*leading, 16))
    y = y.bfloat16()
    monkeypatch.setattr("anyfp8.replay.empty_strided", torch._C._dynamo.guards._empty_strided_cpu)
    runner = Runner()
    replay = replay_of([(runner, (x, y))], [x], y)
    found = replay([7], None, leading)
    assert (found.shape, found.stride(), found.dtype) == (y.shape, y.stride(), y.dtype)
    assert runner.calls == [((7, found.data_ptr()), 77)]


def test_launches_are_made_with_their_own_gpu_current(monkeypatch):
    x, y = tensors((4, 8), (4, 8))
    current, seen = [3], []

    @contextmanager
    def guard(device):
        current.append(device)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", guard)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[-1])
    started = [(lambda *a, stream: seen.append(current[-1]), (x, y))]
    replay_of(started, [x], y)([1], y)
    assert seen == [-1]
    assert current == [3]


def test_tensors_elsewhere_or_not_aligned_have_no_pointers():
    x, w = tensors((4, 8), (16, 8))
    assert pointers_of([x, w], -1) == [x.data_ptr(), w.data_ptr()]
    assert pointers_of([x, w], 0) is None
    assert pointers_of([x, w.view(-1)[1:]], -1) is None


def test_two_scratch_tensors_do_not_overlap():
    x, y, a, b = tensors((4, 8), (4, 8), (3, 100), (7,))
    runner = Runner()
    replay = replay_of([(runner, (x, a, b, y))], [x], y)
    replay([1], y)
    (((_, at_a, at_b, _), _),) = runner.calls
    assert at_b - at_a >= a.numel() * 4
    assert at_a % 16 == at_b % 16


def test_what_is_not_launches_on_whole_tensors_alone_is_not_replayed():
    x, w, y = tensors((4, 8), (16, 8), (4, 16))
    runner = Runner()
    assert replay_of([], [x, w], y) is None
    assert replay_of([(None, ())], [x, w], y) is None
    # a part of an input, and an input that no launch read: a library's call was between
    assert replay_of([(runner, (x[1:], w, y))], [x, w], y) is None
    assert replay_of([(runner, (x, y))], [x, w], y) is None
    # a part of a buffer: where it starts is not known the next time
    assert replay_of([(runner, (x, w, torch.zeros(8)[4:], y))], [x, w], y) is None
    # one memory for two tensors
    assert replay_of([(runner, (x, x, y))], [x, x], y) is None


def test_torch_at_work_between_launches_is_seen():
    x = torch.zeros(4, 8)
    with _Watch() as watch:
        x.new_empty(3).view(3, 1)
        x.reshape(8, 4).view(torch.uint8)
        torch.empty(2, dtype=torch.uint8)
    assert not watch.computed
    for work in (lambda: x + 1, lambda: x.t().contiguous(), lambda: x.half(), lambda: x.zero_()):
        with _Watch() as watch:
            work()
        assert watch.computed


class Compiled:
    """A kernel that Triton 3.6 compiled, with its C launcher."""

    packed_metadata, function = (4, 1, 0), 99

    def __init__(self):
        self.launched, self.hooked = [], []
        CudaLauncher = type("CudaLauncher", (), {})
        self.run = CudaLauncher()
        self.run.launch = lambda *arguments: self.launched.append(arguments)
        self.run.global_scratch_size = self.run.profile_scratch_size = 0
        self.run.launch_cooperative_grid = self.run.launch_pdl = False

    def __getitem__(self, grid):
        return lambda *arguments, stream: self.hooked.append((grid, arguments, stream))


def test_launches_go_past_tritons_hooks_while_there_are_none(monkeypatch):
    hooks = SimpleNamespace(launch_enter_hook=SimpleNamespace(calls=[]))
    triton = SimpleNamespace(knobs=SimpleNamespace(runtime=hooks), __version__="3.6.0")
    monkeypatch.setitem(sys.modules, "triton", triton)
    compiled = Compiled()
    runner = runner_of(compiled, (2, 3, 1))
    x, y = tensors((4, 8), (4, 8))
    replay = replay_of([(runner, (x, y, 5, None))], [x], y)
    fixed = (99, False, False, None, None, (4, 1, 0), None, None, None)
    runner(11, 12, 5, None, stream=77)
    replay([13], y)
    first, second = compiled.launched
    assert first == (2, 3, 1, 77, *fixed, 11, 12, 5, None)
    assert second == (2, 3, 1, 77, *fixed, 13, y.data_ptr(), 5, None)
    # a profiler came
    hooks.launch_enter_hook.calls.append(print)
    runner(11, 12, 5, None, stream=77)
    replay([13], y)
    assert len(compiled.launched) == 2
    assert compiled.hooked == [
        ((2, 3, 1), (11, 12, 5, None), 77),
        ((2, 3, 1), (13, y.data_ptr(), 5, None), 77),
    ]


def test_other_versions_launch_through_tritons_launcher(monkeypatch):
    hooks = SimpleNamespace(launch_enter_hook=SimpleNamespace(calls=[]))
    triton = SimpleNamespace(knobs=SimpleNamespace(runtime=hooks), __version__="3.7.1")
    monkeypatch.setitem(sys.modules, "triton", triton)
    compiled, seen = Compiled(), []
    compiled.run = lambda *arguments: seen.append(arguments)
    runner = runner_of(compiled, (2, 1, 1))
    x, y = tensors((4, 8), (4, 8))
    replay_of([(runner, (x, y, 5))], [x], y)([13], y)
    assert seen == [(2, 1, 1, 77, 99, (4, 1, 0), None, None, None, 13, y.data_ptr(), 5)]
