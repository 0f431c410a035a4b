from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from anyfp8.checkpoint import open_checkpoint, read_plan
from anyfp8.checkpoint.modelopt import layer_tensors, quantization_configs
from anyfp8.errors import CheckpointError, InputError
from anyfp8.problem import Scheme
from anyfp8.reference import dequantize

STATIC = Scheme("tensor", "tensor")
CHANNEL = Scheme("channel", "token", dynamic=True)
BLOCK = Scheme("block", block=(128, 128))
NAMES = ("modelopt-fp8", "modelopt-fp8-pcpt", "modelopt-fp8-pb-wo")
SCHEMES = dict(zip(NAMES, (STATIC, CHANNEL, BLOCK), strict=True))
NESTED = {
    "producer": {"name": "modelopt", "version": "0.29.0"},
    "quantization": {
        "quant_algo": "FP8",
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head"],
    },
}
FLAT = {
    "quant_method": "modelopt",
    "quant_algo": "FP8",
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"]}},
    "producer": {"name": "modelopt", "version": "0.29.0"},
}


def expected_values(raw, name):
    """The weight by torch alone: codes times scale, repeated over its rows or blocks."""
    codes, scale = raw[f"{name}.weight"].float(), raw[f"{name}.weight_scale"]
    if scale.ndim == 1:
        return codes * scale[:, None]
    if scale.ndim == 4:
        full = scale[:, 0, :, 0].repeat_interleave(128, 0).repeat_interleave(128, 1)
        return codes * full[: codes.shape[0], : codes.shape[1]]
    return codes * scale


@pytest.mark.parametrize("folder", NAMES)
def test_official_files_load_and_dequantize_to_codes_times_scale(data, folder):
    checkpoint = open_checkpoint(data / folder)
    raw = load_file(data / folder / "model.safetensors")
    assert checkpoint.plan.producer == "modelopt 0.47.0"
    assert checkpoint.plan.schemes == {SCHEMES[folder]: 4}
    for layer in checkpoint.layers():
        values = dequantize(layer.weight)
        assert torch.equal(values, expected_values(raw, layer.name))
        assert layer.weight.scale.shape == layer.scheme.weight_scale_shape(*values.shape)
        static = raw.get(f"{layer.name}.input_scale")
        assert (layer.input_scale is None) == (static is None)
        assert static is None or torch.equal(layer.input_scale, static)


@pytest.mark.parametrize("folder", NAMES)
def test_official_files_are_near_their_16_bit_original(data, folder):
    checkpoint = open_checkpoint(data / folder)
    original = load_file(data / "bf16" / "model.safetensors")
    for name in ("self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj"):
        w = original[f"model.layers.0.{name}.weight"].float()
        error = dequantize(checkpoint.layer(f"model.layers.0.{name}").weight) - w
        # rounding to 3 mantissa bits: at most 2^-4 relative, 0.026 on average for normal values
        assert error.norm() / w.norm() < 0.03


@pytest.mark.parametrize("folder", NAMES)
def test_official_files_leave_nothing_unaccounted(data, folder):
    plan = read_plan(data / folder)
    placed = [name for layer in plan.layers.values() for name in layer.tensors]
    raw = load_file(data / folder / "model.safetensors")
    assert sorted([*placed, *plan.plain]) == sorted(raw)
    assert plan.unaccounted == ()
    assert plan.warnings == ()
    assert dict(plan.rules) == {
        "lm_head": ("lm_head",),
        "model.embed_tokens": ("model.embed_tokens",),
    }


def test_nvfp4_layers_of_an_official_file_are_refused_by_name(data):
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.down_proj") as caught:
        read_plan(data / "modelopt-mixed-nvfp4")
    assert "NVFP4" in caught.value.got
    assert "6 of" in caught.value.what


@pytest.mark.parametrize(
    ("flat", "nested"), [(FLAT, None), (None, NESTED), (NESTED, None), (FLAT, NESTED)]
)
def test_flat_and_nested_configs_give_equal_plans(make_folder, fp8_layer, flat, nested):
    tensors = fp8_layer("model.layers.0.mlp.up_proj") | {"lm_head.weight": torch.zeros(4, 4)}
    plan = read_plan(make_folder(tensors, flat, nested))
    assert (plan.format, plan.algorithm, plan.kv_cache) == ("modelopt", "FP8", "FP8")
    assert plan.rules == (("lm_head", ("lm_head",)),)
    assert plan.producer == "modelopt 0.29.0"
    assert plan.schemes == {STATIC: 1}
    assert plan.warnings == ()


def test_config_json_wins_where_the_two_files_disagree(make_folder, fp8_layer):
    nested = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    plan = read_plan(make_folder(fp8_layer("model.a"), FLAT, nested))
    assert plan.algorithm == "FP8"
    assert "disagree on quant_algo ('FP8', 'NVFP4')" in plan.warnings[0]


@pytest.mark.parametrize(
    "ignore", [{}, {"ignore": None}, {"ignore": []}, {"exclude_modules": None}]
)
def test_an_absent_or_null_ignore_list_is_an_empty_one(make_folder, fp8_layer, ignore):
    config = {"quant_method": "modelopt", "quant_algo": "FP8", **ignore}
    assert read_plan(make_folder(fp8_layer("model.a"), config)).rules == ()


def test_ignore_patterns_reach_the_layers_they_mean(make_folder, fp8_layer):
    config = {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "exclude_modules": ["model.layers.*.mlp.gate*", "idle"],
    }
    tensors = fp8_layer("model.layers.0.mlp.up_proj")
    tensors["model.layers.0.mlp.gate.weight"] = torch.zeros(8, 96)
    plan = read_plan(make_folder(tensors, config))
    assert dict(plan.rules)["model.layers.*.mlp.gate*"] == ("model.layers.0.mlp.gate",)
    assert dict(plan.rules)["idle"] == ()


@pytest.mark.parametrize("extra", [{}, {"quantized_layers": None}, {"quantized_layers": {}}])
def test_mixed_precision_without_a_layer_map_is_refused(make_folder, fp8_layer, extra):
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", **extra}
    with pytest.raises(CheckpointError, match="unsupported bare MIXED_PRECISION"):
        read_plan(make_folder(fp8_layer("model.a"), config))


def mixed(layers):
    return {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {name: {"quant_algo": algo} for name, algo in layers.items()},
    }


def test_a_layer_map_gives_each_layer_its_own_algorithm(make_folder, fp8_layer):
    n, k = 64, 96
    tensors = {
        **fp8_layer("m.q", n, k),
        **fp8_layer("m.c", n, k, input_scale=None),
        **fp8_layer("m.b", n, k, input_scale=None),
        "m.plain.weight": torch.zeros(4, 4),
    }
    tensors["m.c.weight_scale"] = torch.rand(n) + 0.1
    tensors["m.b.weight_scale"] = torch.rand(1, 1, 1, 1) + 0.1
    config = mixed({"m.q": "FP8", "m.c": "FP8_PER_CHANNEL_PER_TOKEN", "m.b": "fp8_pb_wo"})
    plan = read_plan(make_folder(tensors, config))
    assert {name: layer.scheme for name, layer in plan.layers.items()} == {
        "m.q": STATIC,
        "m.c": CHANNEL,
        "m.b": BLOCK,
    }
    assert plan.plain == ("m.plain.weight",)


def test_a_layer_map_may_have_globs_and_a_name_wins(make_folder, fp8_layer):
    tensors = fp8_layer("m.0.q") | fp8_layer("m.0.c", input_scale=None)
    tensors["m.0.c.weight_scale"] = torch.rand(64) + 0.1
    config = mixed({"m.0.*": "FP8", "m.0.c": "FP8_PER_CHANNEL_PER_TOKEN", "m.1.*": "NVFP4"})
    plan = read_plan(make_folder(tensors, config))
    assert [layer.scheme for layer in plan.layers.values()] == [CHANNEL, STATIC]
    tensors["m.1.q.weight"] = torch.zeros(8, 8, dtype=torch.uint8)
    with pytest.raises(CheckpointError, match=r"m\.1\.q") as caught:
        read_plan(make_folder(tensors, config, name="four-bit"))
    assert "NVFP4" in caught.value.got


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16", "", None, "FP9"])
def test_an_unknown_algorithm_is_refused_for_its_layer(make_folder, fp8_layer, algorithm):
    tensors = fp8_layer("m.good") | {"m.odd.weight": torch.zeros(8, 8, dtype=torch.uint8)}
    with pytest.raises(CheckpointError, match=r"m\.odd"):
        read_plan(make_folder(tensors, mixed({"m.good": "FP8", "m.odd": algorithm})))


def test_an_unknown_algorithm_is_refused_even_beside_16_bit_weights(make_folder, fp8_layer):
    tensors = fp8_layer("m.good") | {"m.odd.weight": torch.zeros(8, 8)}
    with pytest.raises(CheckpointError, match=r"m\.odd"):
        read_plan(make_folder(tensors, mixed({"m.good": "FP8", "m.odd": "W4A16"})))


def test_an_unknown_algorithm_for_the_whole_is_refused(make_folder):
    config = {"quant_method": "modelopt", "quant_algo": "FP7"}
    with pytest.raises(CheckpointError, match="cannot run") as caught:
        read_plan(make_folder({"m.weight": torch.zeros(8, 8)}, config))
    assert "FP7" in caught.value.got
    assert "FP8_PB_WO" in caught.value.want


def test_a_null_algorithm_means_no_quantized_weights(make_folder):
    config = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}
    plan = read_plan(make_folder({"m.weight": torch.zeros(8, 8)}, config))
    assert plan.layers == {}
    assert plan.kv_cache == "FP8"
    assert plan.plain == ("m.weight",)


def test_a_map_of_parts_serves_the_fused_module(make_folder, fp8_layer):
    config = mixed({f"m.{part}_proj": "FP8" for part in "qkv"})
    plan = read_plan(make_folder(fp8_layer("m.qkv_proj"), config))
    assert plan.layers["m.qkv_proj"].scheme == STATIC


def test_parts_with_different_algorithms_cannot_be_fused(make_folder, fp8_layer):
    config = mixed({"m.gate_proj": "FP8", "m.up_proj": "FP8_PB_WO"})
    with pytest.raises(CheckpointError, match="different algorithms"):
        read_plan(make_folder(fp8_layer("m.gate_up_proj"), config))


@pytest.mark.parametrize(
    ("field", "value"), [("ignore", "lm_head"), ("ignore", [3]), ("quantized_layers", ["a"])]
)
def test_fields_of_the_wrong_type_are_refused(make_folder, fp8_layer, field, value):
    config = {"quant_method": "modelopt", "quant_algo": "FP8", field: value}
    with pytest.raises(CheckpointError):
        read_plan(make_folder(fp8_layer("m.a"), config))


@pytest.mark.parametrize("folder", NAMES)
def test_written_configs_equal_the_official_ones(data, folder):
    plan = read_plan(data / folder)
    layers = {name: layer.scheme for name, layer in plan.layers.items()}
    flat, nested = quantization_configs(layers, ["model.embed_tokens", "lm_head"])
    official = json.loads((data / folder / "config.json").read_text())["quantization_config"]
    official_nested = json.loads((data / folder / "hf_quant_config.json").read_text())
    for ours, theirs in ((flat, official), (nested, official_nested)):
        assert ours.pop("producer")["name"] == "anyfp8"
        theirs.pop("producer")
        assert ours == theirs


@pytest.mark.parametrize("folder", NAMES)
def test_written_tensors_equal_the_official_ones(data, folder):
    raw = load_file(data / folder / "model.safetensors")
    for layer in open_checkpoint(data / folder).layers():
        written = layer_tensors(layer.name, layer.scheme, layer.weight, layer.input_scale)
        assert written.keys() == {name for name in raw if name.startswith(f"{layer.name}.")}
        for name, tensor in written.items():
            assert tensor.dtype == raw[name].dtype
            assert tensor.shape == raw[name].shape
            assert torch.equal(tensor.float(), raw[name].float())


def test_layers_of_several_schemes_are_written_as_mixed_precision(make_folder, fp8_layer):
    flat, nested = quantization_configs({"m.a": STATIC, "m.b": BLOCK}, ["lm_head"])
    assert flat["quant_algo"] == nested["quantization"]["quant_algo"] == "MIXED_PRECISION"
    assert flat["quantized_layers"]["m.b"] == {"quant_algo": "fp8_pb_wo"}
    tensors = fp8_layer("m.a") | fp8_layer("m.b", input_scale=None)
    tensors["m.b.weight_scale"] = torch.ones(1, 1, 1, 1)
    plan = read_plan(make_folder(tensors, flat, nested))
    assert {n: layer.scheme for n, layer in plan.layers.items()} == {"m.a": STATIC, "m.b": BLOCK}
    assert plan.warnings == ()


@pytest.mark.parametrize("name", ["w8a16-channel", "w8a8-tensor-dynamic"])
def test_a_scheme_without_an_algorithm_names_the_formats_that_hold_it(name):
    with pytest.raises(InputError, match="compressed-tensors") as caught:
        quantization_configs({"m": Scheme.parse(name)}, [])
    assert "w8a8-tensor-static" in caught.value.want


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.sampled_from(["FP8", "lm_head", "re:(", "*"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["m.a", "quant_algo", "name", "num_bits"]), inner)
    ),
    max_leaves=6,
)
FIELDS = ("quant_algo", "ignore", "exclude_modules", "quantized_layers", "kv_cache_scheme")
OTHERS = ("kv_cache_quant_algo", "producer", "quantization", "quant_method")
CONFIG = st.dictionaries(st.sampled_from([*FIELDS, *OTHERS]), JSON)


@settings(max_examples=200, deadline=None)
@given(flat=CONFIG, nested=CONFIG)
def test_any_config_is_read_or_refused(tmp_path_factory, flat, nested):
    folder = tmp_path_factory.getbasetemp() / "fuzzed"
    folder.mkdir(exist_ok=True)
    weight = torch.ones(4, 4).to(torch.float8_e4m3fn)
    scales = {"m.a.weight_scale": torch.tensor(1.0), "m.a.input_scale": torch.tensor(1.0)}
    save_file({"m.a.weight": weight, **scales}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": flat}))
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": nested}))
    try:
        plan = read_plan(folder)
    except CheckpointError:
        return
    # one tensor is FP8: a plan that leaves it out would be a wrong model
    assert list(plan.layers) == ["m.a"]
