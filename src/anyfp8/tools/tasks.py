"""A loaded model → its scores in tasks such as GSM8K, by lm-eval.

lm-eval (EleutherAI's evaluation harness) asks, prompts and scores; it drives the model that `load`
made, FP8 layers and all. It fetches a task's questions from the Hugging Face hub.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from anyfp8.errors import InputError, MissingPackage
from anyfp8.integrations.transformers import load_tokenizer
from anyfp8.tools import console
from anyfp8.tools.run import emulation, load_model, serving


@dataclass(frozen=True)
class Score:
    """One metric of one task.

    Attributes:
        metric: lm-eval's name, such as "exact_match (strict-match)".
        value: of the FP8 model; error: its standard error, None where there is none.
        source_value: of the 16-bit model, None without one.
    """

    task: str
    metric: str
    value: float
    error: float | None
    source_value: float | None = None


def require() -> tuple[Any, Any, Any]:
    """lm-eval's evaluation, its list of tasks, and its wrapper of a transformers model.

    Raises:
        MissingPackage: lm-eval is not installed.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise MissingPackage(
            "tasks are scored by lm-eval",
            got=str(error),
            want="the package lm-eval, 0.4.13 or later",
            hint="pip install 'anyfp8[eval]'",
        ) from error
    return simple_evaluate, TaskManager, HFLM


def scores(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[str],
    limit: int | None = None,
    source: Any | None = None,
) -> list[Score]:
    """Score a model, and its 16-bit original beside it.

    Args:
        tasks: lm-eval's names. limit: questions of each task, None for all.

    Raises:
        MissingPackage: lm-eval is not installed.
        InputError: no such task.
    """
    found = _results(model, tokenizer, tasks, limit)
    beside = {} if source is None else _results(source, tokenizer, tasks, limit)
    out = []
    for (task, metric), value in found.items():
        if not metric.partition(",")[0].endswith("_stderr"):
            name, _, how = metric.partition(",")
            shown = name if how in ("", "none") else f"{name} ({how})"
            error = found.get((task, f"{name}_stderr,{how}"))
            out.append(Score(task, shown, value, error, beside.get((task, metric))))
    return out


def _results(
    model: Any, tokenizer: Any, tasks: Sequence[str], limit: int | None
) -> dict[tuple[str, str], float]:
    """(task, metric) -> value, as lm-eval names them; what is no figure is left out."""
    evaluate, task_list, wrapper = require()
    manager = task_list()
    unknown = [t for t in tasks if not t.endswith(".yaml") and not manager.match_tasks([t])]
    if unknown:
        raise InputError(
            "lm-eval has no such task",
            got=", ".join(unknown),
            want="names such as gsm8k, arc_challenge, hellaswag, or a task's YAML file",
            hint="lm-eval ls tasks lists them",
        )
    wrapped = wrapper(pretrained=model, tokenizer=tokenizer, batch_size=1)
    found = evaluate(
        wrapped, tasks=list(tasks), limit=limit, log_samples=False, task_manager=manager
    )
    return {
        (task, metric): float(value)
        for task, entry in found["results"].items()
        for metric, value in entry.items()
        if isinstance(value, (int, float)) and metric != "sample_len"
    }


def command(
    path: str,
    *,
    tasks: str,
    limit: int | None,
    source: str | None,
    scheme: str | None,
    device: str | None,
    emulate: str | None,
    dynamic_fallback: bool,
    as_json: bool,
) -> None:
    """`anyfp8 eval --tasks`: a line for each metric of each task."""
    names = [name for name in tasks.split(",") if name]
    if not names or (limit is not None and limit < 1):
        raise InputError(
            "nothing to score",
            got=f"--tasks {tasks!r} --limit {limit}",
            want="at least one task, and one question of it",
        )
    # before minutes of loading
    require()
    tokenizer = load_tokenizer(path)
    model = load_model(
        path,
        device=device,
        scheme=scheme,
        emulate=emulation(emulate),
        dynamic_fallback=dynamic_fallback,
        title=f"loading {path}",
    )
    original = None
    if source is not None:
        original = load_model(source, device=device, title=f"loading {source}")
    served = serving(model)
    for line in served:
        console.talk(line)
    with console.progress(f"scoring {', '.join(names)}"):
        found = scores(model, tokenizer, names, limit, original)
    if as_json:
        console.data_json({"scores": [asdict(one) for one in found], "served": served})
        return
    header = ["task", "metric", "FP8", "±", "16 bits"]
    rows = [
        [one.task, one.metric, f"{one.value:.4f}", _figure(one.error), _figure(one.source_value)]
        for one in found
    ]
    console.data(console.table(header, rows, left=2))


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
