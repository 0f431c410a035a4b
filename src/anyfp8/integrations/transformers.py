"""checkpoint → transformers model with FP8 linears.

The model is built on meta from its config, its quantized linears become `Fp8Linear`, and tensors
stream in from memory-mapped shards: the peak is the model plus two tensors, never a second model.

The surprise: plain `from_pretrained` does not know ModelOpt files. It warns, casts the FP8 codes to
16 bits without their scales and answers with garbage (a perplexity of 25 million on SmolLM2-135M).
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from anyfp8.checkpoint import open_checkpoint
from anyfp8.checkpoint.kv_cache import kv_cache_refusal
from anyfp8.checkpoint.rules import Rule
from anyfp8.checkpoint.sources import HfSource, is_quantized, open_source
from anyfp8.device import device_of
from anyfp8.errors import CheckpointError, InputError, MissingPackage
from anyfp8.integrations.experts import place_experts
from anyfp8.integrations.filling import (
    Step,
    fill_quantized,
    fill_source,
    finish,
    replace_linear,
)
from anyfp8.integrations.fitting import fitted, untied
from anyfp8.integrations.parallel import Parallel, add_sums, group_of, share_out
from anyfp8.integrations.reloading import reload
from anyfp8.integrations.saving import Origin, save, set_origin
from anyfp8.linear.convert import linears
from anyfp8.problem import Scheme
from anyfp8.select import Request

__all__ = ["load", "load_tokenizer", "quantizable", "reload", "save", "skeleton", "usable_device"]

log = logging.getLogger(__name__)


def load(
    path: str | Path,
    *,
    scheme: Scheme | str | None = None,
    exclude: Iterable[str] = ("lm_head",),
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    request: Request | None = None,
    emulate: bool = False,
    tp: Any = None,
    dynamic_fallback: bool = False,
    progress: Step | None = None,
) -> Any:
    """Load a checkpoint as a transformers causal language model.

    Args:
        path: an FP8 checkpoint folder; or a 16-bit one or a GGUF file, which stays in 16 bits
            unless `scheme` says how to quantize it while loading.
        scheme: a dynamic or weight-only scheme, for 16-bit checkpoints only.
        exclude: linears that `scheme` leaves in 16 bits.
        device: where to put the model; a GPU if there is one, else the CPU.
        dtype: of activations and unquantized weights; the checkpoint's own by default.
        request: what to ask of the selection for every layer.
        emulate: on devices without FP8 units, compute what those would (activations quantized as
            the checkpoint says) instead of running weight-only.
        tp: ranks of tensor parallelism: their number, True for all processes of
            torch.distributed (torchrun starts them), or a process group. Every rank calls `load`
            and the model, which then computes the same on each; None is a whole model.
        dynamic_fallback: quantize activations dynamically, with a warning, where the static scale
            of an FP8 checkpoint is absent or unusable.
        progress: called with (layers loaded, layers in all).

    Returns:
        The model in eval mode; every quantized linear is an `Fp8Linear`, prepared.

    Raises:
        CheckpointError: the files are not consistent, or do not fit the model's architecture.
        InputError: `scheme` with an FP8 checkpoint, or one that needs calibration; no such device.
    """
    group = None if tp is None else group_of(tp, torch.cuda.is_available())
    if group is not None and device is None and torch.cuda.is_available():
        device = f"cuda:{torch.distributed.get_rank() % torch.cuda.device_count()}"
    device = usable_device(device)
    request = request or Request(emulate=emulate)
    parallel: Parallel | None = None
    optional: dict[str, torch.Tensor] = {}
    kv_cache = ""
    if is_quantized(path):
        if scheme is not None:
            raise InputError(
                f"{path} is an FP8 checkpoint already",
                got=f"scheme={scheme}",
                want="scheme=None",
                hint="quantize its 16-bit original to get another scheme",
            )
        checkpoint = open_checkpoint(path, dynamic_fallback=dynamic_fallback)
        plan = checkpoint.plan
        for warning in plan.warnings:
            log.warning("%s: %s", plan.path.name, warning)
        refusal = kv_cache_refusal(plan.kv_cache, device_of(device))
        if refusal is not None:
            log.warning("%s; here it is kept in 16 bits", refusal.what)
        config, kv_cache = untied(plan.config, plan.files), plan.kv_cache
        model = skeleton(config, dtype)
        place_experts(model, plan.files.tensors)
        checkpoint = fitted(model, checkpoint)
        plan = checkpoint.plan
        parallel = share_out(model, group) if group is not None else None
        for name, layer in plan.layers.items():
            place = (
                (layer.n, layer.k) if parallel is None else parallel.shape(name, layer.n, layer.k)
            )
            scheme_ = layer.scheme if parallel is None else parallel.scheme(name, layer.scheme)
            bias = layer.bias is not None and (parallel is None or parallel.keeps_bias(name))
            replace_linear(model, name, scheme_, place, bias, request)
        fill_quantized(model, checkpoint, parallel, device, progress)
        optional = {name: checkpoint.tensor(name) for name in plan.optional}
        folder: Path | None = Path(path)
    else:
        source = open_source(path)
        config = source.config
        if isinstance(source, HfSource):
            config = untied(config, source.plan.files)
        model = skeleton(config, dtype)
        place_experts(model, source.specs)
        parallel = share_out(model, group) if group is not None else None
        parsed = _parsed(scheme)
        fill_source(model, source, parsed, list(exclude), parallel, device, request, progress)
        folder = Path(path) if Path(path).is_dir() else None
    finish(model, folder, device)
    if parallel is not None:
        add_sums(model, parallel)
    kept = {k: v for k, v in config.items() if k != "quantization_config"}
    set_origin(model, Origin(folder, kept, kv_cache, optional, parallel))
    return model


def usable_device(device: torch.device | str | None) -> torch.device:
    """A device that torch can use; None is a GPU if there is one, else the CPU.

    Raises:
        InputError: no such device here.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        raise InputError("not a device", got=str(device), want="cpu, cuda or cuda:N") from error
    if wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"there is no device {device}",
            got=f"{torch.cuda.device_count()} CUDA devices",
            want="cpu, or a GPU that torch sees",
            hint="anyfp8 doctor says which GPUs torch sees here",
        )
    return wanted


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer of a checkpoint folder or a GGUF file.

    Raises:
        CheckpointError: there is none, or transformers cannot read it.
    """
    transformers = _transformers()
    path = Path(path)
    try:
        if path.is_dir():
            return transformers.AutoTokenizer.from_pretrained(path)
        with tempfile.TemporaryDirectory() as folder:
            open_source(path).write_sidecars(Path(folder))
            return transformers.AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"no tokenizer in {path}",
            got=str(error).splitlines()[0],
            want="tokenizer.json and tokenizer_config.json",
            hint="copy them from the original model",
        ) from error


def skeleton(config: Any, dtype: torch.dtype | None = None) -> Any:
    """A causal language model without storage for its parameters; buffers are real.

    Args:
        config: config.json as a dict; its quantization_config is left aside.
        dtype: of the parameters, else the config's, else bf16.
    """
    transformers = _transformers()
    from accelerate import init_empty_weights

    fields = {k: v for k, v in dict(config).items() if k != "quantization_config"}
    kind = fields.pop("model_type", None)
    try:
        parsed = transformers.AutoConfig.for_model(kind, **fields)
        wanted = dtype or parsed.dtype or torch.bfloat16
        if isinstance(wanted, str):
            wanted = getattr(torch, wanted)
        with init_empty_weights(include_buffers=False):
            model = transformers.AutoModelForCausalLM.from_config(parsed, dtype=wanted)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"transformers {transformers.__version__} cannot build this model",
            got=f"model_type {kind!r}: {str(error).splitlines()[0]}",
            want="a causal language model that it knows",
            hint="pip install -U transformers",
        ) from error
    return model.eval()


def _parsed(scheme: Scheme | str | None) -> Scheme | None:
    scheme = Scheme.parse(scheme) if isinstance(scheme, str) else scheme
    if scheme is not None and scheme.activation == "tensor" and not scheme.dynamic:
        raise InputError(
            f"{scheme.name} needs calibration and cannot be made while loading",
            want="a dynamic or weight-only scheme, such as w8a8-channel-token or w8a16-channel",
            hint="anyfp8 quantize calibrates and writes a checkpoint",
            got=f"scheme={scheme.name}",
        )
    return scheme


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise MissingPackage(
            "loading a model needs transformers",
            got=str(error),
            want="transformers 5.15 or newer",
            hint="pip install 'anyfp8[models]'",
        ) from error
    return transformers


def quantizable(model: Any, exclude: Iterable[str] = ("lm_head",)) -> list[str]:
    """Names of the linears of a skeleton or a model that `exclude` leaves to quantize."""
    rules = [Rule(pattern) for pattern in exclude]
    found = linears(model, ())[0]
    return [name for name in found if not any(rule.matches(name) for rule in rules)]
