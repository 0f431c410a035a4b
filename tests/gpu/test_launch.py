"""µs of host time of a call, beside SGLang's, on a core that nobody else disturbs.

ANYFP8_TEST_PEERS names the folder with SGLang's shared object. The medians are printed with -s,
those of all rounds too; see `tools.host_time` for why they are apart.
"""

import os
from pathlib import Path

import pytest
import torch

from anyfp8 import gemm, quantize, reference
from anyfp8.gemm.launch import Launch, start
from anyfp8.launcher import recording
from anyfp8.linear import Fp8Linear
from anyfp8.problem import QTensor, Scheme
from anyfp8.replay import replay_of
from anyfp8.select import Request
from anyfp8.tools.host_time import host_times

pytestmark = [pytest.mark.gpu, pytest.mark.perf]
# read at import: the environment is cleared of anyfp8's names before a test
FOLDER = os.environ.get("ANYFP8_TEST_PEERS")
M, N, K = 16, 4096, 4096


@pytest.fixture(scope="module")
def medians():
    """{what: µs}, all in one run, of an M = 16 decode step of 4096 x 4096."""
    scheme = Scheme("channel", "token", True)
    layer = Fp8Linear(K, N, scheme, device="cuda", request=Request(backend="triton_row"))
    q = reference.quantize_weight(torch.randn(N, K) / 64, scheme)
    layer.load(QTensor(q.data.cuda(), q.scale.cuda()))
    layer.prepare()
    tuned = Fp8Linear(K, N, scheme, device="cuda")
    tuned.load(QTensor(q.data.cuda(), q.scale.cuda()))
    tuned.prepare()
    x = torch.randn(M, K, device="cuda").bfloat16()
    calls = {}
    with torch.inference_mode():
        xq = quantize.per_token(x)
        plan, prepared = layer.plan(), layer._prepared
        y = plan.run(xq, prepared)
        with recording() as started:
            gemm.backend("triton_row").run(
                xq, prepared, plan.problem_at(M), plan.choice(M).config, out=y
            )
        inputs = [xq.codes, *prepared.stored, xq.scale]
        replay = replay_of(started, inputs, y)
        pointers = [t.data_ptr() for t in inputs]
        stream, at = torch.cuda.current_stream().cuda_stream, y.data_ptr()
        # a compiled kernel and its arguments
        calls["launch"] = lambda: replay.written(stream, 0, at, *pointers)
        calls["launch on the current stream"] = lambda: replay(pointers, y)
        launch = _launch_of(xq, prepared, plan, y)
        calls["launch found by form"] = lambda: start(launch)
        calls["product, output given"] = lambda: plan.run(xq, prepared, out=y)
        calls["product with output"] = lambda: plan.run(xq, prepared)
        calls["quantizer"] = lambda: quantize.per_token(x)
        calls["bf16 linear"] = lambda: layer(x)
        op, key = torch.ops.anyfp8.linear.default, layer.key
        calls["bf16 linear as torch op"] = lambda: op(x, layer._stored, None, None, key)
        calls["bf16 linear, backend by plan"] = lambda: tuned(x)
        w = torch.randn(N, K, device="cuda").bfloat16()
        calls["torch bf16 linear"] = lambda: torch.nn.functional.linear(x, w)
        # the smallest launch that torch makes: what the driver takes
        calls["torch.cuda._sleep(0)"] = lambda: torch.cuda._sleep(0)
        calls["torch's new_empty of the output"] = lambda: x.new_empty(M, N)
        if FOLDER and (Path(FOLDER) / "sglC.so").exists():
            calls |= _sglang(x, xq, prepared, y)
        found = host_times(calls, torch.cuda.synchronize, seconds=6)
    print()
    for what, each in found.items():
        print(f"{each.us:7.2f} us, of all {each.all_us:5.2f}  {what}")
    print(f"undisturbed: {100 * found['launch'].quiet:.0f} % of the rounds")
    return {what: each.us for what, each in found.items()}


def _launch_of(xq, prepared, plan, y):
    seen = []
    with gemm.launch.use_target(_here(), seen.append):
        config = plan.choice(M).config
        gemm.backend("triton_row").run(xq, prepared, plan.problem_at(M), config, out=y)
    assert isinstance(seen[0], Launch)
    return seen[0]


def _here():
    from anyfp8.device import current_device

    return current_device()


def _sglang(x, xq, prepared, y):
    torch.ops.load_library(str(Path(FOLDER) / "sglC.so"))
    multiply = torch.ops.sgl_kernel.fp8_scaled_mm.default
    token = torch.ops.sgl_kernel.sgl_per_token_quant_fp8.default
    codes, sw = prepared.codes.view(torch.float8_e4m3fn), prepared.scale.contiguous()
    w = codes.t()

    def quantized():
        q = torch.empty_like(x, dtype=torch.float8_e4m3fn)
        s = x.new_empty((len(x), 1), dtype=torch.float32)
        token(x, q, s)
        return q, s

    data, scale = xq.data.view(torch.float8_e4m3fn), xq.scale
    error = (multiply(data, w, scale, sw, torch.bfloat16, None).float() - y.float()).norm()
    assert error < 0.01 * y.float().norm()

    def both():
        q, s = quantized()
        return multiply(q, w, s, sw, torch.bfloat16, None)

    return {
        "SGLang's product with output": lambda: multiply(data, w, scale, sw, torch.bfloat16, None),
        "SGLang's product and quantizer": both,
    }


@pytest.mark.parametrize(
    ("what", "most"),
    [("launch", 5), ("product with output", 12), ("bf16 linear", 20)],
)
def test_a_call_takes_the_host_little(medians, what, most):
    assert medians[what] <= most


@pytest.mark.skipif(not FOLDER, reason="ANYFP8_TEST_PEERS names no folder of peers")
def test_a_linear_takes_the_host_less_than_sglangs_op_and_quantizer(medians):
    assert medians["bf16 linear"] <= 0.8 * medians["SGLang's product and quantizer"]
