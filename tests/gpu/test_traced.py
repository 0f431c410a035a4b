"""A traced model on the GPU: two graphs for every M, eager's bits, Inductor's own CUDA graphs."""

import pytest
import torch
import torch._dynamo.testing

import anyfp8
from anyfp8 import reference
from anyfp8.linear import Fp8Linear
from anyfp8.problem import QTensor, Scheme

# what torch says of its own modules when Inductor is imported
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::Warning:torch")]

MS = (1, 2, 17, 33, 512)
N, K = 640, 512


def model_of(scheme):
    scheme, layers = Scheme.parse(scheme), []
    for n, k, bias in ((N, K, True), (K, N, False)):
        torch.manual_seed(n)
        layer = Fp8Linear(k, n, scheme, bias=bias, device="cuda")
        q = reference.quantize_weight(torch.randn(n, k) / k**0.5, scheme)
        layer.load(
            QTensor(q.data.cuda(), q.scale.cuda(), q.block),
            bias=torch.randn(n, device="cuda") if bias else None,
        )
        layers.append(layer)
    model = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1])
    anyfp8.warmup(model, ms=MS)
    return model


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@torch.inference_mode()
@pytest.mark.parametrize(
    "scheme", ["w8a8-channel-token", "w8a8-block128x128-group128", "w8a16-channel"]
)
def test_inductor_serves_every_m_with_two_graphs_and_eagers_bits(scheme):
    model = model_of(scheme)
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for m in MS:
        x = torch.randn(m, K, device="cuda").bfloat16()
        assert torch.equal(compiled(x), model(x))
    assert counter.frame_count <= 2


@pytest.mark.slow
@torch.inference_mode()
def test_inductors_own_cuda_graphs_equal_eager():
    model = model_of("w8a8-channel-token")
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    for _ in range(5):
        x = torch.randn(17, K, device="cuda").bfloat16()
        want = model(x)
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.equal(compiled(x).clone(), want)


@pytest.mark.parametrize("scheme", ["w8a8-channel-token", "w8a16-channel"])
def test_the_op_keeps_torchs_rules(scheme):
    layer = model_of(scheme)[0]
    x = torch.randn(17, K, device="cuda").bfloat16()
    arguments = (x, layer._stored, layer.bias, None, layer.key)
    torch.library.opcheck(torch.ops.anyfp8.linear.default, arguments)
