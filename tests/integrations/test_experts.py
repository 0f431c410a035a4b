"""Mixtures of experts, which transformers fuses into 3-D parameters: refused before a read."""

import pytest
import torch

from anyfp8.checkpoint import quantize_stream
from anyfp8.checkpoint.files import TensorFiles
from anyfp8.checkpoint.sources import open_source
from anyfp8.errors import CheckpointError
from anyfp8.integrations.transformers import load
from anyfp8.problem import Scheme
from anyfp8.tools.quantize import quantize_checkpoint

FIRST = {
    "Mixtral": "model.layers.0.block_sparse_moe.experts.0.w1.weight",
    "Qwen3Moe": "model.layers.0.mlp.experts.0.down_proj.weight",
}


@pytest.fixture(scope="module", params=FIRST)
def mixture(request, tmp_path_factory):
    """A tiny random mixture of experts as transformers saves it, and its first expert tensor."""
    import transformers

    config = getattr(transformers, f"{request.param}Config")(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_local_experts=4,
        num_experts=4,
        num_experts_per_tok=2,
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("experts") / request.param
    model = getattr(transformers, f"{request.param}ForCausalLM")(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder, FIRST[request.param]


def refused(folder, first, monkeypatch):
    read, plain = [], TensorFiles.read
    monkeypatch.setattr(
        TensorFiles, "read", lambda self, name: read.append(name) or plain(self, name)
    )
    with pytest.raises(CheckpointError, match=r"experts\.0\.") as caught:
        load(folder)
    error = caught.value
    assert first.removesuffix(".weight") in error.what
    assert "all experts of a layer in one parameter" in error.got
    assert "linear layers" in error.want
    assert "SGLang" in error.hint
    # a plan looks at the scales, and the refusal comes before the rest
    return [name for name in read if not name.endswith("_scale")]


def test_fused_experts_in_16_bits_are_refused_before_anything_is_read(
    mixture, tmp_path, monkeypatch
):
    folder, first = mixture
    quantize_checkpoint(folder, tmp_path / "fp8", scheme="w8a8-channel-token")
    assert refused(folder, first, monkeypatch) == []
    assert refused(tmp_path / "fp8", first, monkeypatch) == []


def test_fused_experts_in_fp8_are_refused_before_anything_is_read(mixture, tmp_path, monkeypatch):
    folder, first = mixture
    # by name, as tools do that quantize the experts' own linears
    report = quantize_stream(
        open_source(folder), tmp_path / "fp8", Scheme("channel", "token", dynamic=True)
    )
    assert first.removesuffix(".weight") in report.layers
    assert refused(tmp_path / "fp8", first, monkeypatch) == []
