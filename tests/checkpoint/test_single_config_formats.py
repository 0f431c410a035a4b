"""Formats with one scheme for a whole checkpoint, or a few words for it."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from anyfp8.checkpoint import open_checkpoint, read_plan, recast
from anyfp8.errors import CheckpointError
from anyfp8.reference import dequantize

FINE = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def block_layer(name="m.up_proj", n=200, k=320, leaf="weight_scale_inv", seed=0):
    generator = torch.Generator().manual_seed(seed)
    codes = (torch.randn(n, k, generator=generator) * 50).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-n // 128), -(-k // 128), generator=generator) + 0.1
    return {f"{name}.weight": codes, f"{name}.{leaf}": scale}


def scheme_of(folder):
    (layer,) = read_plan(folder).layers.values()
    return layer.scheme.name


@pytest.mark.parametrize(
    ("extra", "scheme"),
    [
        ({}, "w8a8-block128x128-group128"),
        ({"scale_fmt": "ue8m0"}, "w8a8-block128x128-group128-ue8m0"),
        ({"scale_fmt": None, "activation_scheme": None}, "w8a8-block128x128-group128"),
    ],
)
def test_finegrained_blocks_are_read_with_odd_edges(make_folder, extra, scheme):
    tensors = block_layer()
    if "ue8m0" in scheme:
        tensors["m.up_proj.weight_scale_inv"] = torch.full((2, 3), 0.25)
    assert scheme_of(make_folder(tensors, FINE | extra)) == scheme


def test_scales_that_are_no_powers_of_two_stay_what_they_are(make_folder, tmp_path):
    # a config may claim ue8m0 for its activations' sake; rounding the scales changes the weights
    tensors = block_layer()
    checkpoint = open_checkpoint(make_folder(tensors, FINE | {"scale_fmt": "ue8m0"}))
    layer = checkpoint.layer("m.up_proj")
    assert layer.scheme.name == "w8a8-block128x128-group128"
    assert torch.equal(layer.weight.scale, tensors["m.up_proj.weight_scale_inv"])
    (warning,) = checkpoint.plan.warnings
    assert "no powers of two" in warning
    recast(checkpoint, tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert torch.equal(again["m.up_proj.weight_scale"], layer.weight.scale)


def test_experts_in_one_fp8_tensor_of_another_format_are_refused_by_name(make_folder, fp8_layer):
    tensors = fp8_layer("m.up_proj") | {
        "m.experts.gate_up_proj": torch.zeros(4, 8, 8).to(torch.float8_e4m3fn),
        "m.experts.gate_up_proj_weight_scale": torch.tensor(1.0),
    }
    config = {"quant_method": "modelopt", "quant_algo": "FP8"}
    with pytest.raises(CheckpointError, match=r"m\.experts\.gate_up_proj in") as caught:
        read_plan(make_folder(tensors, config))
    assert "for each expert" in caught.value.want


def test_fbgemm_files_may_repeat_the_bound_of_their_config(make_folder, fp8_layer):
    tensors = fp8_layer("m.up_proj", input_scale=None)
    tensors["m.up_proj.weight_scale"] = torch.rand(64, 1) + 0.1
    tensors["m.up_proj.input_scale_ub"] = torch.tensor([1200.0])
    config = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
    plan = read_plan(make_folder(tensors, config | {"modules_to_not_convert": None}))
    assert plan.layers["m.up_proj"].scheme.name == "w8a8-channel-token"
    assert plan.plain == plan.optional == ()


@pytest.mark.parametrize("stored", ["F32", "E8M0", "bytes"])
def test_powers_of_two_are_read_from_every_dtype_they_are_stored_in(make_folder, stored):
    tensors = block_layer()
    exponents = torch.randint(118, 130, (2, 3), generator=torch.Generator().manual_seed(1))
    scale = 2.0 ** (exponents - 127)
    bytes_ = exponents.to(torch.uint8)
    tensors["m.up_proj.weight_scale_inv"] = {
        "F32": scale,
        "E8M0": bytes_.view(torch.float8_e8m0fnu),
        "bytes": bytes_,
    }[stored]
    layer = open_checkpoint(make_folder(tensors, FINE | {"scale_fmt": "ue8m0"})).layer("m.up_proj")
    assert torch.equal(layer.weight.scale, scale)


def test_plain_bytes_are_no_scale_unless_the_config_says_so(make_folder):
    tensors = block_layer()
    tensors["m.up_proj.weight_scale_inv"] = torch.full((2, 3), 120, dtype=torch.uint8)
    with pytest.raises(CheckpointError, match=r"m\.up_proj\.weight_scale_inv"):
        read_plan(make_folder(tensors, FINE))


def test_nan_exponents_are_refused(make_folder):
    tensors = block_layer()
    tensors["m.up_proj.weight_scale_inv"] = torch.full((2, 3), 255, dtype=torch.uint8)
    with pytest.raises(CheckpointError, match=r"cannot use the scale m\.up_proj"):
        read_plan(make_folder(tensors, FINE | {"scale_fmt": "ue8m0"}))


@pytest.mark.parametrize("leaf", ["scale", "qscale_weight", "scale_weight", "weight.scale"])
def test_other_names_of_the_scale_mean_the_same(make_folder, leaf):
    plain = open_checkpoint(make_folder(block_layer(), FINE)).layer("m.up_proj")
    other = open_checkpoint(make_folder(block_layer(leaf=leaf), FINE, name="other"))
    assert torch.equal(dequantize(other.layer("m.up_proj").weight), dequantize(plain.weight))


def test_autofp8_files_share_the_method_and_are_told_by_their_tensors(make_folder, fp8_layer):
    quantization = {"quant_method": "fp8", "activation_scheme": "static"}
    quantization["ignored_layers"] = ["lm_head"]
    tensors = fp8_layer("m.up_proj") | {"lm_head.weight": torch.zeros(4, 4)}
    plan = read_plan(make_folder(tensors, quantization))
    assert plan.layers["m.up_proj"].scheme.name == "w8a8-tensor-static"
    assert plan.rules == (("lm_head", ("lm_head",)),)


def test_the_tensors_decide_where_the_config_says_another_granularity(make_folder, fp8_layer):
    tensors = fp8_layer("m.up_proj", input_scale=None)
    plan = read_plan(make_folder(tensors, FINE))
    assert plan.layers["m.up_proj"].scheme.name == "w8a8-tensor-group128"
    assert "the stored scales make it" in plan.warnings[0]


def test_modules_to_convert_leave_all_others(make_folder):
    tensors = block_layer() | {"m.down_proj.weight": torch.zeros(4, 4)}
    plan = read_plan(make_folder(tensors, FINE | {"modules_to_convert": ["up_proj"]}))
    assert list(plan.layers) == ["m.up_proj"]
    assert plan.warnings == ()


def test_experts_in_four_bits_are_refused_by_name(make_folder):
    tensors = block_layer()
    tensors["m.experts.3.up_proj.weight"] = torch.zeros(8, 8, dtype=torch.int8)
    with pytest.raises(CheckpointError, match=r"m\.experts\.3\.up_proj") as caught:
        read_plan(make_folder(tensors, FINE | {"expert_dtype": "fp4"}))
    assert "fp4" in caught.value.got


def test_experts_in_fp8_are_ordinary_linears(make_folder):
    names = [f"model.layers.1.mlp.experts.{i}.up_proj" for i in range(3)]
    tensors = {}
    for i, name in enumerate(names):
        tensors |= block_layer(name, seed=i)
    tensors["model.layers.1.mlp.gate.weight"] = torch.zeros(3, 320)
    plan = read_plan(make_folder(tensors, FINE | {"expert_dtype": "fp8"}))
    assert list(plan.layers) == names
    assert plan.warnings == ()


def test_mxfp8_as_a_method_of_its_own(make_folder):
    tensors = block_layer(n=8, k=64)
    tensors["m.up_proj.weight_scale_inv"] = torch.full((8, 2), 120, dtype=torch.uint8)
    assert scheme_of(make_folder(tensors, {"quant_method": "mxfp8"})) == "w8a16-block1x32-ue8m0"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weight_block_size", 128),
        ("weight_block_size", [128, 0]),
        ("activation_scheme", "never"),
        ("modules_to_not_convert", "lm_head"),
    ],
)
def test_finegrained_fields_of_the_wrong_kind_are_refused(make_folder, field, value):
    with pytest.raises(CheckpointError, match=field):
        read_plan(make_folder(block_layer(), FINE | {field: value}))


@pytest.mark.parametrize("method", ["w8a8_fp8", "fbgemm_fp8", "FBGEMM_FP8"])
def test_methods_that_mean_per_channel_per_token(make_folder, fp8_layer, method):
    tensors = fp8_layer("m.up_proj", input_scale=None)
    tensors["m.up_proj.weight_scale"] = torch.rand(64, 1) + 0.1
    assert scheme_of(make_folder(tensors, {"quant_method": method})) == "w8a8-channel-token"


def test_the_methods_that_are_read_are_listed_for_one_that_is_not(make_folder, fp8_layer):
    with pytest.raises(CheckpointError, match="cannot read") as caught:
        read_plan(make_folder(fp8_layer("m.up_proj"), {"quant_method": "gptq"}))
    assert "'gptq'" in caught.value.got
    for method in ("compressed-tensors", "fp8", "fbgemm_fp8", "quark", "torchao", "modelopt"):
        assert repr(method) in caught.value.want


def quark(weight="per_tensor", inputs=None, dtype="fp8_e4m3", **more):
    layer = {"weight": {"dtype": dtype, "qscheme": weight, "ch_axis": 0}, "input_tensors": inputs}
    return {"quant_method": "quark", "global_quant_config": layer, "exclude": ["lm_head"], **more}


def inputs(qscheme="per_tensor", dynamic=False):
    return {"dtype": "fp8_e4m3", "qscheme": qscheme, "is_dynamic": dynamic, "ch_axis": 1}


@pytest.mark.parametrize(
    ("quantization", "scale", "scheme"),
    [
        (quark(), (), "w8a16-tensor"),
        (quark(inputs=inputs(dynamic=True)), (), "w8a8-tensor-dynamic"),
        (quark("per_channel", inputs("per_channel", True)), (64,), "w8a8-channel-token"),
        (quark("per_channel", inputs("per_token", True)), (64,), "w8a8-channel-token"),
        (
            quark(layer_type_quant_config={"Linear": quark("per_channel")["global_quant_config"]}),
            (64,),
            "w8a16-channel",
        ),
    ],
)
def test_quark_configs_are_named_schemes(make_folder, fp8_layer, quantization, scale, scheme):
    tensors = fp8_layer("m.up_proj", input_scale=None)
    tensors["m.up_proj.weight_scale"] = torch.ones(scale, dtype=torch.bfloat16)
    assert scheme_of(make_folder(tensors, quantization)) == scheme


@pytest.mark.parametrize(
    "quantization",
    [
        quark(dtype="int8"),
        quark(dtype="fp8_e5m2"),
        quark("per_group"),
        quark(inputs=inputs("per_channel")),
    ],
)
def test_quark_configs_that_are_not_run_are_refused(make_folder, fp8_layer, quantization):
    with pytest.raises(CheckpointError, match="cannot run the quantization"):
        read_plan(make_folder(fp8_layer("m.up_proj"), quantization))


def test_quark_stages_outputs_and_zero_points_of_symmetric_files_are_read(make_folder, fp8_layer):
    tensors = fp8_layer("m.up_proj")
    for side in ("weight", "input"):
        tensors[f"m.up_proj.{side}_zero_point"] = torch.tensor(0)
    config = quark(inputs=inputs())
    layer = config["global_quant_config"]
    layer |= {"weight": [layer["weight"]], "output_tensors": inputs()}
    plan = read_plan(make_folder(tensors, config))
    assert plan.layers["m.up_proj"].scheme.name == "w8a8-tensor-static"
    assert plan.optional == ()
    assert ["outputs" in w or "zero points of 0" in w for w in plan.warnings] == [True, True]


def test_a_quark_layer_of_another_kind_is_refused_by_name(make_folder, fp8_layer):
    four_bit = quark(dtype="fp4")["global_quant_config"]
    quantization = quark(inputs=inputs(), layer_quant_config={"*down_proj": four_bit})
    tensors = fp8_layer("m.up_proj") | fp8_layer("m.down_proj")
    with pytest.raises(CheckpointError, match=r"m\.down_proj") as caught:
        read_plan(make_folder(tensors, quantization))
    assert "fp4" in caught.value.got


def torchao_folder(tmp_path, data, metadata, kind="Float8WeightOnlyConfig"):
    raw = load_file(data / "torchao-row" / "model.safetensors")
    quantization = {"quant_method": "torchao", "quant_type": {"default": {"_type": kind}}}
    save_file(raw, tmp_path / "model.safetensors", metadata=metadata)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    return tmp_path


def test_torchao_files_without_metadata_are_read_by_their_config(tmp_path, data):
    assert scheme_of(torchao_folder(tmp_path, data, {"format": "pt"})) == "w8a16-channel"


def test_torchao_tensors_of_other_kinds_are_refused_by_name(tmp_path, data):
    name = "model.layers.0.self_attn.k_proj.weight"
    entry = json.dumps({"_type": "Int4Tensor", "_data": {"block_size": [1, 32]}})
    with pytest.raises(CheckpointError, match="k_proj") as caught:
        read_plan(torchao_folder(tmp_path, data, {name: entry}))
    assert "Int4Tensor" in caught.value.got


@pytest.mark.parametrize(
    ("block", "granularity", "grid", "scheme"),
    [
        ([128, 128], None, (2, 2), "w8a16-block128x128"),
        ([128, 128], "PerBlock", (2, 2), "w8a8-block128x128-group128"),
        ([1, 128], None, (200, 2), "w8a16-block1x128"),
        ([200, 256], "PerTensor", (1, 1), "w8a8-tensor-dynamic"),
        ([1, 256], "PerRow", (200, 1), "w8a8-channel-token"),
        ([128, 128], "PerRow", (2, 2), None),
        ([1, 2, 3], None, (2, 2), None),
    ],
)
def test_torchao_blocks_are_read_off_the_metadata(tmp_path, block, granularity, grid, scheme):
    kwargs = {"_data": {"granularity": {"_type": granularity}}} if granularity else None
    entry = {"_type": "Float8Tensor", "_data": {"block_size": block, "act_quant_kwargs": kwargs}}
    tensors = {
        "m.up_proj._weight_qdata": torch.ones(200, 256).to(torch.float8_e4m3fn),
        "m.up_proj._weight_scale": torch.rand(grid) + 0.1,
    }
    save_file(
        tensors, tmp_path / "model.safetensors", metadata={"m.up_proj.weight": json.dumps(entry)}
    )
    quantization = {"quant_method": "torchao", "quant_type": {"default": {"_type": "X"}}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    if scheme is None:
        with pytest.raises(CheckpointError, match=r"m\.up_proj"):
            read_plan(tmp_path)
    else:
        assert scheme_of(tmp_path) == scheme
        assert read_plan(tmp_path).warnings == ()


@pytest.mark.parametrize("text", ["{", "[]", "3", '{"_type": "Float8Tensor"}'])
def test_broken_torchao_metadata_is_refused_by_name(tmp_path, data, text):
    name = "model.layers.0.self_attn.k_proj.weight"
    with pytest.raises(CheckpointError, match="k_proj"):
        read_plan(torchao_folder(tmp_path, data, {name: text}))


def test_a_torchao_configuration_of_another_kind_is_refused(tmp_path, data):
    folder = torchao_folder(tmp_path, data, None, "Int4WeightOnlyConfig")
    with pytest.raises(CheckpointError, match="cannot run") as caught:
        read_plan(folder)
    assert "Int4WeightOnlyConfig" in caught.value.got


METHODS = ("fp8", "mxfp8", "fbgemm_fp8", "w8a8_fp8", "quark", "torchao")
WORDS = ("per_tensor", "per_channel", "fp8_e4m3", "dynamic", "static", "ue8m0", "fp4", "re:(")
VALUE = st.none() | st.booleans() | st.integers(0, 200) | st.sampled_from(WORDS)
KEYS = ("weight", "input_tensors", "qscheme", "dtype", "is_dynamic", "default", "_type", "m.up")
VALUE = st.recursive(
    VALUE,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
    ),
    max_leaves=8,
)
FIELDS = (
    *("weight_block_size", "activation_scheme", "scale_fmt", "modules_to_not_convert"),
    *("modules_to_convert", "ignored_layers", "expert_dtype", "global_quant_config", "exclude"),
    *("layer_quant_config", "layer_type_quant_config", "kv_cache_quant_config", "quant_type"),
)


@settings(max_examples=300, deadline=None)
@given(
    method=st.sampled_from(METHODS),
    config=st.dictionaries(st.sampled_from(FIELDS), VALUE),
    shape=st.sampled_from([(), (1,), (4,), (4, 1), (1, 1), (2, 2), (1, 1, 1, 1)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.float8_e8m0fnu]),
)
def test_any_config_with_any_scale_is_read_or_refused(
    tmp_path_factory, method, config, shape, dtype
):
    folder = tmp_path_factory.getbasetemp() / "fuzzed-methods"
    folder.mkdir(exist_ok=True)
    scale = torch.ones(shape) if dtype.is_floating_point else torch.full(shape, 127)
    tensors = {
        "m.up.weight": torch.ones(4, 4).to(torch.float8_e4m3fn),
        "m.up.weight_scale": scale.to(dtype),
        "m.up.input_scale": torch.ones(1),
    }
    save_file(tensors, folder / "model.safetensors")
    quantization = {"quant_method": method, **config}
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    try:
        checkpoint = open_checkpoint(folder)
    except CheckpointError:
        return
    (layer,) = checkpoint.layers()
    assert torch.equal(dequantize(layer.weight), torch.ones(4, 4))
