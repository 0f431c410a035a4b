"""A small random Llama with a byte tokenizer as a 16-bit checkpoint."""

from pathlib import Path

import pytest
import torch


def save_tiny_llama(folder: Path, seed: int = 0, **changes) -> Path:
    """Write a two-layer Llama (hidden 192, not a multiple of 128) with a byte-level tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    options = {
        "vocab_size": 256,
        "hidden_size": 192,
        "intermediate_size": 320,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "initializer_range": 0.05,
        "tie_word_embeddings": False,
    }
    config = LlamaConfig(**options | changes)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.generation_config.eos_token_id = 0
    model.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A folder with a 16-bit tiny Llama; never changed by a test."""
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))
