"""A call in the form of an earlier one repeats its launches, on its own tensors."""

import pytest
import torch

from anyfp8.problem import QTensor
from anyfp8.quantize.plan import _form_of, _plan_of


class Runner:
    def __init__(self):
        self.calls = []

    def __call__(self, *arguments, stream):
        self.calls.append((arguments, stream))


@pytest.fixture(autouse=True)
def stream(monkeypatch):
    allocated = iter(range(1 << 20, 1 << 30, 1 << 20))
    for name, answer in (
        ("_cuda_getCurrentRawStream", lambda device: 77),
        ("_cuda_cudaCachingAllocator_raw_alloc", lambda size, stream: next(allocated)),
        ("_cuda_cudaCachingAllocator_raw_delete", lambda pointer: None),
    ):
        monkeypatch.setattr(torch._C, name, answer, raising=False)


def made(x, scale_shape=(4, 1)):
    return QTensor(torch.empty(x.shape, dtype=torch.uint8), torch.empty(scale_shape))


def test_a_repeat_launches_on_its_own_tensors():
    x, runner = torch.zeros(4, 8), Runner()
    first = made(x)
    plan = _plan_of([(runner, (x, first.data, first.scale, 4, None))], [x], first)
    y = torch.ones(4, 8)
    again = plan.run([y], None, None)
    assert again.data.data_ptr() != first.data.data_ptr()
    assert again.data.shape == first.data.shape
    assert again.data.dtype == torch.uint8
    pointers = (y.data_ptr(), again.data.data_ptr(), again.scale.data_ptr())
    assert runner.calls == [((*pointers, 4, None), 77)]


def test_outputs_that_were_given_are_written():
    x, runner = torch.zeros(4, 8), Runner()
    first = made(x)
    launches = [(runner, (x, first.data, first.scale))]
    plan = _plan_of(launches, [x], first)
    q, s = torch.empty(4, 8, dtype=torch.uint8), torch.empty(4, 1)
    again = plan.run([x], q, s)
    assert again.data is q
    assert again.scale is s
    assert runner.calls == [((x.data_ptr(), q.data_ptr(), s.data_ptr()), 77)]


def test_scratch_of_two_launches_is_the_same_and_new():
    x, first_pass, second_pass = torch.zeros(4, 8), Runner(), Runner()
    parts, first = torch.empty(3), made(x, ())
    launches = [(first_pass, (x, parts)), (second_pass, (x, first.data, first.scale, parts))]
    plan = _plan_of(launches, [x], first)
    plan.run([x], None, None)
    ((_, written), _), ((_, _, _, read), _) = *first_pass.calls, *second_pass.calls
    assert written == read != parts.data_ptr()


def test_padding_behind_the_rows_is_allocated_again():
    x, runner = torch.zeros(4, 8), Runner()
    first = QTensor(torch.empty(64, 8, dtype=torch.uint8)[:4], torch.empty(64, 1)[:4])
    plan = _plan_of([(runner, (x, first.data, first.scale))], [x], first)
    again = plan.run([x], None, None)
    assert again.data.shape == (4, 8)
    assert again.data.untyped_storage().nbytes() == 64 * 8
    assert again.scale.untyped_storage().nbytes() == 64 * 4


def test_a_transposed_scale_is_allocated_transposed():
    x, runner = torch.zeros(4, 8), Runner()
    first = QTensor(torch.empty(4, 8, dtype=torch.uint8), torch.empty(2, 4).t())
    plan = _plan_of([(runner, (x, first.data, first.scale))], [x], first)
    assert plan.run([x], None, None).scale.stride() == (1, 4)


def test_parts_copies_and_shared_memory_are_not_planned():
    x, runner = torch.zeros(4, 8), Runner()
    q = made(x)
    part = [(runner, (x[1:], q.data, q.scale)), (runner, (x, q.data, q.scale))]
    assert _plan_of(part, [x], q) is None
    copied = [(runner, (x.clone(), q.data, q.scale))]
    assert _plan_of(copied, [x], q) is None
    assert _plan_of([(runner, (x, x, q.scale))], [x], QTensor(x, q.scale)) is None
    assert _plan_of([(None, ())], [x], q) is None
    assert _plan_of([], [x], q) is None


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(5, 8),
        torch.zeros(8, 4).t(),
        torch.zeros(4, 8, dtype=torch.bfloat16),
        torch.zeros(33)[1:].view(4, 8),
    ],
    ids=["shape", "strides", "dtype", "alignment"],
)
def test_another_form_is_another_plan(other):
    assert _form_of(other) != _form_of(torch.zeros(4, 8))
