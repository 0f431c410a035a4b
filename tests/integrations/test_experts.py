"""Mixtures of experts, which transformers fuses into 3-D parameters and checkpoints do not."""

from __future__ import annotations

import copy
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from anyfp8 import Fp8Linear, convert, load, reference
from anyfp8.checkpoint import open_checkpoint
from anyfp8.errors import CalibrationError, CheckpointError
from anyfp8.integrations.transformers import reload, save
from anyfp8.tools.quantize import quantize_checkpoint

FAMILIES = ("Mixtral", "Qwen3Moe", "DeepseekV3")
# the first expert as every file of the family names it, gate before up before down
EXPERT = {
    "Mixtral": ("model.layers.1.block_sparse_moe.experts.0", ("w1", "w3", "w2")),
    "Qwen3Moe": ("model.layers.1.mlp.experts.0", ("gate_proj", "up_proj", "down_proj")),
    "DeepseekV3": ("model.layers.1.mlp.experts.0", ("gate_proj", "up_proj", "down_proj")),
}
CONFIG = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    # DeepSeek's
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
    "initializer_range": 0.1,
}
IDS = torch.arange(1, 41)[None]


def save_mixture(family, folder, **changes):
    """A tiny random model as transformers saves it."""
    import transformers

    torch.manual_seed(0)
    if family == "DeepseekV3":
        changes["head_dim"] = CONFIG["qk_rope_head_dim"]
    config = getattr(transformers, f"{family}Config")(**CONFIG | changes)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=FAMILIES)
def mixture(request, tmp_path_factory):
    """(family, 16-bit folder, FP8 folder)."""
    root = tmp_path_factory.mktemp(request.param)
    folder = save_mixture(request.param, root / "bf16")
    quantize_checkpoint(folder, root / "fp8", scheme="w8a8-channel-token", device="cpu")
    return request.param, folder, root / "fp8"


def logits(model):
    with torch.no_grad():
        return model(IDS.to(next(model.parameters()).device)).logits


def dequantized(fp8, source, out):
    """The FP8 checkpoint with codes · scale in fp32, by torch alone; what transformers reads."""
    raw = load_file(fp8 / "model.safetensors")
    tensors = {}
    for name, value in raw.items():
        if value.dtype == torch.float8_e4m3fn:
            scale = raw[name.replace(".weight", ".weight_scale")]
            value = value.float() * scale.float().reshape(-1, 1)
        if not name.endswith("_scale"):
            tensors[name] = value.float()
    out.mkdir()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return out


def test_experts_are_written_one_by_one_under_their_official_names(mixture):
    family, folder, fp8 = mixture
    block, leaves = EXPERT[family]
    stored = load_file(fp8 / "model.safetensors")
    original = load_file(folder / "model.safetensors")
    for leaf in leaves:
        assert stored[f"{block}.{leaf}.weight"].dtype == torch.float8_e4m3fn
        assert f"{block}.{leaf}.weight_scale" in stored
    # nothing is renamed and the router stays
    scales = {name for name in stored if name.endswith("_scale")}
    assert stored.keys() - scales == original.keys()
    router = f"{block.removesuffix('.experts.0')}.gate.weight"
    assert torch.equal(stored[router], original[router])


def test_a_mixture_computes_what_transformers_does_with_dequantized_weights(mixture, tmp_path):
    import transformers

    _, folder, fp8 = mixture
    plain = dequantized(fp8, folder, tmp_path / "plain")
    official = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    model = load(fp8, device="cpu", dtype=torch.float32)
    experts = [n for n, m in model.named_modules() if isinstance(m, Fp8Linear) and "experts." in n]
    assert len([n for n in experts if ".experts." in n]) >= 12
    torch.testing.assert_close(logits(model), logits(official), rtol=1e-4, atol=1e-5)
    ids = IDS[:, :4]
    ours = model.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(ours, official.generate(ids, max_new_tokens=6, do_sample=False))


def test_a_mixture_in_16_bits_equals_transformers(mixture):
    import transformers

    _, folder, _ = mixture
    official = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = load(folder, device="cpu", dtype=torch.float32)
    torch.testing.assert_close(logits(model), logits(official), rtol=1e-4, atol=1e-5)
    # in memory, fused as transformers has it
    converted = copy.deepcopy(official)
    report = convert(converted, "w8a16-channel")
    assert sum(".experts." in name for name in report.converted) >= 12
    assert not report.skipped or {name for name, _ in report.skipped} == {"lm_head"}
    quantized = load(folder, device="cpu", dtype=torch.float32, scheme="w8a16-channel")
    torch.testing.assert_close(logits(converted), logits(quantized), rtol=1e-4, atol=1e-5)


def test_a_mixture_is_saved_and_reloaded_bit_for_bit(mixture, tmp_path):
    _, _, fp8 = mixture
    model = load(fp8, device="cpu")
    save(model, tmp_path / "again")
    want, found = (load_file(f / "model.safetensors") for f in (fp8, tmp_path / "again"))
    assert found.keys() == want.keys()
    for name, value in want.items():
        # transformers keeps DeepSeek's routers in fp32, whatever the file holds
        same = found[name].dtype == value.dtype or ".mlp.gate." in name
        assert same, name
        assert torch.equal(found[name].float(), value.float()), name
    before = logits(model)
    reload(model, tmp_path / "again")
    assert torch.equal(logits(model), before)
    ignore = json.loads((tmp_path / "again" / "config.json").read_text())
    assert any(n.endswith(".gate") for n in ignore["quantization_config"]["ignore"])


def test_static_scales_of_experts_come_from_the_tokens_that_reach_them(tmp_path):
    folder = save_mixture("Qwen3Moe", tmp_path / "bf16")
    windows = torch.randint(1, 64, (2, 128), generator=torch.Generator().manual_seed(0))
    quantize_checkpoint(folder, tmp_path / "fp8", calib=list(windows.split(1)), device="cpu")
    plan = open_checkpoint(tmp_path / "fp8").plan
    experts = [layer for name, layer in plan.layers.items() if ".experts." in name]
    assert len(experts) == 24
    assert all(layer.input_scale for layer in experts)
    # two tokens reach four of eight experts at most
    with pytest.raises(CalibrationError, match="no input scale") as caught:
        quantize_checkpoint(folder, tmp_path / "few", calib=[windows[:1, :1]], device="cpu")
    assert "never ran: model.layers" in caught.value.got
    assert ".experts." in caught.value.got


def test_the_mix_is_the_sum_over_the_routers_choice(mixture):
    family, folder, _ = mixture
    model = load(folder, device="cpu", dtype=torch.float32)
    block = model.get_submodule(EXPERT[family][0].removesuffix(".0"))
    x = torch.randn(5, 64)
    index = torch.tensor([[0, 1], [3, 0], [2, 2], [1, 3], [0, 2]])
    weights = torch.rand(5, 2)
    want = torch.stack(
        [
            sum(w * block[int(e)](row[None])[0] for e, w in zip(chosen, given, strict=True))
            for row, chosen, given in zip(x, index, weights, strict=True)
        ]
    )
    torch.testing.assert_close(block(x, index, weights), want)
    # a row's result does not depend on its neighbours' choice
    torch.testing.assert_close(block(x[1:2], index[1:2], weights[1:2])[0], want[1])
    assert block(x[:0], index[:0], weights[:0]).shape == (0, 64)


def test_layers_that_the_model_leaves_out_are_not_loaded(mixture, tmp_path, caplog):
    # DeepSeek's files hold a layer for multi-token prediction behind the last one
    family, _, fp8 = mixture
    if family != "DeepseekV3":
        pytest.skip("only this family has such a layer")
    folder = tmp_path / "mtp"
    shutil.copytree(fp8, folder)
    stored = load_file(fp8 / "model.safetensors")
    first = {n: v for n, v in stored.items() if n.startswith("model.layers.1.")}
    more = {n.replace("layers.1.", "layers.61."): v.clone() for n, v in first.items()}
    save_file(stored | more, folder / "model.safetensors")
    model = load(folder, device="cpu")
    assert torch.equal(logits(model), logits(load(fp8, device="cpu")))
    assert "DeepseekV3ForCausalLM leaves out" in caplog.text
    reload(model, folder)


def test_experts_of_another_form_are_refused_before_anything_is_read(tmp_path, monkeypatch):
    from anyfp8.checkpoint.files import TensorFiles
    from anyfp8.linear import experts

    folder = save_mixture("Qwen3Moe", tmp_path / "bf16")
    quantize_checkpoint(folder, tmp_path / "fp8", scheme="w8a8-channel-token", device="cpu")
    read, plain = [], TensorFiles.read
    monkeypatch.setattr(
        TensorFiles, "read", lambda self, name: read.append(name) or plain(self, name)
    )
    monkeypatch.setitem(experts._FORM, "has_bias", (True, "have no biases"))
    with pytest.raises(CheckpointError, match=r"experts\.0\.") as caught:
        load(tmp_path / "fp8")
    assert "all experts of a layer in one parameter" in caught.value.got
    assert "have no biases" in caught.value.got
    assert "SGLang" in caught.value.hint
    # a plan looks at the scales, and the refusal comes before the rest
    assert all(name.endswith("_scale") for name in read)


def test_experts_quantize_as_any_linear_does(mixture):
    family, folder, fp8 = mixture
    block, leaves = EXPERT[family]
    original = load_file(folder / "model.safetensors")
    checkpoint = open_checkpoint(fp8)
    for leaf in leaves:
        layer = checkpoint.layer(f"{block}.{leaf}")
        w = original[f"{block}.{leaf}.weight"].float()
        scale = (w.abs().amax(1, keepdim=True) / 448).clamp(min=1e-30)
        want = (w * (1 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
        assert torch.equal(reference.dequantize(layer.weight), want)


def test_transformers_reads_the_experts_that_we_write(tmp_path):
    import transformers

    changes = {"hidden_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 1}
    folder = save_mixture("Qwen3Moe", tmp_path / "bf16", head_dim=64, **changes)
    scheme = "w8a8-block128x128-group128"
    report = quantize_checkpoint(folder, tmp_path / "fp8", scheme=scheme, device="cpu")
    assert report.format == "compressed-tensors"
    quantize_checkpoint(
        folder, tmp_path / "fine", scheme=scheme, format="finegrained", device="cpu"
    )
    # without a GPU it dequantizes while it loads
    config = transformers.FineGrainedFP8Config(dequantize=True)
    official = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "fine", dtype=torch.bfloat16, quantization_config=config
    )
    theirs = official.model.layers[0].mlp.experts
    checkpoint = open_checkpoint(tmp_path / "fine")
    for i in range(4):
        gate, up, down = (
            reference.dequantize(
                checkpoint.layer(f"model.layers.0.mlp.experts.{i}.{leaf}").weight, torch.bfloat16
            )
            for leaf in ("gate_proj", "up_proj", "down_proj")
        )
        assert torch.equal(theirs.gate_up_proj[i], torch.cat([gate, up]))
        assert torch.equal(theirs.down_proj[i], down)
    model = load(tmp_path / "fine", device="cpu")
    torch.testing.assert_close(logits(model), logits(official), rtol=0.02, atol=0.02)
