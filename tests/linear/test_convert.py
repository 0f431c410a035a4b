"""convert: a model in memory becomes FP8 in place, and says so truly."""

import pytest
import torch

from anyfp8.errors import CalibrationError, InputError
from anyfp8.linear import Fp8Linear, convert


class Doubled(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Named(torch.nn.Linear):
    pass


class Net(torch.nn.Module):
    def __init__(self, *, used: bool = True) -> None:
        super().__init__()
        self.up = torch.nn.Linear(64, 96)
        self.down = Named(96, 64, bias=False)
        self.odd = Doubled(64, 64)
        self.spare = torch.nn.Linear(64, 64)
        self.lm_head = torch.nn.Linear(64, 128, bias=False)
        self.used = used

    def forward(self, x):
        x = self.odd(self.down(torch.relu(self.up(x))))
        return self.lm_head(self.spare(x) if self.used else x)


def net(**options) -> Net:
    torch.manual_seed(0)
    return Net(**options).bfloat16().requires_grad_(False)


@pytest.mark.parametrize("scheme", ["w8a8-channel-token", "w8a16-tensor", "w8a16-block128x128"])
def test_linears_and_plain_subclasses_are_converted_the_others_reported(scheme):
    model = net()
    x = torch.randn(5, 64).bfloat16()
    want = model(x).float()
    before = sum(m.weight.numel() * 2 for m in (model.up, model.down, model.spare))
    report = convert(model, scheme)
    assert report.converted == ("up", "down", "spare")
    assert dict(report.skipped) == {
        "odd": "Doubled has a forward of its own",
        "lm_head": "excluded by 'lm_head'",
    }
    assert report.backends == (("dequant", 3),)
    assert report.bytes_before == before
    assert isinstance(model.down, Fp8Linear)
    error = (model(x).float() - want).norm() / want.norm()
    assert 0.01 < error < 0.08


def test_nothing_to_convert_is_an_error_unless_allowed():
    with pytest.raises(InputError, match="0 of 0 linear layers"):
        convert(torch.nn.Sequential(torch.nn.ReLU()))
    with pytest.raises(InputError, match="0 of 5 linear layers"):
        convert(net(), exclude=["*"])
    assert convert(torch.nn.Sequential(torch.nn.ReLU()), allow_none=True).converted == ()


def test_static_scales_come_from_the_largest_calibration_input():
    model = net()
    batches = [torch.randn(3, 64).bfloat16() for _ in range(4)]
    largest = max(b.abs().max() for b in batches).float()
    convert(model, "w8a8-tensor-static", calib=batches)
    assert model.up.input_scale == largest / 448


def test_static_without_calibration_is_refused_before_anything_changes():
    model = net()
    with pytest.raises(InputError, match="needs calibration"):
        convert(model, "w8a8-tensor-static")
    assert type(model.up) is torch.nn.Linear


def test_a_layer_that_calibration_never_reaches_is_named():
    with pytest.raises(CalibrationError, match="never ran: spare"):
        convert(net(used=False), "w8a8-tensor-static", calib=[torch.randn(3, 64).bfloat16()])


def test_a_layer_that_sees_only_zeros_is_named():
    with pytest.raises(CalibrationError, match="saw only zeros: up"):
        convert(net(), "w8a8-tensor-static", calib=[torch.zeros(3, 64).bfloat16()])


def test_a_module_under_two_names_is_converted_once_and_stays_shared():
    model = net()
    model.twin = model.up
    report = convert(model, "w8a16-channel")
    assert model.twin is model.up
    assert "twin" in report.converted
    assert report.backends == (("dequant", 3),)


def test_the_16_bit_weight_is_freed():
    model = net()
    old = model.up
    convert(model, "w8a16-channel")
    assert old.weight.numel() == 0
