"""µs of host time of a call, beside SGLang's; a GPU that is behind does not count.

ANYFP8_TEST_PEERS names the folder with SGLang's shared object. The medians are printed with -s.
"""

import os
import statistics
import time
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

pytestmark = [pytest.mark.gpu, pytest.mark.perf]
# read at import: the environment is cleared of anyfp8's names before a test
FOLDER = os.environ.get("ANYFP8_TEST_PEERS")
M, N, K = 16, 4096, 4096


def host_us(call, rounds=60, calls=20):
    """Median over rounds of a call's host time; the queue is empty when a round starts."""
    for _ in range(10):
        call()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - began) / calls * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


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
    found = {}
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
        found["launch"] = host_us(lambda: replay.written(stream, 0, at, *pointers))
        found["launch on the current stream"] = host_us(lambda: replay(pointers, y))
        launch = _launch_of(xq, prepared, plan, y)
        found["launch found by form"] = host_us(lambda: start(launch))
        found["product, output given"] = host_us(lambda: plan.run(xq, prepared, out=y))
        found["product with output"] = host_us(lambda: plan.run(xq, prepared))
        found["quantizer"] = host_us(lambda: quantize.per_token(x))
        found["bf16 linear"] = host_us(lambda: layer(x))
        op, key = torch.ops.anyfp8.linear.default, layer.key
        found["bf16 linear as torch op"] = host_us(lambda: op(x, layer._stored, None, None, key))
        found["bf16 linear, backend by plan"] = host_us(lambda: tuned(x))
        found["torch bf16 linear"] = host_us(
            lambda w=torch.randn(N, K, device="cuda").bfloat16(): torch.nn.functional.linear(x, w)
        )
        # the smallest launch that torch makes: what the driver takes
        found["torch.cuda._sleep(0)"] = host_us(lambda: torch.cuda._sleep(0))
        found["allocating the output"] = host_us(lambda: x.new_empty((M, N)))
        if FOLDER and (Path(FOLDER) / "sglC.so").exists():
            found |= _sglang(x, xq, prepared, y)
    print()
    for what, us in found.items():
        print(f"{us:7.2f} us  {what}")
    return found


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
    return {
        "SGLang's product with output": host_us(
            lambda: multiply(data, w, scale, sw, torch.bfloat16, None)
        ),
        "SGLang's product and quantizer": host_us(
            lambda: multiply(quantized()[0], w, scale, sw, torch.bfloat16, None)
        ),
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
