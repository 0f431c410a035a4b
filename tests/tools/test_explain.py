"""explain: the layer's own choices, shapes without weights, estimates with their error."""

import json
import re
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from anyfp8 import gemm
from anyfp8.device import CATALOGUE, find_device
from anyfp8.errors import CheckpointError, DeviceError, InputError
from anyfp8.linear import Fp8Linear, plans
from anyfp8.problem import Problem, Scheme
from anyfp8.select import M_GRID
from anyfp8.select.predict import estimate
from anyfp8.tools import explain_text, measured, shapes
from anyfp8.tools.explain import explain, parse_ms
from anyfp8.tools.explain_html import page
from anyfp8.tools.shapes import Layer, Model, decoder_linears, fused, read_model, sharded

BASELINES = Path(__file__).parents[2] / "benchmarks" / "baselines"

SCHEMES = (
    "w8a8-tensor-static",
    "w8a8-tensor-dynamic",
    "w8a8-channel-token",
    "w8a8-channel-static",
    "w8a8-block128x128-group128",
    "w8a16-tensor",
    "w8a16-channel",
    "w8a16-block128x128",
)
GPUS = (*CATALOGUE, "sm_75", "sm_130", "gfx1300", "cpu")
QWEN3_8B = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 36,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def config_only(tmp_path):
    def write(**extra):
        (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B | extra))
        return tmp_path

    return write


def held_by_the_layer(monkeypatch, device, scheme, n, k, dtype, bias):
    monkeypatch.setattr(plans, "device_of", lambda _: device)
    made = Fp8Linear(k, n, scheme, bias=bias, dtype=dtype, device="meta")
    # layers share plans by the torch device, which is always meta here
    plans.replan()
    plan = made.plan()
    plans.replan()
    return plan


def compare(monkeypatch, gpu, name, ms):
    device, scheme = find_device(gpu), Scheme.parse(name)
    n, k = 1536, 1024
    model = Model("one", (Layer("one", scheme, n, k, True),), torch.bfloat16)
    shown = explain(model, device, ms).kinds[0].runs
    plan = held_by_the_layer(monkeypatch, device, scheme, n, k, torch.bfloat16, True)
    by_m = {m: choice for run in shown for m, choice in zip(run.ms, run.choices, strict=True)}
    assert by_m == {m: plan.choice(m) for m in ms}


@pytest.mark.parametrize(("gpu", "name"), list(zip(GPUS, SCHEMES * len(GPUS), strict=False)))
def test_explain_shows_the_choices_that_the_layer_holds(monkeypatch, gpu, name):
    compare(monkeypatch, gpu, name, (1, 24, 512))


@pytest.mark.slow
@pytest.mark.parametrize("gpu", GPUS)
def test_explain_and_layer_agree_for_every_scheme_and_m(monkeypatch, gpu):
    for name in SCHEMES:
        compare(monkeypatch, gpu, name, M_GRID)


@pytest.mark.parametrize("kind", shapes.DECODERS)
@pytest.mark.parametrize("extra", [{}, {"attention_bias": True, "mlp_bias": True}])
def test_shapes_from_a_config_are_those_of_transformers_model(kind, extra):
    from anyfp8.integrations.transformers import skeleton

    config = {
        "model_type": kind,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 100,
    } | extra
    modules = skeleton(config).named_modules()
    want = {
        (name, *module.weight.shape, module.bias is not None)
        for name, module in modules
        if isinstance(module, torch.nn.Linear)
    }
    assert {(x.name, x.n, x.k, x.bias) for x in decoder_linears(config)} == want


def test_other_models_are_built_by_transformers(tmp_path):
    config = {
        "model_type": "gpt_neox",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "vocab_size": 100,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_model(str(tmp_path))
    assert {(x.kind, x.n, x.k) for x in found.layers} == {
        ("attention.query_key_value", 192, 64),
        ("attention.dense", 64, 64),
        ("mlp.dense_h_to_4h", 96, 64),
        ("mlp.dense_4h_to_h", 64, 96),
    }


def test_a_config_alone_lists_shapes_after_fusion_and_tensor_parallelism(config_only):
    model = read_model(str(config_only()), Scheme.parse("w8a8-tensor-static"))
    assert model.left == ("lm_head",)
    assert len(model.layers) == 252
    merged = fused(model)
    assert [(x.kind, x.scheme.name, x.n, x.k) for x in merged.layers[:4]] == [
        ("self_attn.qkv_proj", "w8a8-channel-static", 6144, 4096),
        ("self_attn.o_proj", "w8a8-tensor-static", 4096, 4096),
        ("mlp.gate_up_proj", "w8a8-channel-static", 24576, 4096),
        ("mlp.down_proj", "w8a8-tensor-static", 4096, 12288),
    ]
    assert [(x.n, x.k) for x in sharded(merged, 4).layers[:4]] == [
        (1536, 4096),
        (4096, 1024),
        (6144, 4096),
        (4096, 3072),
    ]
    with pytest.raises(InputError, match="cannot be split"):
        sharded(merged, 7)


def test_a_name_is_the_model_that_its_config_describes(config_only):
    named, read = read_model("qwen3-8b"), read_model(str(config_only()))
    assert named.layers == read.layers
    assert named.left == read.left == ("lm_head",)
    assert len(read_model("llama-3-70b").layers) == 7 * 80


def test_a_quantized_config_without_weights_gives_each_layer_its_scheme(config_only):
    quantization = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }
    model = read_model(str(config_only(quantization_config=quantization)))
    assert {x.scheme.name for x in model.layers} == {"w8a8-block128x128-group128"}
    assert len(model.layers) == 252
    with pytest.raises(InputError, match="is quantized already"):
        read_model(str(config_only(quantization_config=quantization)), Scheme())


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no model at"):
        read_model(str(tmp_path / "absent"))
    with pytest.raises(InputError, match="not a shape"):
        read_model("0,4096")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match="does not say the size"):
        read_model(str(tmp_path))


@pytest.mark.parametrize(
    ("gpu", "quantizes"),
    [
        *[("a100", False), ("3090", False), ("l40s", True), ("4090", True), ("l4", True)],
        *[("h200", True), ("b200", True), ("mi300x", True), ("mi250x", False)],
        *[("sm_86", False), ("sm_89", True), ("sm_130", True), ("gfx1300", False)],
    ],
)
def test_fp8_arithmetic_starts_at_sm89_and_holds_for_unknown_gpus(gpu, quantizes):
    found = explain(read_model("4096,4096"), find_device(gpu), (1, 256))
    assert {run.choice.quantizes for run in found.kinds[0].runs} == {quantizes}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_gpu_from_the_future_takes_generic_triton_only(scheme):
    model = Model("one", (Layer("one", Scheme.parse(scheme), 4096, 4096),), torch.bfloat16)
    found = explain(model, find_device("sm_130"), M_GRID)
    names = {run.choice.backend for run in found.kinds[0].runs}
    assert names <= {"triton_row", "triton_block", "triton_w8a16"}
    said = {backend: why for backend, why, _ in found.refused}
    assert "cutlass" in said
    if scheme.startswith("w8a8"):
        assert said["torch_scaled_mm"].startswith("is not known to work on sm_130")


def test_a_forward_pass_is_the_sum_of_its_layers(config_only):
    found = explain(read_model(str(config_only())), find_device("h200"), (1, 64))
    for i, m in enumerate((1, 64)):
        total = sum(
            kind.count * run.us[run.ms.index(m)]
            for kind in found.kinds
            for run in kind.runs
            if m in run.ms
        )
        assert found.forward_us(m) == pytest.approx(total), i
    # reading 6.95 GB of codes at 4.8 TB/s is the floor of one token
    assert found.forward_us(1) > 6.95e9 / 4.8e6


def test_without_figures_nothing_is_estimated_and_the_text_says_so():
    found = explain(read_model("4096,4096"), find_device("sm_130"), (1,))
    assert found.forward_us(1) is None
    assert "no estimate: the figures of sm_130 are not known" in "\n".join(
        explain_text.lines(found)
    )


def test_the_table_sentence_names_the_file_or_the_lender(tmp_path, monkeypatch):
    model = read_model("4096,4096")
    ours = explain(model, find_device("l40s"), (1,))
    assert ours.tables.startswith("shipped table (NVIDIA L40S, ")
    none = explain(model, find_device("a100"), (1,))
    assert "nvidia_a100_sxm4_80gb.jsonl in ANYFP8_TABLE_DIR would be read" in none.tables
    head = {"format": 1, "device": "NVIDIA A100-SXM4-80GB", "source": "test"}
    row = {
        "op": "linear",
        "scheme": "w8a8-channel-token",
        "n": 4096,
        "k": 4096,
        "m": 1,
        "accumulate": "fp32_128",
        "backend": "dequant",
        "role": "ours",
        "config": {"memory": "per_call", "row_by_row": False},
        "us": 12.5,
        "x_dtype": "bf16",
        "out_dtype": "bf16",
    }
    path = tmp_path / "nvidia_a100_sxm4_80gb.jsonl"
    path.write_text(json.dumps(head) + "\n" + json.dumps(row) + "\n")
    monkeypatch.setenv("ANYFP8_TABLE_DIR", str(tmp_path))
    lent = explain(model, find_device("a800"), (1,))
    assert "borrowed from its sibling NVIDIA A100-SXM4-80GB" in lent.tables
    run = lent.kinds[0].runs[0]
    # a measured row's time is shown in place of an estimate
    assert (run.choice.source, run.measured, run.us) == ("user table", "yes", (12.5,))


def test_a_measured_product_gets_an_estimate_for_its_quantization_only(tmp_path, monkeypatch):
    config = {
        "block_m": 16,
        "block_n": 32,
        "block_k": 128,
        "group_m": 8,
        "num_warps": 4,
        "num_stages": 3,
    }
    common = {"scheme": "w8a8-channel-token", "n": 4096, "k": 4096, "accumulate": "fast"}
    rows = [
        common | {"op": "gemm", "m": 1, "backend": "triton_row", "config": config, "us": 500.0},
        # the default path was faster here
        common | {"op": "gemm", "m": 64, "backend": "triton_row", "config": config, "us": 900.0},
        common
        | {"op": "gemm", "m": 64, "backend": "torch_scaled_mm", "role": "default", "us": 700},
    ]
    head = {"format": 1, "device": "NVIDIA GeForce RTX 4090"}
    text = "".join(json.dumps(line) + "\n" for line in (head, *rows))
    (tmp_path / "nvidia_geforce_rtx_4090.jsonl").write_text(text)
    monkeypatch.setenv("ANYFP8_TABLE_DIR", str(tmp_path))
    one, many = explain(read_model("4096,4096"), find_device("4090"), (1, 64)).kinds[0].runs
    assert (one.choice.backend, many.choice.backend) == ("triton_row", "torch_scaled_mm")
    for run, measured_us in ((one, 500), (many, 700)):
        assert run.measured == "product"
        # quantizing a few rows takes a launch: microseconds, not tens of them
        assert measured_us < run.us[0] < measured_us + 10


def test_neighbours_with_one_kernel_name_all_their_rows():
    found = explain(read_model("6144,4096"), find_device("h200"), (1, 8, 16))
    text = "\n".join(explain_text.lines(found))
    runs = found.kinds[0].runs
    assert [r.ms for r in runs if len(r.ms) > 1]
    for run in runs:
        rows = [f"M={m}" for m in (run.ms[0], run.ms[-1])]
        want = f"the rows of {rows[0]} to {run.ms[-1]} say" if len(run.ms) > 1 else rows[0]
        assert want in text


def test_times_that_were_not_measured_can_be_left_out():
    found = explain(read_model("6208,4096"), find_device("h200"), (1, 16), estimates=False)
    assert [run.us for run in found.kinds[0].runs] == [
        (None,) * len(run.ms) for run in found.kinds[0].runs
    ]
    text = "\n".join(explain_text.lines(found))
    assert "est." not in text
    assert "no sum: not every layer was measured" in text
    assert "estimates of" not in text


def test_the_kill_switch_shows_the_default_path(monkeypatch):
    monkeypatch.setenv("ANYFP8_ENABLE_FP8_GEMM_CONFIG_TUNE", "0")
    found = explain(read_model("6144,4096"), find_device("l40s"), (1, 4096))
    assert {run.choice.source for run in found.kinds[0].runs} == {"default"}
    assert found.tables.startswith("tuned tables and the ranker are off")


def test_an_e4m3_kv_cache_is_refused_by_name_where_the_gpu_has_none():
    model = Model("m", read_model("4096,4096").layers, kv_cache="FP8")
    assert explain(model, find_device("h200"), (1,)).trouble is None
    trouble = explain(model, find_device("a100"), (1,)).trouble
    assert isinstance(trouble, DeviceError)
    assert "NVIDIA A100-SXM4-80GB cannot hold the E4M3 KV cache" in trouble.what
    assert trouble.got
    assert trouble.want
    assert "--kv-cache-dtype" in trouble.hint


def test_errors_of_estimates_are_computed_from_measurements():
    for error in measured.errors():
        assert error.points >= 20
        assert 0 < error.median < error.p90
    text = "\n".join(
        explain_text.lines(explain(read_model("4096,4096"), find_device("h100"), (1, 4096)))
    )
    assert "estimates of torch_scaled_mm: median error" in text


@pytest.mark.parametrize("op", ["gemm", "linear"])
def test_estimates_are_within_a_quarter_of_the_h200_baselines(op):
    lines = (BASELINES / f"nvidia_h200-{op}.jsonl").read_text().splitlines()
    device, far = find_device("h200"), {}
    for cell in (c for c in map(json.loads, lines) if c["kind"] == "cell"):
        for own in cell["ours"]:
            backend = gemm.backend(own["backend"])
            config = backend.config_class.from_dict(own["config"])
            shape = (cell["m"], cell["n"], cell["k"])
            scheme = Scheme.parse(cell["scheme"])
            problem = Problem(op, scheme, *shape, accumulate=cell["accumulate"])
            us = estimate(problem, device, backend, config)
            far.setdefault(backend.name, []).append(abs(us / own["us"] - 1))
    assert "triton_row" in far
    for name, errors in far.items():
        errors.sort()
        assert errors[len(errors) // 2] < 0.15, name
        assert errors[len(errors) * 9 // 10] < 0.25, name


def test_the_error_that_is_printed_is_within_a_quarter_for_nine_in_ten():
    found = {error.backend: error for error in measured.errors()}
    assert set(found) == {"torch_scaled_mm", "triton_row", "triton_block", "triton_w8a16"}
    assert all(error.p90 < 0.25 for error in found.values())
    text = explain_text.lines(explain(read_model("4096,4096"), find_device("a100"), (1, 64)))
    assert f"estimates of {found['triton_w8a16']}" in text


@pytest.mark.parametrize(("text", "ms"), [("16,1,16", (1, 16)), ("all", M_GRID), ("8192", (8192,))])
def test_ms_are_read_in_order(text, ms):
    assert parse_ms(text) == ms


@pytest.mark.parametrize("text", ["", "0,1", "one", "-4"])
def test_ms_that_are_none_are_refused(text):
    with pytest.raises(InputError, match="--m cannot be read"):
        parse_ms(text)


@pytest.mark.parametrize("gpu", ["h200", "a100", "mi300x"])
def test_compiling_shows_registers_spills_and_shared_memory(gpu):
    pytest.importorskip("triton")
    device = find_device(gpu)
    found = explain(read_model("6208,4096"), device, (16,), compiles=True)
    resources = found.kinds[0].runs[0].resources
    assert resources is not None
    assert not resources.error
    assert 16 <= resources.registers <= 512
    assert resources.spilled == 0
    assert 0 <= resources.shared <= resources.limit == device.shared_memory
    assert resources.fits


def test_the_page_is_one_file_with_every_layer_and_gpu(config_only):
    model = fused(read_model(str(config_only())))
    model = Model("<b>&model", model.layers)
    gpus = [find_device(name) for name in ("a100", "h200", "mi300x", "sm_130")]
    text = page([explain(model, gpu) for gpu in gpus], date(2026, 11, 29))
    assert not re.search(r"https?:|<script|<link|<img|@import|url\(|\bsrc=", text)
    assert "<b>&model" not in text
    assert "&lt;b&gt;&amp;model" in text
    for gpu in gpus:
        assert gpu.name in text
    body = ElementTree.fromstring(text[text.index("<table>") : text.index("</table>") + 8])
    rows = body.findall("./tbody/tr")
    names = [row.find("th").text.strip() for row in rows]
    assert names[:4] == [
        "self_attn.qkv_proj",
        "self_attn.o_proj",
        "mlp.gate_up_proj",
        "mlp.down_proj",
    ]
    assert {len(row.findall("td")) for row in rows} == {4}
    assert "@media print" in text
    assert page([explain(model, gpu) for gpu in gpus], date(2026, 11, 29)) == text
