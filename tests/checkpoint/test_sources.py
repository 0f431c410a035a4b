from __future__ import annotations

import json

import pytest
import torch

from anyfp8.checkpoint import is_quantized, open_source
from anyfp8.errors import CheckpointError


def test_a_hugging_face_folder_is_read_with_its_config(make_folder):
    tensors = {
        "model.a.weight": torch.randn(3, 4).bfloat16(),
        "model.b.weight": torch.randn(4, 2).half(),
        "model.norm.weight": torch.randn(4),
    }
    shards = [["model.a.weight"], ["model.b.weight", "model.norm.weight"]]
    source = open_source(make_folder(tensors, None, shards=shards))
    assert source.format == "hf16"
    assert source.config["model_type"] == "llama"
    assert {n: s.dtype for n, s in source.specs.items()} == {
        "model.a.weight": "BF16",
        "model.b.weight": "F16",
        "model.norm.weight": "F32",
    }
    for name, tensor in tensors.items():
        assert torch.equal(source.tensor(name), tensor)


def test_sidecars_are_copied_and_weights_are_not(make_folder, tmp_path):
    folder = make_folder({"model.a.weight": torch.zeros(2, 2)}, None)
    kept = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "modeling_x.py")
    for name in (*kept, "pytorch_model.bin", "README.md", ".gitattributes"):
        (folder / name).write_text(name)
    out = tmp_path / "out"
    out.mkdir()
    open_source(folder).write_sidecars(out)
    assert sorted(p.name for p in out.iterdir()) == sorted([*kept, "config.json"])
    assert (out / "tokenizer.json").read_text() == "tokenizer.json"
    assert json.loads((out / "config.json").read_text())["model_type"] == "llama"


def test_a_quantized_checkpoint_is_no_source(data, make_folder, fp8_layer):
    with pytest.raises(CheckpointError, match="quantized already"):
        open_source(data / "modelopt-fp8")
    with pytest.raises(CheckpointError, match="quantized already"):
        open_source(make_folder(fp8_layer("m.a"), None))


def test_whether_a_folder_is_quantized_is_told_by_its_config(data, tmp_path):
    assert is_quantized(data / "modelopt-fp8")
    assert not is_quantized(data / "bf16")
    assert not is_quantized(tmp_path / "nothing.gguf")


def test_files_and_folders_that_hold_no_model_are_refused(tmp_path, make_folder):
    with pytest.raises(CheckpointError, match="nothing there"):
        open_source(tmp_path / "absent")
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"weights\.bin"):
        open_source(tmp_path / "weights.bin")
    folder = make_folder({"m.weight": torch.zeros(2, 2)}, None)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        open_source(folder)


def test_several_gguf_files_in_a_folder_are_ambiguous(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="several GGUF files"):
        open_source(tmp_path)
