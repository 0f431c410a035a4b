"""Explanation → lines for a person, or plain data for `--json`."""

from __future__ import annotations

import re
from typing import Any

from anyfp8 import fp8
from anyfp8.select import Choice
from anyfp8.tools import console, measured
from anyfp8.tools.explain import Explanation, Kind, Run

_ROW = re.compile(r"the row of M=(\d+)(.*) says (\w+)")


def lines(found: Explanation) -> list[str]:
    """The explanation for a person; fits 80 columns but for long names and sentences."""
    device, model = found.device, found.model
    out = [f"{model.title} on {device.name} ({device.arch.name})"]
    out += [f"  {note}" for note in (*facts(found), found.tables)]
    if model.kv_cache:
        out.append(f"  KV cache {model.kv_cache}: {_kv_sentence(found)}")
    out.append("")
    runs = [run for kind in found.kinds for run in kind.runs]
    wide = [max(len(text(run)) for run in runs) for text in (_span, _backend, times)]
    for kind in found.kinds:
        layer = kind.layer
        bias = ", bias" if layer.bias else ""
        out.append(f"{kind.name}  {layer.n}x{layer.k}{bias}  {layer.scheme.name}  x{kind.count}")
        for run in kind.runs:
            left = f"  {_span(run):<{wide[0]}}  {_backend(run):<{wide[1]}}"
            out.append(f"{left}  {times(run):>{wide[2]}}  {source_of(run)}")
            config = config_of(run.choice)
            if config:
                out.append(f"    {config}")
            if run.resources is not None:
                out.append(f"    {run.resources}")
    out += ["", *_totals(found)]
    return [*out, *errors_of(found), *_refused_lines(found)]


def facts(found: Explanation) -> list[str]:
    """What holds for all layers: the arithmetic, and the sizes."""
    weights = console.size(sum(k.count * k.layer.n * k.layer.k for k in found.kinds))
    count = sum(kind.count for kind in found.kinds)
    memory = found.device.memory_bytes
    of = f" of {memory / 1e9:.0f} GB" if memory else ""
    layers = console.counted(count, "FP8 layer")
    out = [f"{layers}, {weights}{of}"]
    for text in dict.fromkeys(_arithmetic(k, r) for k in found.kinds for r in k.runs):
        out.append(text)
    if any(r.choice.quantizes for kind in found.kinds for r in kind.runs):
        how = fp8.encoding_for(fp8.E4M3FN, cuda_capability=found.device.capability)
        out.append(f"activations become FP8 by {how.how} code: {how.reason}")
    return out


def _arithmetic(kind: Kind, run: Run) -> str:
    choice = run.choice
    if not choice.quantizes:
        return "weight-only: activations stay in 16 or 32 bits, sums in fp32"
    how = {
        "fast": "sums in the FP8 units' own accumulator",
        "fp32_128": "sums promoted to fp32 every 128 of K",
    }[choice.accumulate]
    return f"W8A8: activations quantized per {kind.layer.scheme.activation}, {how}"


def _kv_sentence(found: Explanation) -> str:
    if found.trouble is not None:
        return "refused here, see below"
    names = [scale.name_in("sglang") for scale in found.model.kv]
    if not names:
        return "the checkpoint has no k_scale and v_scale: engines take 1"
    return f"{console.counted(len(names), 'scale')}; SGLang and vLLM call the first {names[0]}"


def _span(run: Run) -> str:
    ms = run.ms
    return f"M={ms[0]}" if len(ms) == 1 else f"M={ms[0]}..{ms[-1]}"


def _backend(run: Run) -> str:
    return run.choice.backend


def times(run: Run) -> str:
    known = [us for us in run.us if us is not None]
    if not known:
        return "µs unknown"
    low, high = f"{min(known):.1f}", f"{max(known):.1f}"
    how = {"no": " est.", "product": " part est.", "yes": ""}[run.measured]
    return f"{low if low == high else f'{low}..{high}'} µs{how}"


def source_of(run: Run) -> str:
    """Where a decision came from, in few words."""
    choice = run.choice
    if choice.source == "ranker":
        return choice.source
    reasons = [one.reason for one in run.choices]
    rows = [row for row in map(_ROW.fullmatch, reasons) if row is not None]
    low, high = (rows[0][1], rows[-1][1]) if len(rows) == len(reasons) else ("", "")
    if low != high:
        return f"{choice.source}: the rows of M={low} to {high}{rows[0][2]} say {rows[0][3]}"
    return f"{choice.source}: {choice.reason}"


def config_of(choice: Choice) -> str:
    """The configuration that a kernel is launched with, as field=value."""
    fields = choice.config.to_dict()
    if fields.get("how") == "chunked":
        return "how=chunked: dequantized a part at a time, multiplied by torch"
    return " ".join(f"{key}={value}" for key, value in fields.items())


def figure(value: float) -> str:
    """Three digits, without an exponent."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 0.095 else 4
    return f"{value:.{digits}f}"


def _totals(found: Explanation) -> list[str]:
    rows = []
    for m in found.ms:
        us = found.forward_us(m)
        if us is not None:
            rows.append([str(m), figure(us / 1e3), figure(us / m)])
    if not rows and not found.estimated:
        return ["no sum: not every layer was measured at one of these M", ""]
    if not rows:
        return [f"no estimate: the figures of {found.device.name} are not known", ""]
    header = ["M", "ms for all linears", "µs a token"]
    return [*console.table(header, rows, left=0).splitlines(), ""]


def errors_of(found: Explanation) -> list[str]:
    """The known error of the estimates shown."""
    shown = {
        r.choice.backend for k in found.kinds for r in k.runs if r.measured == "no" and any(r.us)
    }
    known = {error.backend: str(error) for error in measured.errors()}
    return [
        f"estimates of {known[name]}"
        if name in known
        else f"estimates of {name}: not compared with measurements yet"
        for name in sorted(shown)
    ]


def _refused_lines(found: Explanation) -> list[str]:
    if not found.refused:
        return []
    out = ["refused, because it"]
    for backend, why, names in found.refused:
        some = "" if len(names) == len(found.kinds) else f" (for {', '.join(names)})"
        out.append(f"  {backend:<16}{why}{some}")
    return out


def to_dict(found: Explanation) -> dict[str, Any]:
    """The explanation as plain data; docs/schemas/explain.json is its schema."""
    device = found.device
    return {
        "model": found.model.title,
        "device": {
            "name": device.name,
            "arch": device.arch.name,
            "fp8": device.arch.fp8,
            "source": device.source,
        },
        "notes": [*found.model.notes, *facts(found)],
        "tables": found.tables,
        "kv_cache": found.model.kv_cache,
        "kv_scales": [
            {"tensor": s.tensor, "sglang": s.name_in("sglang"), "vllm": s.name_in("vllm")}
            for s in found.model.kv
        ],
        "left_in_16_bits": list(found.model.left),
        "layers": [
            {
                "name": kind.name,
                "count": kind.count,
                "scheme": kind.layer.scheme.name,
                "n": kind.layer.n,
                "k": kind.layer.k,
                "bias": kind.layer.bias,
                "runs": [_run_dict(run) for run in kind.runs],
            }
            for kind in found.kinds
        ],
        "forward_us": {str(m): found.forward_us(m) for m in found.ms},
        "estimate_errors": errors_of(found),
        "refused": [
            {"backend": backend, "because_it": why, "layers": list(names)}
            for backend, why, names in found.refused
        ],
        "trouble": None if found.trouble is None else str(found.trouble),
    }


def _run_dict(run: Run) -> dict[str, Any]:
    choice = run.choice
    return {
        "m": list(run.ms),
        "backend": choice.backend,
        "config": choice.config.to_dict(),
        "source": choice.source,
        "reason": choice.reason,
        "provenance": choice.provenance,
        "accumulate": choice.accumulate,
        "numerics": choice.numerics,
        "quantizes": choice.quantizes,
        "us": list(run.us),
        "measured": run.measured,
        "compiled": None if run.resources is None else str(run.resources),
        "fits": None if run.resources is None else run.resources.fits,
    }
