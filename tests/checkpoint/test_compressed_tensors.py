from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from anyfp8.checkpoint import open_checkpoint, read_plan
from anyfp8.checkpoint.compressed_tensors import declare
from anyfp8.checkpoint.declaration import ConfigFiles, Declaration
from anyfp8.errors import CheckpointError


def args(strategy="tensor", dynamic=False, **more):
    return {"num_bits": 8, "type": "float", "strategy": strategy, "dynamic": dynamic, **more}


def config(*groups, **more):
    named = {f"group_{i}": group for i, group in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "config_groups": named, **more}


def group(targets=("Linear",), weights=None, inputs=None, **more):
    weights = weights or args()
    return {"targets": list(targets), "weights": weights, "input_activations": inputs, **more}


def declared(quantization) -> Declaration:
    return declare(ConfigFiles(Path("folder"), {}, quantization))


@pytest.mark.parametrize(
    ("weights", "inputs", "scheme"),
    [
        (args(), None, "w8a16-tensor"),
        (args(observer=None, observer_kwargs=None), args(), "w8a8-tensor-static"),
        (args("channel"), args("token", True), "w8a8-channel-token"),
        (args("channel"), args("tensor", True), "w8a8-channel-dynamic"),
        (args("channel"), args("tensor"), "w8a8-channel-static"),
        (args("tensor"), args("token", True), "w8a8-tensor-token"),
        (
            args("block", block_structure=[64, 128]),
            args("group", True, group_size=128),
            "w8a8-block64x128-group128",
        ),
        (args("group", group_size=64), None, "w8a16-block1x64"),
        (args("group", group_size=32, scale_dtype="torch.uint8"), None, "w8a16-block1x32-ue8m0"),
    ],
)
def test_each_pair_of_strategies_is_a_named_scheme(weights, inputs, scheme):
    found = declared(config(group(weights=weights, inputs=inputs))).default
    assert found is not None
    assert found.scheme is not None, found.refusal
    assert found.scheme.name == scheme


@pytest.mark.parametrize(
    ("weights", "inputs", "refusal"),
    [
        (args("channel"), args("token"), "channel weights with static token activations"),
        (args(), args("tensor", "local"), "dynamic ('local') tensor activations"),
        (args("token"), None, "token weights"),
        (args(dynamic=True), None, "dynamic weights"),
        (args("block", block_structure=None), None, "block_structure None"),
        (args(symmetric=False), None, "zero points"),
        (args() | {"type": "int"}, None, "INT8"),
        (args() | {"num_bits": 4}, None, "FP4"),
        (args(), args() | {"type": "int"}, "INT8"),
    ],
)
def test_what_is_not_run_is_refused_with_its_pair(weights, inputs, refusal):
    found = declared(config(group(weights=weights, inputs=inputs))).default
    assert found is not None
    assert found.scheme is None
    assert refusal in found.refusal


BLOCK = {"block_structure": [128, 128]}


def test_a_name_wins_over_a_class_and_then_the_first_group():
    found = declared(
        config(
            group(["Linear"], args("channel")),
            group(["re:.*q_proj"], args("tensor")),
            group(["model.layers.0.self_attn.q_proj", "Linear"], args("block", **BLOCK)),
        )
    )
    kinds = {
        name: found.algorithm_of(name).scheme.weight
        for name in ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj")
    }
    assert list(kinds.values()) == ["tensor", "channel"]


def test_groups_of_several_schemes_are_planned_together(make_folder, fp8_layer):
    tensors = fp8_layer("m.q_proj") | fp8_layer("m.up_proj", input_scale=None)
    tensors["m.up_proj.weight_scale"] = torch.rand(64, 1) + 0.1
    tensors |= {"m.q_norm.weight": torch.ones(8), "m.head.weight": torch.zeros(4, 4)}
    plan = read_plan(
        make_folder(
            tensors,
            config(
                group(["re:.*q_.*"], args(), args(), format="float-quantized"),
                group(["re:.*up_proj"], args("channel"), args("token", True)),
                format="mixed-precision",
                ignore=None,
            ),
        )
    )
    schemes = {name: layer.scheme.name for name, layer in plan.layers.items()}
    assert schemes == {"m.q_proj": "w8a8-tensor-static", "m.up_proj": "w8a8-channel-token"}
    # a pattern may match a norm, which no tool quantizes
    assert set(plan.plain) == {"m.q_norm.weight", "m.head.weight"}


@pytest.mark.parametrize(
    ("weights", "leaf", "dtype", "word"),
    [
        (args() | {"type": "int"}, "weight", torch.int8, "INT8"),
        (args() | {"num_bits": 4, "strategy": "tensor_group"}, "weight_packed", torch.uint8, "FP4"),
    ],
)
def test_layers_of_other_number_formats_are_refused_by_name(
    make_folder, fp8_layer, weights, leaf, dtype, word
):
    tensors = fp8_layer("m.self_attn.q_proj")
    tensors[f"m.mlp.up_proj.{leaf}"] = torch.zeros(8, 8, dtype=dtype)
    tensors["m.mlp.up_proj.weight_scale"] = torch.ones(8, 1)
    groups = group(["re:.*self_attn.*"], args(), args()), group(["re:.*mlp.*"], weights)
    with pytest.raises(CheckpointError, match=r"m\.mlp\.up_proj") as caught:
        read_plan(make_folder(tensors, config(*groups)))
    assert word in caught.value.got


def test_kv_cache_scales_on_the_attention_module_are_kept_and_counted(make_folder, fp8_layer):
    tensors = fp8_layer("model.layers.0.self_attn.q_proj")
    for leaf in ("k_scale", "v_scale"):
        tensors[f"model.layers.0.self_attn.{leaf}"] = torch.ones(1)
    quantization = config(group(inputs=args()), kv_cache_scheme=args())
    plan = read_plan(make_folder(tensors, quantization))
    assert plan.kv_cache == "FP8"
    assert plan.skipped == {"k_scale": 1, "v_scale": 1}


@pytest.mark.parametrize(
    ("key", "scheme"),
    [("FP8", "w8a8-tensor-static"), ("FP8_DYNAMIC", "w8a8-channel-token"), ("W8A8", None)],
)
def test_a_group_may_be_the_name_of_a_preset(key, scheme):
    found = declared({"config_groups": {key: ["Linear"]}}).default
    assert found is not None
    assert (found.scheme and found.scheme.name) == scheme


def test_a_group_keyed_by_a_preset_name_is_read_by_its_content():
    found = declared({"config_groups": {"FP8_DYNAMIC": group(weights=args("channel"))}}).default
    assert found is not None
    assert found.scheme is not None
    assert found.scheme.name == "w8a16-channel"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.bfloat16])
@pytest.mark.parametrize("leaf", ["weight_zero_point", "input_zero_point"])
def test_zero_points_of_symmetric_files_say_nothing_and_are_not_kept(
    make_folder, fp8_layer, dtype, leaf
):
    tensors = fp8_layer("m.up_proj") | {f"m.up_proj.{leaf}": torch.zeros(1, dtype=dtype)}
    plan = read_plan(make_folder(tensors, config(group(inputs=args()))))
    assert plan.layers["m.up_proj"].scheme.name == "w8a8-tensor-static"
    assert plan.layers["m.up_proj"].extras == plan.optional == plan.plain == ()
    tensors[f"m.up_proj.{leaf}"] = torch.ones(1).to(dtype)
    with pytest.raises(CheckpointError, match=leaf) as caught:
        read_plan(make_folder(tensors, config(group(inputs=args())), name="shifted"))
    assert "symmetric" in caught.value.hint


def test_words_are_read_as_early_versions_wrote_them(make_folder, fp8_layer):
    weights = args("BLOCK", block_structure="32x96", type="FLOAT")
    tensors = fp8_layer("m.up_proj", input_scale=None)
    tensors["m.up_proj.weight_scale"] = torch.rand(2, 1) + 0.1
    plan = read_plan(make_folder(tensors, config(group(weights=weights))))
    assert plan.layers["m.up_proj"].scheme.name == "w8a16-block32x96"


def test_quantized_outputs_are_named(make_folder, fp8_layer):
    quantization = config(group(inputs=args(), output_activations=args()))
    (warning,) = read_plan(make_folder(fp8_layer("m.up_proj"), quantization)).warnings
    assert "group_0 quantizes outputs too" in warning


def test_uncompressed_weights_with_scales_are_refused(make_folder):
    tensors = {"m.up_proj.weight": torch.zeros(8, 8), "m.up_proj.weight_scale": torch.ones(1)}
    with pytest.raises(CheckpointError, match="the config says FP8, the weight is not"):
        read_plan(make_folder(tensors, config(group(), format="dense")))


@pytest.mark.parametrize(
    "extra",
    [
        {"sparsity_config": {"format": "sparse-24-bitmask"}},
        {"transform_config": {"config_groups": {"R1": {}}}},
    ],
)
def test_sparse_and_rotated_weights_are_refused(extra):
    with pytest.raises(CheckpointError, match="not plain FP8"):
        declared(config(group(), **extra))


def test_the_first_name_of_the_config_is_read_too(make_folder, fp8_layer):
    folder = make_folder(fp8_layer("m.up_proj"), None)
    content = {"compression_config": config(group(inputs=args()))}
    (folder / "config.json").write_text(json.dumps(content))
    (layer,) = open_checkpoint(folder).layers()
    assert layer.scheme.name == "w8a8-tensor-static"


VALUE = st.none() | st.booleans() | st.integers(-1, 200)
VALUE |= st.sampled_from(["tensor", "group", "float", "Linear", "re:(", "local"])
VALUE = VALUE | st.lists(VALUE, max_size=3)
FIELDS = ("num_bits", "type", "strategy", "dynamic", "group_size", "block_structure", "symmetric")
ARGS = st.dictionaries(st.sampled_from(FIELDS), VALUE).map(lambda a: args() | a) | VALUE
GROUP = st.fixed_dictionaries(
    {"weights": ARGS, "targets": st.just(["Linear"]) | st.just(["re:.*up.*"]) | VALUE},
    optional={"input_activations": ARGS, "output_activations": ARGS, "format": VALUE},
)
OTHERS = ("ignore", "kv_cache_scheme", "sparsity_config", "transform_config", "version", "format")


@settings(max_examples=200, deadline=None)
@given(
    groups=st.lists(GROUP | VALUE, max_size=3), more=st.dictionaries(st.sampled_from(OTHERS), VALUE)
)
def test_any_config_is_read_or_refused(tmp_path_factory, groups, more):
    folder = tmp_path_factory.getbasetemp() / "fuzzed-groups"
    folder.mkdir(exist_ok=True)
    weight = torch.ones(4, 4).to(torch.float8_e4m3fn)
    scales = {"m.up.weight_scale": torch.ones(1), "m.up.input_scale": torch.ones(1)}
    save_file({"m.up.weight": weight, **scales}, folder / "model.safetensors")
    quantization = config(*groups, **more)
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    try:
        plan = read_plan(folder)
    except CheckpointError:
        return
    assert list(plan.layers) == ["m.up"]
