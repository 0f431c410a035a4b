"""Small checkpoint folders made by hand, written with the safetensors library itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

DATA = Path(__file__).parent.parent / "data" / "checkpoints"
FP8_CONFIG = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}


@pytest.fixture
def data():
    """The folder with files that nvidia-modelopt wrote, cut down."""
    return DATA


@pytest.fixture
def make_folder(tmp_path):
    """Writes a checkpoint folder: tensors, quantization_config, hf_quant_config.json."""

    def make(tensors, quantization=FP8_CONFIG, nested=None, name="model", shards=None):
        folder = tmp_path / name
        folder.mkdir()
        config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
        if quantization is not None:
            config["quantization_config"] = quantization
        (folder / "config.json").write_text(json.dumps(config))
        if nested is not None:
            (folder / "hf_quant_config.json").write_text(json.dumps(nested))
        if shards is None:
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            return folder
        weight_map = {}
        for i, names in enumerate(shards, 1):
            file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
            save_file({n: tensors[n] for n in names}, folder / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder

    return make


@pytest.fixture
def fp8_layer():
    """Tensors of one per-tensor static layer."""

    def make(name, n=64, k=96, scale=0.5, input_scale=0.25, seed=0):
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(n, k, generator=generator) * 50
        tensors = {
            f"{name}.weight": values.clamp(-448, 448).to(torch.float8_e4m3fn),
            f"{name}.weight_scale": torch.tensor(scale),
        }
        if input_scale is not None:
            tensors[f"{name}.input_scale"] = torch.tensor(input_scale)
        return tensors

    return make
