"""anyfp8 run: load a checkpoint, say which kernels serve it, and generate text."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from anyfp8.errors import InputError
from anyfp8.linear import Fp8Linear
from anyfp8.select import Request
from anyfp8.tools import console


def emulation(value: str | None) -> bool:
    """Read `--emulate`. Raises InputError for anything but w8a8 or nothing."""
    if value not in (None, "w8a8"):
        raise InputError("--emulate cannot be read", got=value, want="w8a8")
    return value is not None


def load_model(
    path: str | Path,
    *,
    device: str | None = None,
    scheme: str | None = None,
    emulate: bool = False,
    backend: str | None = None,
    title: str = "loading",
) -> Any:
    """Load with progress; what every verb that runs a model uses."""
    from anyfp8.integrations.transformers import load
    from anyfp8.tools.quantize import parse_scheme

    request = Request(backend=backend, strict=backend is not None, emulate=emulate)
    with console.progress(title) as shown:
        return load(
            path,
            device=check_device(device),
            scheme=None if scheme is None else parse_scheme(scheme),
            request=request,
            progress=lambda done, total: shown.step(done, f"of {total}"),
        )


def check_device(device: str | None) -> str | None:
    """The device, if this torch can use it. Raises InputError otherwise."""
    if device is None:
        return None
    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        raise InputError(
            "--device cannot be read", got=device, want="cpu, cuda or cuda:N"
        ) from error
    if wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"there is no device {device}",
            got=f"{torch.cuda.device_count()} CUDA devices",
            want="cpu, or a GPU that torch sees",
        )
    return device


def serving(model: torch.nn.Module) -> list[str]:
    """One line a kind of layer: how many, which scheme, which backend, and why.

    A line speaks of one row (decode) and of 512 (prefill), separately where their backends differ.
    """
    kinds: Counter[tuple[str, ...]] = Counter()
    for module in model.modules():
        if not isinstance(module, Fp8Linear):
            continue
        plan = module.plan()
        one, many = plan.choice(1), plan.choice(512)
        parts = [module.scheme.name]
        for choice, rows in ((one, "M=1"), (many, "M=512")):
            how = "activations quantized" if choice.quantizes else "activations in 16 bits"
            parts.append(f"{choice.backend} ({how}; {rows}: {choice.reason})")
        kinds[tuple(parts)] += 1
    lines = []
    for (scheme, one, many), count in kinds.items():
        same = one.split(" (")[0] == many.split(" (")[0]
        served = one.replace("; M=1: ", "; ") if same else f"{one}, {many}"
        lines.append(f"{count} layers {scheme}: {served}")
    return lines or ["no FP8 layers: this model runs in 16 bits"]


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


def generate(
    model: Any, ids: torch.Tensor, max_tokens: int, stop: set[int]
) -> tuple[list[int], float]:
    """Greedy decoding with the model's own KV cache.

    Returns:
        The new tokens, without the one that stopped it, and the seconds after the prompt was read.
    """
    ids = ids.to(next(model.parameters()).device)
    tokens: list[int] = []
    cache = None
    start = time.perf_counter()
    with torch.inference_mode():
        for step in range(max_tokens):
            out = model(ids, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            token = int(out.logits[0, -1].argmax())
            if step == 0:
                start = time.perf_counter()
            if token in stop:
                break
            tokens.append(token)
            ids = torch.tensor([[token]], device=ids.device)
    return tokens, time.perf_counter() - start


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
    backend: str | None,
    as_json: bool,
) -> None:
    """The verb: text on stdout; on stderr which kernel serves which layers, and the speed."""
    from anyfp8.integrations.transformers import load_tokenizer

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
        title=f"loading {path}",
    )
    lines = serving(model)
    for line in lines:
        console.talk(line)
    tokens, seconds = generate(model, ids, max_tokens, stop_tokens(model, tokenizer))
    text = tokenizer.decode(tokens, skip_special_tokens=True).strip()
    # the first token comes out of the prompt pass
    speed = (len(tokens) - 1) / seconds if len(tokens) > 1 else 0.0
    if as_json:
        found = {"text": text, "tokens": len(tokens), "prompt_tokens": ids.shape[1]}
        console.data_json(found | {"tokens_per_second": speed, "layers": lines})
        return
    console.data(text)
    where = next(model.parameters()).device
    console.talk(f"{len(tokens)} tokens, {speed:.1f} tokens/s on {where}")
