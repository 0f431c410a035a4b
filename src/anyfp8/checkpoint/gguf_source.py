"""GGUF file -> bf16 tensors under Hugging Face names, with config and tokenizer from its metadata.

llama.cpp's one-file format: metadata, then tensors in block formats (Q4_1, Q8_0, ...). Used as a
source to quantize from; the `gguf` package dequantizes it.

The surprise: llama.cpp stores the rows of q_proj and k_proj of llama models permuted (its rotary
embedding pairs neighbours, Hugging Face pairs halves). Loaded without undoing that, a model talks
nonsense without an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anyfp8.checkpoint.files import TensorSpec
from anyfp8.checkpoint.gguf_file import GgufFile, read_gguf
from anyfp8.checkpoint.gguf_tokenizer import check_tokenizer, write_tokenizer
from anyfp8.errors import CheckpointError, MissingPackage

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufSource:
    """A GGUF file of the llama architecture as a bf16 model; see `sources.Source`.

    Attributes:
        path: the file.
        format: "gguf".
        config: a LlamaConfig made from the metadata.
        specs: name -> dtype (BF16) and shape of every tensor.
    """

    format = "gguf"

    def __init__(self, path: Path) -> None:
        reader = _reader(path)
        self.path = path
        self.metadata = reader.metadata
        architecture = self._value("general.architecture")
        if architecture != "llama":
            raise CheckpointError(
                f"cannot read the architecture of {path.name}",
                got=f"general.architecture {architecture!r}",
                want="'llama'",
                hint="start from the model's Hugging Face folder",
            )
        self._stored = {hf_name(t.name, path.name): t for t in reader.tensors}
        self.specs: Mapping[str, TensorSpec] = {
            name: TensorSpec(name, "BF16", t.shape) for name, t in self._stored.items()
        }
        self.config: Mapping[str, Any] = self._config()
        check_tokenizer(self._tokenizer(), path.name)

    def _value(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(key, default)

    def _need(self, key: str) -> Any:
        value = self._value(key)
        if value is None:
            raise CheckpointError(
                f"{self.path.name} lacks metadata",
                got=f"no {key}",
                want="the metadata of a llama model",
                hint="convert the model to GGUF again",
            )
        return value

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, dequantized, bf16, rows of q and k in Hugging Face's order."""
        from gguf import dequantize

        stored = self._stored.get(name)
        if stored is None:
            raise CheckpointError(f"no tensor {name} in {self.path.name}")
        values = torch.from_numpy(np.array(dequantize(stored.data, stored.tensor_type), np.float32))
        values = values.reshape(self.specs[name].shape).bfloat16()
        if ".q_proj." in name:
            return unpermute(values, self.config["num_attention_heads"])
        if ".k_proj." in name:
            return unpermute(values, self.config["num_key_value_heads"])
        return values

    def write_sidecars(self, folder: Path) -> None:
        """Write config.json, generation_config.json and the tokenizer made from the metadata."""
        from anyfp8.checkpoint.sources import write_json

        write_json(folder / "config.json", self.config)
        ids = ("bos_token_id", "eos_token_id", "pad_token_id")
        write_json(folder / "generation_config.json", {key: self.config[key] for key in ids})
        length = self.config["max_position_embeddings"]
        write_tokenizer(folder, self._tokenizer(), length, self.path.name)

    def _tokenizer(self) -> dict[str, Any]:
        return {
            key.removeprefix("tokenizer."): self._value(key)
            for key in self.metadata
            if key.startswith("tokenizer.")
        }

    def _config(self) -> dict[str, Any]:
        heads = self._need("llama.attention.head_count")
        hidden = self._need("llama.embedding_length")
        theta = _short(self._value("llama.rope.freq_base", 10000.0))
        if self._value("llama.rope.scaling.type", "none") not in ("none", ""):
            raise CheckpointError(
                f"{self.path.name} scales its rotary embedding",
                got=f"llama.rope.scaling.type {self._value('llama.rope.scaling.type')!r}",
                want="a model without rope scaling",
                hint="start from the model's Hugging Face folder",
            )
        return {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in self.specs,
            "attention_dropout": 0.0,
            "bos_token_id": self._value("tokenizer.ggml.bos_token_id"),
            "dtype": "bfloat16",
            "eos_token_id": self._value("tokenizer.ggml.eos_token_id"),
            "head_dim": self._value("llama.rope.dimension_count", hidden // heads),
            "hidden_act": "silu",
            "hidden_size": hidden,
            "initializer_range": 0.02,
            "intermediate_size": self._need("llama.feed_forward_length"),
            "max_position_embeddings": self._need("llama.context_length"),
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": heads,
            "num_hidden_layers": self._need("llama.block_count"),
            "num_key_value_heads": self._value("llama.attention.head_count_kv", heads),
            "pad_token_id": self._value("tokenizer.ggml.padding_token_id"),
            "rms_norm_eps": _short(self._need("llama.attention.layer_norm_rms_epsilon")),
            "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
            # readers from before transformers 5 look here
            "rope_theta": theta,
            "tie_word_embeddings": "lm_head.weight" not in self.specs,
            "use_cache": True,
            "vocab_size": self.specs["model.embed_tokens.weight"].shape[0],
        }


def hf_name(name: str, file: str) -> str:
    """The Hugging Face name of a llama tensor of a GGUF file, or a CheckpointError."""
    if name in _TOP:
        return _TOP[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _BLOCK:
        raise CheckpointError(
            f"no place for the tensor {name} in {file}",
            want="the tensors of a dense llama model",
            hint="start from the model's Hugging Face folder",
        )
    return f"model.layers.{match[1]}.{_BLOCK[match[2]]}.{match[3]}"


def unpermute(w: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's row order: within a head, (pair, half) -> (half, pair). w: [N, ...]."""
    return w.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def _short(value: float) -> float:
    """The shortest decimal of an fp32 value: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _reader(path: Path) -> GgufFile:
    try:
        return read_gguf(path)
    except ImportError as error:
        raise MissingPackage(
            "reading a GGUF file needs the gguf package",
            got=str(error),
            want="gguf >= 0.17",
            hint="pip install 'anyfp8[models]'",
        ) from error
    except (ValueError, OSError) as error:
        raise CheckpointError(
            f"{path.name} is not a whole GGUF file",
            got=f"{type(error).__name__}: {error}",
            hint="copy or download it again",
            want="a complete GGUF file",
        ) from error
