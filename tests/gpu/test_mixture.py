"""A mixture of experts on the GPU: weight-only as on the CPU, and every expert on FP8 units."""

import pytest
import torch

from anyfp8 import reference
from anyfp8.linear import Fp8Linear
from anyfp8.problem import QTensor
from anyfp8.select import Request

pytestmark = pytest.mark.gpu

IDS = torch.randint(1, 256, (1, 70), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random Qwen3-MoE of one layer with eight experts, per-token × per-channel."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from anyfp8.tools.quantize import quantize_checkpoint

    root = tmp_path_factory.mktemp("mixture")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=8,
        num_experts_per_tok=2,
        initializer_range=0.04,
        tie_word_embeddings=False,
    )
    Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(root / "bf16")
    quantize_checkpoint(root / "bf16", root / "fp8", scheme="w8a8-channel-token")
    return root / "fp8"


def logits(model, ids=IDS):
    with torch.inference_mode():
        return model(ids.to(next(model.parameters()).device)).logits.float().cpu()


def test_weight_only_equals_the_cpu(folder):
    from anyfp8.integrations.transformers import load

    want = logits(load(folder, device="cpu"))
    found = logits(load(folder, request=Request(force_weight_only=True)))
    # bf16 routers may choose otherwise where two experts are nearly equal: few rows, not most
    rows = (found - want).norm(dim=-1) / want.norm(dim=-1)
    assert float(rows.median()) < 0.02


def test_every_expert_computes_what_its_scheme_asks_for(folder):
    from anyfp8.integrations.transformers import load

    model = load(folder)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, Fp8Linear)}
    assert sum(".experts." in name for name in layers) == 24
    for layer in layers.values():
        x = torch.randn(9, layer.in_features, device="cuda").bfloat16()
        w = QTensor(layer.weight, layer.weight_scale, layer.scheme.block)
        want = reference.linear(x, w, layer.scheme).float()
        assert float((layer(x).float() - want).norm() / want.norm()) < 5e-3
    # more rows than experts choose, one row, and none
    experts = model.model.layers[0].mlp.experts
    x = torch.randn(5, 256, device="cuda").bfloat16()
    index = torch.tensor([[0, 7], [3, 0], [2, 5], [7, 3], [0, 2]], device="cuda")
    weights = torch.rand(5, 2, device="cuda").bfloat16()
    whole = experts(x, index, weights)
    alone = torch.cat(
        [experts(x[i : i + 1], index[i : i + 1], weights[i : i + 1]) for i in range(5)]
    )
    torch.testing.assert_close(whole, alone, rtol=2e-2, atol=2e-2)
    assert experts(x[:0], index[:0], weights[:0]).shape == (0, 256)
