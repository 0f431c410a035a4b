"""load: the model is the one that dequantizing by hand gives, or it is refused by name."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from anyfp8 import reference
from anyfp8.errors import CheckpointError, InputError
from anyfp8.integrations.transformers import load, load_tokenizer, save
from anyfp8.linear import Fp8Linear
from anyfp8.problem import Scheme
from anyfp8.tools.quantize import quantize_checkpoint

IDS = torch.randint(1, 256, (1, 40), generator=torch.Generator().manual_seed(5))
SCHEMES = ["w8a8-tensor-static", "w8a8-channel-token", "w8a16-block128x128"]
WINDOWS = [
    torch.randint(1, 256, (1, 32), generator=torch.Generator().manual_seed(i)) for i in (1, 2)
]


@pytest.fixture(scope="module")
def checkpoints(tiny, tmp_path_factory):
    """scheme -> an FP8 checkpoint of the tiny model in that scheme."""
    root = tmp_path_factory.mktemp("fp8")
    for scheme in SCHEMES:
        quantize_checkpoint(tiny, root / scheme, scheme=scheme, calib=WINDOWS)
    return {scheme: root / scheme for scheme in SCHEMES}


def dequantized(folder, target):
    """A 16-bit copy of an FP8 checkpoint, by plain torch, and transformers' model of it."""
    from transformers import AutoModelForCausalLM

    shutil.copytree(folder, target)
    stored = load_file(folder / "model.safetensors")
    plain = {}
    for name, value in stored.items():
        if value.dtype == torch.float8_e4m3fn:
            scale = stored[name + "_scale"]
            if scale.ndim == 4:
                scale = scale[:, 0, :, 0].repeat_interleave(128, 0).repeat_interleave(128, 1)
                scale = scale[: value.shape[0], : value.shape[1]]
            elif scale.ndim == 1:
                scale = scale[:, None]
            plain[name] = (value.float() * scale).bfloat16()
        elif not name.endswith("_scale"):
            plain[name] = value
    save_file(plain, target / "model.safetensors", {"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config))
    (target / "hf_quant_config.json").unlink()
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_logits_equal_dequantizing_by_hand_then_transformers(checkpoints, scheme, tmp_path):
    model = load(checkpoints[scheme])
    want = dequantized(checkpoints[scheme], tmp_path / "plain")
    with torch.inference_mode():
        assert torch.equal(model(IDS).logits, want(IDS).logits)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_quantized_linear_is_fp8_and_nothing_else(checkpoints, scheme):
    model = load(checkpoints[scheme])
    names = {n for n, m in model.named_modules() if isinstance(m, Fp8Linear)}
    assert len(names) == 14
    assert all(n.endswith("_proj") for n in names)
    assert type(model.lm_head) is torch.nn.Linear
    assert not any(p.requires_grad for p in model.parameters())


def test_emulation_changes_the_logits_a_little(checkpoints):
    with torch.inference_mode():
        plain = load(checkpoints["w8a8-channel-token"])(IDS).logits.float()
        emulated = load(checkpoints["w8a8-channel-token"], emulate=True)(IDS).logits.float()
    assert 0.005 < (emulated - plain).norm() / plain.norm() < 0.2


def test_a_16_bit_checkpoint_can_be_quantized_while_loading(tiny, checkpoints):
    direct = load(tiny, scheme="w8a8-channel-token")
    with torch.inference_mode():
        assert torch.equal(direct(IDS).logits, load(checkpoints["w8a8-channel-token"])(IDS).logits)


def test_tied_heads_stay_tied(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "a")
    quantize_checkpoint(tmp_path / "a", tmp_path / "b", scheme="w8a8-channel-token")
    model = load(tmp_path / "b")
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_source_is_never_changed(tiny, tmp_path):
    before = {p.name: p.read_bytes() for p in tiny.iterdir()}
    quantize_checkpoint(tiny, tmp_path / "out", scheme="w8a8-tensor-static", calib=WINDOWS)
    assert {p.name: p.read_bytes() for p in tiny.iterdir()} == before


def test_static_scales_are_amax_over_448(tiny, tmp_path):
    from transformers import AutoModelForCausalLM

    quantize_checkpoint(tiny, tmp_path / "out", scheme="w8a8-tensor-static", calib=WINDOWS)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16)
    seen = []
    proj = model.model.layers[1].mlp.down_proj
    proj.register_forward_pre_hook(lambda _m, args: seen.append(args[0].abs().max()))
    with torch.inference_mode():
        for window in WINDOWS:
            model(window)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    name = "model.layers.1.mlp.down_proj"
    assert stored[f"{name}.input_scale"] == torch.stack(seen).max().float() / 448
    want = proj.weight.detach().float().abs().max() / 448
    assert stored[f"{name}.weight_scale"] == want


def broken(folder, target, change):
    shutil.copytree(folder, target)
    stored = load_file(target / "model.safetensors")
    change(stored)
    save_file(stored, target / "model.safetensors", {"format": "pt"})
    return target


NAME = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda s: s.pop(f"{NAME}.weight_scale"), f"{NAME}"),
        (lambda s: s.pop("model.norm.weight"), "model.norm.weight"),
        (lambda s: s.update({"model.extra.weight": torch.ones(3)}), "model.extra.weight"),
        (lambda s: s.update({"model.norm.weight": torch.ones(3)}), "model.norm.weight"),
    ],
    ids=["no-scale", "missing", "unexpected", "wrong-shape"],
)
def test_files_that_do_not_fit_are_refused_by_name(checkpoints, tmp_path, change, part):
    folder = broken(checkpoints["w8a16-block128x128"], tmp_path / "bad", change)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert part in str(caught.value)


def test_a_config_of_another_model_is_refused(checkpoints, tmp_path):
    folder = tmp_path / "bad"
    shutil.copytree(checkpoints["w8a8-channel-token"], folder)
    config = json.loads((folder / "config.json").read_text())
    config["intermediate_size"] = 384
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"mlp\.\w+ has no place"):
        load(folder)


def test_an_unknown_architecture_is_refused(checkpoints, tmp_path):
    folder = tmp_path / "bad"
    shutil.copytree(checkpoints["w8a8-channel-token"], folder)
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "no_such_model"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="cannot build this model"):
        load(folder)


def test_schemes_that_loading_cannot_serve_are_refused(tiny, checkpoints):
    with pytest.raises(InputError, match="needs calibration"):
        load(tiny, scheme="w8a8-tensor-static")
    with pytest.raises(InputError, match="is an FP8 checkpoint already"):
        load(checkpoints["w8a8-channel-token"], scheme="w8a16-tensor")


def test_a_folder_without_a_tokenizer_is_refused(checkpoints, tmp_path):
    shutil.copytree(checkpoints["w8a8-channel-token"], tmp_path / "bad")
    for path in (tmp_path / "bad").glob("tokenizer*"):
        path.unlink()
    with pytest.raises(CheckpointError, match="no tokenizer"):
        load_tokenizer(tmp_path / "bad")


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def tied(tmp_path, change):
    """An FP8 checkpoint of a tied model, with a change to its tensors, and its logits before."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        initializer_range=0.05,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "bf16")
    quantize_checkpoint(
        tmp_path / "bf16", tmp_path / "fp8", scheme="w8a8-channel-token", device="cpu"
    )
    before = logits(load(tmp_path / "fp8", device="cpu"))
    tensors = load_file(tmp_path / "fp8" / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "fp8" / "model.safetensors")
    return tmp_path / "fp8", before


def test_a_tied_head_may_lie_in_the_file_beside_the_embedding_or_in_its_place(tmp_path):
    def double(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    folder, before = tied(tmp_path, double)
    assert torch.equal(logits(load(folder, device="cpu")), before)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, folder / "model.safetensors")
    assert torch.equal(logits(load(folder, device="cpu")), before)


def test_a_head_that_is_not_the_embedding_is_not_tied_to_it(tmp_path, caplog):
    def other(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2

    folder, before = tied(tmp_path, other)
    model = load(folder, device="cpu")
    assert torch.equal(logits(model), 2 * before)
    assert "kept apart" in caplog.text
    save(model, tmp_path / "again")
    assert torch.equal(logits(load(tmp_path / "again", device="cpu")), 2 * before)


def test_an_fp8_head_of_a_tied_model_is_run_as_it_is(tmp_path):
    def quantized(tensors):
        q = reference.quantize_weight(tensors["model.embed_tokens.weight"], Scheme("channel"))
        tensors["lm_head.weight"] = q.codes.view(torch.float8_e4m3fn)
        tensors["lm_head.weight_scale"] = q.scale.flatten()

    folder, before = tied(tmp_path, quantized)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"] = []
    (folder / "config.json").write_text(json.dumps(config))
    model = load(folder, device="cpu")
    assert isinstance(model.lm_head, Fp8Linear)
    assert model.get_input_embeddings().weight.dtype == torch.bfloat16
    # FP8 rounding of one weight: 0.026
    assert (logits(model) - before).float().norm() / before.float().norm() < 0.033
