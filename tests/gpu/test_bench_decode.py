"""The decoder stack of `bench decode` on a GPU: judged, and the same from a graph as eagerly."""

from dataclasses import replace

import pytest
import torch

from anyfp8.problem import Scheme
from anyfp8.select import Request
from anyfp8.tools import bench_decode, timing
from anyfp8.tools.decode_shapes import MODELS
from anyfp8.tools.decode_stack import Stack, Weights, applied

pytestmark = pytest.mark.gpu

SMALL = replace(MODELS["qwen3-8b"], name="small", hidden=1024, inner=2048, heads=8, vocabulary=4096)


def test_every_linear_is_right_with_the_kill_switch_on_and_off():
    result = bench_decode.run(
        SMALL, layers=2, batches=(1, 17), context=33, prefill=40, rounds=5, seconds=5, warm=False
    )
    for cell in result["cells"]:
        assert not cell.wrong
        assert len(cell.ours) == 2
        # other tiles, other orders of summation, and codes that round the other way
        assert all(difference < 0.1 for difference in cell.logits.values())


def test_a_replayed_step_gives_the_logits_of_an_eager_one():
    with torch.inference_mode():
        weights = Weights(SMALL, 2, Scheme("channel", "token", True), torch.device("cuda"), 3)
        stack = Stack(weights, 4, 33, 8)
        linear = applied(weights.fp8_linears(Request()))
        want = stack.decode(linear)
        kept = torch.empty_like(want)
        graph, _ = timing.capture([lambda: kept.copy_(stack.decode(linear))], 1)
        kept.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(kept, want)
