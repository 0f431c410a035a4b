"""Ignore lists in every spelling, layers in any mixture, shards cut anywhere: right or refused."""

from __future__ import annotations

import json
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from anyfp8.checkpoint import open_checkpoint, recast
from anyfp8.errors import CheckpointError, InputError
from anyfp8.reference import dequantize

MODULES = [
    f"model.layers.{i}.{leaf}"
    for i in range(2)
    for leaf in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
]
CONFIGS = {
    "modelopt": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
    "fp8": {"activation_scheme": "dynamic", "weight_block_size": None},
    "fbgemm_fp8": {},
    "w8a8_fp8": {},
    "quark": {
        "global_quant_config": {
            "weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 0},
        }
    },
    "compressed-tensors": {
        "config_groups": {
            "g": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
            }
        }
    },
}
FIELD = {"modelopt": "ignore", "compressed-tensors": "ignore", "quark": "exclude"}
SPELLINGS = {
    "whole": lambda name: name,
    "without the wrapper": lambda name: name.removeprefix("model."),
    "regex": lambda name: "re:" + re.escape(name) + "$",
    "glob": lambda name: "*" + name[len("model.layers") :],
}
SCALES = {
    "tensor": lambda n, k: torch.full((), 0.5),
    "one": lambda n, k: torch.full((1,), 0.5),
    "channel": lambda n, k: torch.arange(n).float() + 1,
    "column": lambda n, k: (torch.arange(n).float() + 1)[:, None],
    "wrong": lambda n, k: torch.ones(n + 1),
    "zero": lambda n, k: torch.zeros(n, 1),
}
LAYER = st.tuples(
    st.sampled_from(["fp8", "fp8", "bf16"]),
    st.booleans(),
    st.sampled_from(["tensor", "one", "channel", "column", "column", "wrong", "zero"]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)


def write(folder, method, layers, spelling, shards):
    for file in folder.iterdir():
        file.unlink()
    tensors = {"model.norm.weight": torch.ones(4)}
    for name, (kind, _, scale, dtype) in layers.items():
        codes = torch.arange(8 * 6).reshape(8, 6).float() - 20
        if kind == "bf16":
            tensors[f"{name}.weight"] = codes.bfloat16()
        else:
            tensors[f"{name}.weight"] = codes.to(torch.float8_e4m3fn)
            tensors[f"{name}.weight_scale"] = SCALES[scale](8, 6).to(dtype)
    ignore = [SPELLINGS[spelling](name) for name, layer in layers.items() if layer[1]]
    field = FIELD.get(method, "modules_to_not_convert" if "fp8" in method else "ignore")
    field = "ignored_layers" if method == "w8a8_fp8" else field
    config = {"quantization_config": {"quant_method": method, field: ignore, **CONFIGS[method]}}
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    weight_map = {
        name: f"part-{shards[i % len(shards)]}.safetensors" for i, name in enumerate(names)
    }
    for file in set(weight_map.values()):
        save_file({n: tensors[n] for n in names if weight_map[n] == file}, folder / file)
    index = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index)
    return tensors


@settings(max_examples=150, deadline=None)
@given(
    method=st.sampled_from(sorted(CONFIGS)),
    layers=st.fixed_dictionaries({}, optional=dict.fromkeys(MODULES, LAYER)),
    spelling=st.sampled_from(sorted(SPELLINGS)),
    shards=st.lists(st.integers(0, 3), min_size=1, max_size=7),
)
def test_any_folder_is_read_right_or_refused(tmp_path_factory, method, layers, spelling, shards):
    folder = tmp_path_factory.getbasetemp() / "fuzzed-folder"
    folder.mkdir(exist_ok=True)
    tensors = write(folder, method, layers, spelling, shards)
    fp8 = {name for name, layer in layers.items() if layer[0] == "fp8"}
    good = all(
        not (kind == "fp8" and (ignored or scale in ("wrong", "zero")))
        for kind, ignored, scale, _ in layers.values()
    )
    if not good:
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(folder)
        # the error names a layer, so that a person can find it
        assert any(name in str(caught.value) for name in fp8)
        return
    checkpoint = open_checkpoint(folder)
    assert set(checkpoint.plan.layers) == fp8
    for layer in checkpoint.layers():
        codes = tensors[f"{layer.name}.weight"].float()
        scale = tensors[f"{layer.name}.weight_scale"].float().reshape(-1, 1)
        assert torch.equal(dequantize(layer.weight), codes * scale)


@settings(max_examples=60, deadline=None)
@given(
    method=st.sampled_from(sorted(CONFIGS)),
    scale=st.sampled_from(["tensor", "channel", "column"]),
    format=st.sampled_from(["modelopt", "compressed-tensors", "finegrained", None]),
)
def test_any_conversion_keeps_every_value_or_is_refused(tmp_path_factory, method, scale, format):
    folder = tmp_path_factory.getbasetemp() / "fuzzed-source"
    folder.mkdir(exist_ok=True)
    layers = dict.fromkeys(MODULES[:3], ("fp8", False, scale, torch.bfloat16))
    write(folder, method, layers, "whole", [0, 1])
    before = open_checkpoint(folder)
    out = tmp_path_factory.getbasetemp() / "fuzzed-out"
    try:
        recast(before, out, format=format, overwrite=True)
    except InputError:
        return
    after = open_checkpoint(out)
    for layer in before.layers():
        found = after.layer(layer.name)
        assert torch.equal(found.weight.codes, layer.weight.codes)
        assert torch.equal(dequantize(found.weight), dequantize(layer.weight))
