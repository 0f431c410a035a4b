"""The decoder stack of `bench decode` on the CPU: its logits, its judge, its arithmetic of time."""

import json
from dataclasses import replace

import pytest
import torch
import typer

from anyfp8 import reference
from anyfp8.errors import CheckpointError, InputError
from anyfp8.linear import Fp8Linear
from anyfp8.problem import Scheme
from anyfp8.select import Request
from anyfp8.tools import bench_command, bench_decode
from anyfp8.tools.decode_shapes import MODELS, Decoder, decoder
from anyfp8.tools.decode_stack import INPUT_SCALE, Stack, Weights, applied
from anyfp8.tools.gemm_roof import Roof
from anyfp8.tools.timing import Timing

ROW = Scheme("channel", "token", True)
TINY = Decoder("tiny", 256, 384, 4, 2, 64, 3, 500, qk_norm=True)
CPU = torch.device("cpu")


def timer_of(us):
    def race(contenders, rounds=9, block_us=800.0, at_least=1):
        return {
            name: Timing(us.get(name, 10.0), 0, 0, (us.get(name, 10.0),) * rounds, len(calls))
            for name, calls in contenders.items()
        }

    return race


def run(us=None, shape=TINY, **options):
    options = {"batches": (1, 3), "context": 9, "prefill": 8, "seed": 1} | options
    return bench_decode.run(shape, place="cpu", timer=timer_of(us or {}), **options)


def dequantized(weights):
    def apply(layer, kind, x):
        weight = weights.quantized[layer][kind]
        w = reference.dequantize(weight.q).to(torch.bfloat16)
        return torch.nn.functional.linear(x, w, weight.bias)

    return apply


def transformers_model(weights, kind):
    """transformers' own decoder of the same sizes and weights."""
    import transformers

    s = weights.shape
    options = {
        "hidden_size": s.hidden, "intermediate_size": s.inner, "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads, "head_dim": s.head_size, "vocab_size": s.vocabulary,
        "num_hidden_layers": weights.layers, "rms_norm_eps": s.eps, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": s.rope_theta},
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**options)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16).eval()
    state = model.state_dict()
    state["model.embed_tokens.weight"].copy_(weights.embedding)
    state["lm_head.weight"].copy_(weights.head)
    q, kv = s.heads * s.head_size, s.kv_heads * s.head_size
    for i, layer in enumerate(weights.quantized):
        parts = {
            "qkv": (("self_attn.q_proj", q), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)),
            "o": (("self_attn.o_proj", s.hidden),),
            "gate_up": (("mlp.gate_proj", s.inner), ("mlp.up_proj", s.inner)),
            "down": (("mlp.down_proj", s.hidden),),
        }
        for name, weight in layer.items():
            w = reference.dequantize(weight.q).to(torch.bfloat16)
            split = w.split([n for _, n in parts[name]])
            for (part, _), rows in zip(parts[name], split, strict=True):
                state[f"model.layers.{i}.{part}.weight"].copy_(rows)
    return model


@pytest.mark.parametrize(("kind", "qk_norm"), [("Qwen3", True), ("Llama", False)])
def test_prefill_then_decode_gives_the_logits_of_transformers(kind, qk_norm):
    with torch.inference_mode():
        weights = Weights(replace(TINY, qk_norm=qk_norm), 3, ROW, CPU, seed=5)
        stack = Stack(weights, batch=2, context=9, prefill=8)
        linear = dequantized(weights)
        model = transformers_model(weights, kind)
        prompt = stack.prompt.view(2, 8)
        found = [stack.prefill(linear), stack.decode(linear)]
        whole = torch.cat([prompt, stack.tokens[:, None]], 1)
        want = [model(tokens).logits[:, -1] for tokens in (prompt, whole)]
    for ours, theirs in zip(found, want, strict=True):
        difference = (ours.float() - theirs.float()).norm() / theirs.float().norm()
        # both round to bf16 after each operation, in another order
        assert difference < 0.02


def test_a_step_of_the_wrong_place_in_the_cache_would_show():
    with torch.inference_mode():
        weights = Weights(TINY, 3, ROW, CPU, seed=5)
        stack = Stack(weights, batch=2, context=9, prefill=8)
        stack.prefill(dequantized(weights))
        right = stack.decode(dequantized(weights))
        stack.keys[1][:, :, 3] *= -1
        assert not torch.allclose(stack.decode(dequantized(weights)), right, atol=0.05)


@pytest.mark.parametrize(
    "name", ["w8a8-channel-token", "w8a8-tensor-static", "w8a8-block128x128-group128"]
)
def test_kill_switch_on_and_off_give_the_logits_of_the_reference(name):
    scheme = Scheme.parse(name)
    scale = torch.tensor(INPUT_SCALE) if scheme.activation == "tensor" else None
    with torch.inference_mode():
        weights = Weights(replace(TINY, qkv_bias=True), 2, scheme, CPU, seed=5)
        stack = Stack(weights, batch=3, context=9, prefill=8)

        def expected(layer, kind, x):
            weight = weights.quantized[layer][kind]
            return reference.linear(x, weight.q, scheme, input_scale=scale, bias=weight.bias)

        want = stack.decode(expected).float()
        for tune in (True, False):
            request = Request(tune=tune, emulate=True)
            found = stack.decode(applied(weights.fp8_linears(request))).float()
            assert (found - want).norm() / want.norm() < 0.02
            assert torch.equal(found.argmax(-1), want.argmax(-1))


def test_cells_and_their_judged_errors():
    result = run()
    names = [(c.phase, c.batch, c.tokens) for c in result["cells"]]
    assert names == [("decode", 1, 1), ("prefill", 1, 8), ("decode", 3, 3), ("prefill", 3, 24)]
    for cell in result["cells"]:
        assert not cell.wrong
        assert cell.logits == {"selection": 0.0, "kill switch": 0.0}
        assert all(0 < step.error < 0.005 for step in cell.ours)
        assert [step.name for step in cell.others] == ["torch bf16"]
        assert set(cell.ours[0].linears) == {"qkv", "o", "gate_up", "down"}
    assert result["header"]["mode"] == "eager"


def test_fewer_layers_say_what_one_takes_and_mark_the_whole_as_extrapolated():
    us = {"selection": 220.0, "kill switch": 420.0, "ends": 20.0}
    cell = run(us, replace(TINY, layers=10), layers=2)["cells"][0]
    first, second = cell.ours
    assert (first.layer_us, first.model_us, first.extrapolated) == (100.0, 1020.0, True)
    assert second.model_us == 20.0 + 10 * 200.0
    assert first.tokens_per_s == pytest.approx(1e6 / 1020.0)
    assert [r.value for r in cell.ratios["kill switch / selection"]] == [420 / 220] * 2
    whole = run(us)["cells"][0].ours[0]
    assert (whole.model_us, whole.extrapolated) == (220.0, False)


def test_the_floor_is_that_of_the_linears_alone():
    roof = Roof({f"{s.n}x{s.k}": 2.0 for s in TINY.linears}, 1.0, 1e9, 1.0)
    cell = run(roof=roof)["cells"][0]
    moved = sum(2 * (s.n + s.k) for s in TINY.linears)
    assert cell.floor_us == pytest.approx(3 * (4 * 2.0 + moved / 1e3))


def test_a_wrong_linear_has_no_number_and_fails_the_command(monkeypatch, tmp_path):
    right = Fp8Linear.forward

    def wrong(self, x):
        y = right(self, x)
        if self.out_features == 768 and not self.request.tune:
            y[-1, 5] *= 1000
        return y

    monkeypatch.setattr(Fp8Linear, "forward", wrong)
    cell = run()["cells"][0]
    assert [step.name for step in cell.ours] == ["selection"]
    assert cell.wrong["kill switch"].startswith("gate_up of layer 0: relative error")
    with pytest.raises(typer.Exit) as caught:
        command(tmp_path / "lines.jsonl")
    assert caught.value.exit_code == 1


def command(out, model="qwen3-8b", **injected):
    folder = out.parent if out is not None else None
    config = {
        "model_type": "qwen3", "hidden_size": 256, "intermediate_size": 384, "head_dim": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
        "vocab_size": 100,
    }  # fmt: skip
    if folder is not None:
        (folder / "config.json").write_text(json.dumps(config))
        model = str(folder)
    bench_command.decode_command(
        model, tp=1, layers=1, batch="2,1", context=4, prefill=0, scheme=ROW.name,
        kill_switch="both", dense=True, seconds=9.0, rounds=2, seed=1, warm=False, out=out,
        place="cpu", timer=timer_of({}), **injected,
    )  # fmt: skip


def test_json_lines_hold_header_cells_and_summary(tmp_path, capsys, hold_to_schema):
    command(tmp_path / "lines.jsonl")
    lines = [json.loads(text) for text in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert [entry["kind"] for entry in lines] == ["header", "cell", "cell", "summary"]
    for entry in lines:
        hold_to_schema("bench-decode", entry)
    assert (lines[0]["layers"], lines[0]["of"], lines[0]["mode"]) == (1, 2, "eager")
    assert [(entry["phase"], entry["batch"]) for entry in lines[1:3]] == [
        ("decode", 1),
        ("decode", 2),
    ]
    assert lines[1]["verdicts"] == {
        "kill switch / selection": "tie",
        "torch bf16 / selection": "tie",
    }
    shown = capsys.readouterr().out
    assert "1 of 2 layers, eager" in shown
    assert "~0.0" in shown


def test_the_clock_on_the_wall_pairs_rounds():
    found = bench_decode.eager_race({"a": [lambda: None], "b": [lambda: None] * 2}, rounds=4)
    assert {len(timing.rounds) for timing in found.values()} == {4}
    assert (found["a"].calls, found["b"].calls) == (1, 2)


def test_named_decoders_have_the_sizes_of_the_models():
    qwen, llama = MODELS["qwen3-8b"], MODELS["llama-3-70b"]
    assert [(s.n, s.k) for s in qwen.linears] == [
        (6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288),
    ]  # fmt: skip
    assert [(s.n, s.k) for s in decoder("llama-3-70b", 8).linears] == [
        (1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584),
    ]  # fmt: skip
    assert llama.kv_bytes(2, 10, 80) == 2 * 2 * 80 * 2 * 10 * 8 * 128


@pytest.mark.parametrize(
    ("text", "tp", "error"),
    [
        ("gpt-9", 1, "no such decoder"),
        ("qwen3-8b", 5, "cannot be split"),
    ],
)
def test_what_cannot_be_built_is_refused(text, tp, error):
    with pytest.raises(InputError, match=error):
        decoder(text, tp)


def test_configs_of_other_architectures_and_broken_ones_are_named(tmp_path):
    path = tmp_path / "config.json"
    for text, error in (
        ("{", "cannot read"),
        ('{"model_type": "mamba"}', "of no decoder"),
        ('{"model_type": "llama", "hidden_size": 64}', "size of the model"),
    ):
        path.write_text(text)
        with pytest.raises(CheckpointError, match=error):
            decoder(str(path))


def test_sizes_must_be_positive():
    with pytest.raises(InputError, match="cannot build this stack"):
        run(context=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_a_stack_that_main_memory_cannot_hold_is_refused_before_it_is_built(call, monkeypatch):
    monkeypatch.setattr(bench_decode, "_free_memory", lambda: 8 * 10**9)
    status, out, err = call("bench", "decode")
    assert (status, out) == (1, "")
    assert "error: 36 layers of qwen3-8b do not fit" in err
    assert "hint: --layers 8" in err
