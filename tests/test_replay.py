"""A replay launches what the first call launched, on its own tensors and its own scratch."""

from contextlib import contextmanager

import pytest
import torch

from anyfp8.replay import _Watch, pointers_of, replay_of


class Runner:
    def __init__(self):
        self.calls = []

    def __call__(self, *arguments, stream):
        self.calls.append((arguments, stream))


@pytest.fixture(autouse=True)
def stream(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)
    # tensors here lie on the CPU, whose number is -1
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
    ((a, stream_a), (b, _)), ((c, stream_c), _) = first.calls, second.calls
    assert stream_a == stream_c == 77
    assert (a[0], a[2:]) == (111, (4, None))
    assert b[0] == 333
    assert c == (a[1], 222, out.data_ptr(), 8, True)
    assert a[1] not in (scratch.data_ptr(), x.data_ptr())


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
