"""What a model needs compiled is known without a GPU, and goes by configurations, not by M."""

import pytest
import torch

import anyfp8
from anyfp8.device import find_device
from anyfp8.errors import DeviceError, InputError
from anyfp8.linear import Fp8Linear, convert
from anyfp8.linear.calls import find
from anyfp8.linear.plans import plan_for, plan_of
from anyfp8.linear.warm import launches_of
from anyfp8.problem import Scheme
from anyfp8.select import Request

ROW = "w8a8-channel-token"
SCHEMES = (ROW, "w8a8-block128x128-group128", "w8a8-tensor-static", "w8a16-channel")


@pytest.fixture
def in_capture(monkeypatch):
    for module in ("launcher", "linear.calls"):
        monkeypatch.setattr(f"anyfp8.{module}.capturing", lambda: True)


def model_of():
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Linear(96, 64)).bfloat16()
    convert(model)
    return model


def forms(scheme, device, ms, n=4096, k=4096, request=None):
    pytest.importorskip("triton")
    from anyfp8.form import form_of

    gpu = find_device(device)
    plan = plan_for(Scheme.parse(scheme), n, k, gpu, request=request)
    return {form_of(launch) for launch in launches_of(plan, gpu, ms)}, plan


@pytest.mark.parametrize("device", ["h200", "l40s", "a100", "mi300x", "rtx 4090"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_m_to_512_needs_kernels_by_configuration(scheme, device):
    found, plan = forms(scheme, device, range(1, 513))
    products = {form for form in found if "quantize_" not in form.kernel}
    choices = [plan.choice(m) for m in range(1, 513)]
    ours = {c.config for c in choices if c.backend.startswith("triton_")}
    # rows that fill whole tiles or not; the sum of K's parts; dequantizing
    assert len(products) <= 2 * len(ours) + 2
    # one row, few and many
    assert len(found - products) <= 3


@pytest.mark.parametrize("scheme", SCHEMES)
def test_m_is_no_constant_of_any_kernel(scheme):
    found, _ = forms(scheme, "l40s", (5, 7))
    assert found
    assert {form.kernel for form in found} == {
        form.kernel for form in forms(scheme, "l40s", (5,))[0]
    }
    for form in found:
        names = dict(form.arguments)
        assert not any(name in ("M", "m") for name, _ in form.constants)
        assert names.get("M", names.get("count")) in (7, None)


def test_a_bias_or_other_rows_are_other_kernels_and_equal_layers_are_not():
    one, _ = forms(ROW, "h200", (1, 16), request=Request(backend="triton_row"))
    same, _ = forms(ROW, "h200", (1, 16), request=Request(backend="triton_row"))
    ragged, _ = forms(ROW, "h200", (1, 16), n=4090, request=Request(backend="triton_row"))
    assert one == same
    assert one != ragged
    # the quantizer does not know N
    assert any("quantize_token" in form.kernel for form in one & ragged)


def test_other_packages_kernels_are_not_ours_to_compile():
    request = Request(backend="torch_scaled_mm")
    found, plan = forms("w8a8-tensor-static", "h200", (16,), request=request)
    assert plan.choice(16).backend == "torch_scaled_mm"
    assert {form.kernel.split(":")[1] for form in found} == {"quantize_scaled_kernel"}


def test_warmup_runs_each_kind_of_layer_once_for_each_m():
    model = model_of()
    seen = []
    for layer in model:
        layer.register_forward_pre_hook(lambda layer, args: seen.append((layer, len(args[0]))))
    twins = torch.nn.Sequential(*model, *model_of())
    warmed = anyfp8.warmup(twins, ms=(1, 5))
    assert (warmed.layers, warmed.calls) == (4, 4)
    assert {(model[0], 1), (model[0], 5), (model[1], 1), (model[1], 5)} == set(seen)
    assert warmed.compiled == warmed.loaded == 0


def test_warmup_prepares_what_is_not():
    model = model_of()
    model[0].unprepare()
    anyfp8.warmup(model, ms=[3])
    assert model[0]._prepared is not None
    assert 3 in model[0].plan()._seen


@pytest.mark.parametrize("ms", [(), (0, 4)])
def test_nothing_to_warm_is_an_error(ms):
    with pytest.raises(InputError, match="nothing to warm"):
        anyfp8.warmup(model_of(), ms=ms)
    with pytest.raises(InputError, match="0 Fp8Linear"):
        anyfp8.warmup(torch.nn.Linear(4, 4))


class OnGpu:
    """As much of a CUDA tensor as is asked before it is touched."""

    def __init__(self, *shape):
        self.shape = torch.Size(shape)

    def get_device(self):
        return 0

    def numel(self):
        return self.shape.numel()


def test_a_first_m_in_a_capture_names_the_call_to_make(in_capture):
    with pytest.raises(DeviceError) as raised:
        find("linear|w8a8-channel-token|1x96x64|x|{}", OnGpu(3, 8, 64))
    assert "M=24" in raised.value.got
    assert "{" not in raised.value.got
    assert raised.value.hint == "anyfp8.warmup(model, ms=[24]) before torch.cuda.graph"
    # no rows, no launch
    assert find("linear", OnGpu(0, 64)) is None


def test_nothing_is_prepared_placed_or_warmed_in_a_capture(in_capture):
    layer = Fp8Linear(64, 96, Scheme.parse(ROW))
    for call in (layer.prepare, lambda: anyfp8.warmup(layer, ms=[1])):
        with pytest.raises(DeviceError, match="capture") as raised:
            call()
        assert "warmup" in raised.value.hint
    assert layer._prepared is None


def test_what_a_capture_refused_to_place_is_placed_afterwards(monkeypatch):
    layer = Fp8Linear(64, 112, Scheme.parse(ROW))
    layer.ask()
    with monkeypatch.context() as patch:
        patch.setattr("anyfp8.launcher.capturing", lambda: True)
        with pytest.raises(DeviceError, match="placed before"):
            plan_of(layer.key, layer.device)
    assert plan_of(layer.key, layer.device).choice(1).backend == "dequant"


def test_replan_tries_backends_again(monkeypatch):
    from anyfp8 import gemm
    from anyfp8.gemm import probe
    from anyfp8.problem import Problem

    backend, problem = (
        gemm.backend("dequant"),
        Problem("linear", Scheme.parse("w8a16-tensor"), 1, 64, 64),
    )

    def fails(*args):
        raise RuntimeError("no kernel today")

    probe.forget()
    with monkeypatch.context() as patch:
        patch.setattr(probe, "trial", fails)
        assert "no kernel today" in probe.judged(backend, problem)
    # remembered until the plans are made again
    assert "no kernel today" in probe.judged(backend, problem)
    anyfp8.replan()
    assert probe.judged(backend, problem) is None


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
    ],
    ids=["torch", "driver", "cublas"],
)
def test_a_full_gpu_is_no_answer_about_a_backend(monkeypatch, error):
    from anyfp8 import gemm
    from anyfp8.gemm import probe
    from anyfp8.problem import Problem

    def full(*args):
        raise error

    backend, problem = (
        gemm.backend("dequant"),
        Problem("linear", Scheme.parse("w8a16-channel"), 1, 64, 64),
    )
    probe.forget()
    with monkeypatch.context() as patch:
        patch.setattr(probe, "trial", full)
        with pytest.raises(type(error), match=str(error)[:10]):
            probe.judged(backend, problem)
    assert probe.judged(backend, problem) is None
