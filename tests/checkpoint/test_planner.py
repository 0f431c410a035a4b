from __future__ import annotations

import pytest
import torch

from anyfp8.checkpoint import open_checkpoint, read_plan
from anyfp8.errors import CheckpointError
from anyfp8.problem import Scheme
from anyfp8.reference import dequantize

NAME = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    "leaf", ["weight_scale", "weight_scale_inv", "scale", "scale_weight", "weight.scale"]
)
def test_every_name_of_a_scale_means_a_factor(make_folder, fp8_layer, leaf):
    tensors = fp8_layer(NAME, scale=0.125)
    expected = tensors[f"{NAME}.weight"].float() * 0.125
    tensors[f"{NAME}.{leaf}"] = tensors.pop(f"{NAME}.weight_scale")
    layer = open_checkpoint(make_folder(tensors)).layer(NAME)
    assert torch.equal(dequantize(layer.weight), expected)


@pytest.mark.parametrize("leaf", ["input_scale", "activation_scale", "scale_input"])
def test_every_name_of_an_input_scale_is_read(make_folder, fp8_layer, leaf):
    tensors = fp8_layer(NAME, input_scale=0.25)
    tensors[f"{NAME}.{leaf}"] = tensors.pop(f"{NAME}.input_scale")
    assert open_checkpoint(make_folder(tensors)).layer(NAME).input_scale == 0.25


def test_two_scales_for_one_weight_are_refused(make_folder, fp8_layer):
    tensors = fp8_layer(NAME) | {f"{NAME}.weight_scale_inv": torch.tensor(2.0)}
    with pytest.raises(CheckpointError, match="two scales") as caught:
        read_plan(make_folder(tensors))
    assert "weight_scale_inv" in caught.value.got


def test_an_fp8_weight_without_its_scale_is_refused_by_name(make_folder, fp8_layer):
    tensors = fp8_layer(NAME)
    del tensors[f"{NAME}.weight_scale"]
    with pytest.raises(CheckpointError, match=rf"{NAME}\.weight in model\.safetensors"):
        read_plan(make_folder(tensors))


def test_a_missing_scale_may_be_taken_as_one(make_folder, fp8_layer):
    tensors = fp8_layer(NAME)
    del tensors[f"{NAME}.weight_scale"]
    checkpoint = open_checkpoint(make_folder(tensors), allow_missing_scale=True)
    values = dequantize(checkpoint.layer(NAME).weight)
    assert torch.equal(values, tensors[f"{NAME}.weight"].float())
    assert any(NAME in warning for warning in checkpoint.plan.warnings)


@pytest.mark.parametrize("config", [None, {"quant_method": "modelopt", "quant_algo": None}])
def test_fp8_weights_are_never_taken_for_unquantized_ones(make_folder, fp8_layer, config):
    tensors = fp8_layer(NAME)
    if config is None:
        # nothing says how activations are quantized, so only the weights are believed
        plan = read_plan(make_folder(tensors, config))
        assert plan.schemes == {Scheme(): 1}
        assert plan.warnings
        tensors.pop(f"{NAME}.weight_scale")
        with pytest.raises(CheckpointError, match="without its scale"):
            read_plan(make_folder(tensors, config, name="no_scale"))
        return
    with pytest.raises(CheckpointError, match=r"leaves .* unquantized"):
        read_plan(make_folder(tensors, config))


def test_a_quantized_layer_in_the_ignore_list_is_refused(make_folder, fp8_layer):
    with pytest.raises(CheckpointError, match="lm_head unquantized") as caught:
        read_plan(make_folder(fp8_layer("lm_head")))
    assert "'lm_head'" in caught.value.got


def test_known_optional_scales_are_kept_and_counted(make_folder, fp8_layer):
    k, attention = "model.layers.0.self_attn.k_proj", "model.layers.0.self_attn"
    optional = {
        "lm_head.weight_scale": torch.tensor(1.0),
        f"{attention}.k_scale": torch.tensor(1.0),
        f"{attention}.kv_scale": torch.tensor(1.0),
        f"{attention}.attn.v_scale": torch.tensor(1.0),
        f"{attention}.prob_output_scale": torch.tensor(1.0),
    }
    tensors = {
        **fp8_layer(k),
        "lm_head.weight": torch.zeros(4, 4),
        f"{k}.k_scale": torch.tensor(0.5),
        f"{k}.output_scale": torch.tensor(0.75),
        **optional,
    }
    checkpoint = open_checkpoint(make_folder(tensors))
    assert set(checkpoint.plan.optional) == set(optional)
    assert checkpoint.plan.skipped == {
        "weight_scale": 1,
        "k_scale": 1,
        "kv_scale": 1,
        "v_scale": 1,
        "prob_output_scale": 1,
    }
    layer = checkpoint.layer(k)
    assert {name: float(t) for name, t in layer.extras.items()} == {
        "k_scale": 0.5,
        "output_scale": 0.75,
    }


@pytest.mark.parametrize("leaf", ["weight_scales", "weigth_scale", "weight_scale_2", "scal"])
def test_an_unknown_tensor_beside_a_quantized_weight_is_refused(make_folder, fp8_layer, leaf):
    tensors = fp8_layer(NAME) | {f"{NAME}.{leaf}": torch.tensor(1.0)}
    with pytest.raises(CheckpointError, match=rf"{NAME}\.{leaf}"):
        read_plan(make_folder(tensors))
    plan = read_plan(make_folder(tensors, name="again"), strict=False)
    assert plan.unaccounted == (f"{NAME}.{leaf}",)


def test_a_misspelt_scale_is_named_where_the_right_one_is_absent(make_folder, fp8_layer):
    tensors = fp8_layer(NAME)
    tensors[f"{NAME}.weight_scales"] = tensors.pop(f"{NAME}.weight_scale")
    with pytest.raises(CheckpointError, match=rf"beside it only {NAME}\.weight_scales"):
        read_plan(make_folder(tensors), allow_missing_scale=True)


def test_a_scale_without_a_weight_is_refused(make_folder, fp8_layer):
    tensors = fp8_layer(NAME) | {"model.layers.1.mlp.up_proj.weight_scale": torch.tensor(1.0)}
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight_scale"):
        read_plan(make_folder(tensors))


@pytest.mark.parametrize("leaf", ["weight_scale", "weight_scale_inv", "input_scale"])
def test_a_16_bit_weight_with_a_stray_scale_is_refused(make_folder, fp8_layer, leaf):
    tensors = {
        **fp8_layer(NAME),
        "model.odd.weight": torch.zeros(8, 8, dtype=torch.bfloat16),
        f"model.odd.{leaf}": torch.tensor(1.0),
    }
    with pytest.raises(CheckpointError, match=r"model\.odd\.weight") as caught:
        read_plan(make_folder(tensors))
    assert "BF16 [8, 8]" in caught.value.got


def test_a_16_bit_linear_that_is_not_ignored_is_kept_with_a_warning(make_folder, fp8_layer):
    tensors = fp8_layer(NAME) | {
        "model.layers.0.mlp.down_proj.weight": torch.zeros(8, 8),
        "model.embed_tokens.weight": torch.zeros(8, 8),
        "model.norm.weight": torch.zeros(8),
    }
    plan = read_plan(make_folder(tensors))
    assert len(plan.warnings) == 1
    assert "neither quantized nor ignored" in plan.warnings[0]
    assert plan.warnings[0].endswith("model.layers.0.mlp.down_proj")


def test_a_layer_that_the_map_lists_must_be_fp8(make_folder, fp8_layer):
    config = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {NAME: {"quant_algo": "FP8"}, "m.odd": {"quant_algo": "FP8"}},
    }
    with pytest.raises(CheckpointError, match=r"the weight is not: m\.odd\.weight"):
        read_plan(make_folder(fp8_layer(NAME) | {"m.odd.weight": torch.zeros(8, 8)}, config))
    plan = read_plan(make_folder(fp8_layer(NAME), config, name="absent"))
    assert plan.warnings == ("the config lists layers that have no weight: m.odd",)


@pytest.mark.parametrize("shape", [(2,), (96,), (1, 64), (2, 2), (64, 96), (1, 1, 1)])
def test_a_scale_that_fits_no_granularity_is_refused(make_folder, fp8_layer, shape):
    tensors = fp8_layer(NAME, 64, 96) | {f"{NAME}.weight_scale": torch.ones(shape)}
    with pytest.raises(CheckpointError, match="fits no granularity") as caught:
        read_plan(make_folder(tensors))
    assert str(list(shape)) in caught.value.got


@pytest.mark.parametrize(
    ("shape", "weight"),
    [
        ((), "tensor"),
        ((1,), "tensor"),
        ((1, 1), "tensor"),
        ((300,), "channel"),
        ((300, 1), "channel"),
        ((3, 2), "block"),
        ((3, 1, 2, 1), "block"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_stored_shape_decides_the_granularity(make_folder, fp8_layer, shape, weight, dtype):
    tensors = fp8_layer(NAME, 300, 200)
    scale = (torch.rand(shape) + 0.5).to(dtype)
    tensors[f"{NAME}.weight_scale"] = scale
    checkpoint = open_checkpoint(make_folder(tensors))
    layer = checkpoint.layer(NAME)
    assert layer.scheme.weight == weight
    assert layer.weight.scale.dtype == torch.float32
    assert layer.weight.scale.flatten().tolist() == scale.float().flatten().tolist()
    assert bool(checkpoint.plan.warnings) == (weight != "tensor")


@pytest.mark.parametrize(
    "value", [0.0, -1.0, float("nan"), float("inf"), torch.finfo(torch.float32).min]
)
@pytest.mark.parametrize("leaf", ["weight_scale", "input_scale"])
def test_a_scale_that_is_not_finite_and_positive_is_refused(make_folder, fp8_layer, value, leaf):
    tensors = fp8_layer(NAME) | {f"{NAME}.{leaf}": torch.tensor(value)}
    with pytest.raises(CheckpointError, match=rf"{NAME}\.{leaf} in model\.safetensors"):
        read_plan(make_folder(tensors))


def test_one_bad_channel_scale_is_found_by_its_index(make_folder, fp8_layer):
    scale = torch.ones(64)
    scale[17] = 0
    config = {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
    tensors = fp8_layer(NAME, input_scale=None) | {f"{NAME}.weight_scale": scale}
    with pytest.raises(CheckpointError, match=r"0 at \[17\]"):
        read_plan(make_folder(tensors, config))


@pytest.mark.parametrize("input_scale", [None, 0.0, float("nan"), -3.4e38])
def test_dynamic_quantization_may_replace_an_unusable_input_scale(
    make_folder, fp8_layer, input_scale
):
    folder = make_folder(fp8_layer(NAME, input_scale=input_scale))
    with pytest.raises(CheckpointError, match="dynamic_fallback=True"):
        read_plan(folder)
    checkpoint = open_checkpoint(folder, dynamic_fallback=True)
    layer = checkpoint.layer(NAME)
    assert layer.scheme == Scheme("tensor", "tensor", dynamic=True)
    assert layer.input_scale is None
    assert any("dynamically" in w and NAME in w for w in checkpoint.plan.warnings)


def test_a_static_input_scale_of_shape_1_is_one_value(make_folder, fp8_layer):
    tensors = fp8_layer(NAME) | {f"{NAME}.input_scale": torch.tensor([0.25])}
    layer = open_checkpoint(make_folder(tensors)).layer(NAME)
    assert layer.input_scale.shape == ()
    assert layer.input_scale == 0.25


def test_other_fp8_formats_and_ranks_are_refused(make_folder, fp8_layer):
    e5m2 = {f"{NAME}.weight": torch.zeros(4, 4).to(torch.float8_e5m2)}
    with pytest.raises(CheckpointError, match=rf"{NAME}\.weight") as caught:
        read_plan(make_folder(fp8_layer(NAME) | e5m2))
    assert "F8_E5M2" in caught.value.got
    stacked = {"m.experts.weight": torch.zeros(2, 4, 4).to(torch.float8_e4m3fn)}
    with pytest.raises(CheckpointError, match=r"m\.experts\.weight"):
        read_plan(make_folder(stacked, name="stacked"))


def test_an_fp8_tensor_that_is_no_weight_is_refused(make_folder, fp8_layer):
    tensors = fp8_layer(NAME) | {"m.experts.up": torch.zeros(4, 4).to(torch.float8_e4m3fn)}
    with pytest.raises(CheckpointError, match=r"m\.experts\.up"):
        read_plan(make_folder(tensors))


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_codes_are_refused_by_tensor_and_index(make_folder, fp8_layer, code):
    tensors = fp8_layer(NAME)
    tensors[f"{NAME}.weight"].view(torch.uint8)[3, 5] = code
    checkpoint = open_checkpoint(make_folder(tensors))
    with pytest.raises(CheckpointError, match=rf"{NAME}\.weight") as caught:
        checkpoint.layer(NAME)
    assert "[3, 5]" in caught.value.got


def test_a_bias_belongs_to_its_layer(make_folder, fp8_layer):
    bias = torch.arange(64, dtype=torch.bfloat16)
    layer = open_checkpoint(make_folder(fp8_layer(NAME) | {f"{NAME}.bias": bias})).layer(NAME)
    assert torch.equal(layer.bias, bias)


def test_a_plan_of_shards_reads_each_tensor_from_its_own(make_folder, fp8_layer):
    a, b = fp8_layer("m.a", seed=1), fp8_layer("m.b", seed=2)
    tensors = a | b
    # a layer's scale may lie in another shard than its weight
    shards = [[n for n in tensors if n.endswith("weight")], [n for n in tensors if "scale" in n]]
    checkpoint = open_checkpoint(make_folder(tensors, shards=shards))
    for name in ("m.a", "m.b"):
        expected = tensors[f"{name}.weight"].float() * 0.5
        assert torch.equal(dequantize(checkpoint.layer(name).weight), expected)


def test_a_path_that_is_no_folder_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="hf download"):
        read_plan(tmp_path / "org" / "model")


def test_an_unknown_format_names_those_that_are_read(make_folder, fp8_layer):
    with pytest.raises(CheckpointError, match="'bitsandbytes'"):
        read_plan(make_folder(fp8_layer(NAME), {"quant_method": "bitsandbytes"}))


def test_a_broken_config_is_refused_by_file(make_folder, fp8_layer):
    folder = make_folder(fp8_layer(NAME))
    (folder / "config.json").write_text('{"model_type": ')
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_plan(folder)


def test_a_rule_for_a_tied_lm_head_is_not_idle(make_folder, fp8_layer):
    import json

    folder = make_folder(fp8_layer(NAME))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert dict(read_plan(folder).rules) == {"lm_head": ("lm_head",)}
