"""anyfp8 run: load a checkpoint, say which kernels serve it, and generate text."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from anyfp8.errors import InputError
from anyfp8.gemm.dequant import DequantConfig
from anyfp8.integrations.transformers import load, load_tokenizer
from anyfp8.linear import Fp8Linear
from anyfp8.select import Choice, Request
from anyfp8.tools import console


def emulation(value: str | None, others: Sequence[str] = ()) -> bool:
    """Read `--emulate`. Raises InputError for anything but w8a8 or nothing.

    Args:
        others: what a verb reads itself, for the message.
    """
    if value not in (None, "w8a8"):
        want = ", ".join(("w8a8", *others))
        raise InputError("--emulate cannot be read", got=value, want=want)
    return value is not None


def load_model(
    path: str | Path,
    *,
    device: str | None = None,
    scheme: str | None = None,
    emulate: bool = False,
    weight_only: bool | None = None,
    backend: str | None = None,
    dynamic_fallback: bool = False,
    title: str = "loading",
) -> Any:
    """Load with progress; what every verb that runs a model uses."""
    from anyfp8.tools.quantize import parse_scheme

    request = Request(
        backend=backend,
        strict=backend is not None,
        force_weight_only=weight_only or None,
        emulate=emulate,
    )
    with console.progress(title) as shown:
        return load(
            path,
            device=device,
            scheme=None if scheme is None else parse_scheme(scheme),
            request=request,
            dynamic_fallback=dynamic_fallback,
            progress=lambda done, total: shown.step(done, f"of {total}"),
        )


def serving(model: torch.nn.Module) -> list[str]:
    """One line a kind of layer: how many, which scheme, which backend, and why.

    A line speaks of one row (decode) and of 512 (prefill), separately where their backends differ.
    """
    kinds: Counter[tuple[str, str, str]] = Counter()
    for module in model.modules():
        if isinstance(module, Fp8Linear):
            plan = module.plan()
            one, many = (_served(plan.choice(m), plan.problem.x_dtype) for m in (1, 512))
            kinds[module.scheme.name, one, many] += 1
    lines = []
    for (scheme, one, many), count in kinds.items():
        served = one if one == many else f"{one} at M=1, {many} at M=512"
        lines.append(f"{console.counted(count, 'layer')} {scheme}: {served}")
    return lines or ["no FP8 layers: this model runs in 16 bits"]


def _served(choice: Choice, x_dtype: str) -> str:
    how = "activations quantized" if choice.quantizes else "activations in 16 bits"
    if isinstance(choice.config, DequantConfig) and choice.quantizes:
        how = "FP8 units emulated in fp32: activations quantized"
    elif isinstance(choice.config, DequantConfig):
        once = choice.config.memory == "load"
        how += f", weight dequantized to {x_dtype} " + ("once at load" if once else "in each call")
    # a table's row and the ranker's estimate differ by shape: `explain` tells them apart
    why = {"ranker": "chosen by the ranker"}.get(choice.source, choice.reason)
    why = choice.source if choice.source.endswith("table") else why
    return f"{choice.backend} ({how}; {why})"


def prompt_ids(tokenizer: Any, prompt: str, raw: bool) -> torch.Tensor:
    """[1, T] int64: the prompt in the model's chat template, or as it is."""
    if not raw and getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        ids = tokenizer(prompt)["input_ids"]
    if not ids:
        raise InputError("the prompt is empty", got=repr(prompt), want="some text")
    return torch.tensor([ids], dtype=torch.int64)


class _Clock:
    """A streamer for `generate` that notes when each token arrived; the prompt arrives first."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def generate(
    model: Any, ids: torch.Tensor, max_tokens: int, stop: set[int]
) -> tuple[list[int], float]:
    """Greedy decoding.

    Args:
        ids: [1, T] int64, the prompt. stop: tokens that end the text.

    Returns:
        The new tokens without the one that stopped it, and decoded tokens per second (the first
        token comes out of the prompt pass and does not count); 0 for fewer than two tokens.
    """
    from transformers import GenerationConfig

    clock = _Clock()
    ends = sorted(stop)
    config = GenerationConfig(
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0,
    )
    where = next(model.parameters()).device
    with torch.inference_mode():
        out = model.generate(
            ids.to(where),
            attention_mask=torch.ones_like(ids, device=where),
            generation_config=config,
            streamer=clock,
        )
    tokens = out[0, ids.shape[1] :].tolist()
    times = clock.times[1:]
    speed = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 0.0
    return tokens[:-1] if tokens and tokens[-1] in stop else tokens, speed


def stop_tokens(model: Any, tokenizer: Any) -> set[int]:
    """Every token that ends a text, by the generation config, the config and the tokenizer."""
    found: set[int] = set()
    for owner in (getattr(model, "generation_config", None), model.config, tokenizer):
        ids = getattr(owner, "eos_token_id", None)
        found |= set(ids) if isinstance(ids, (list, tuple)) else {ids} if ids is not None else set()
    return found


def command(
    path: str,
    prompt: str,
    *,
    max_tokens: int,
    scheme: str | None,
    raw: bool,
    device: str | None,
    emulate: str | None,
    dynamic_fallback: bool,
    backend: str | None,
    as_json: bool,
) -> None:
    """The verb: text on stdout; on stderr which kernel serves which layers, and the speed."""
    if max_tokens < 1:
        raise InputError("--max-tokens is too small", got=str(max_tokens), want="at least 1")
    emulated = emulation(emulate)
    tokenizer = load_tokenizer(path)
    ids = prompt_ids(tokenizer, prompt, raw)
    model = load_model(
        path,
        device=device,
        scheme=scheme,
        emulate=emulated,
        backend=backend,
        dynamic_fallback=dynamic_fallback,
        title=f"loading {path}",
    )
    lines = serving(model)
    for line in lines:
        console.talk(line)
    tokens, speed = generate(model, ids, max_tokens, stop_tokens(model, tokenizer))
    text = tokenizer.decode(tokens, skip_special_tokens=True).strip()
    if as_json:
        found = {"text": text, "tokens": len(tokens), "prompt_tokens": ids.shape[1]}
        console.data_json(found | {"tokens_per_second": speed, "layers": lines})
        return
    console.data(text)
    where = next(model.parameters()).device
    console.talk(f"{len(tokens)} tokens, {speed:.1f} tokens/s on {where}")
