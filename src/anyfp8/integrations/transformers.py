"""checkpoint → transformers model with FP8 linears.

The model is built on meta from its config, its quantized linears become `Fp8Linear`, and tensors
stream in from memory-mapped shards: the peak is the model plus two tensors, never a second model.

The surprise: plain `from_pretrained` does not know ModelOpt files. It warns, casts the FP8 codes to
16 bits without their scales and answers with garbage (a perplexity of 25 million on SmolLM2-135M).
"""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from anyfp8 import reference
from anyfp8.checkpoint import Checkpoint, open_checkpoint
from anyfp8.checkpoint.rules import Rule
from anyfp8.checkpoint.sources import Source, is_quantized, open_source
from anyfp8.errors import CheckpointError, InputError, MissingPackage
from anyfp8.linear import Fp8Linear
from anyfp8.linear.convert import linears
from anyfp8.problem import QTensor, Scheme
from anyfp8.select import Request

log = logging.getLogger(__name__)

Step = Callable[[int, int], None]

# written by old tools into 16-bit checkpoints; every model computes them
_COMPUTED = (r"rotary_emb\.inv_freq$", r"\.attn\.masked_bias$", r"\.attn\.bias$")


def load(
    path: str | Path,
    *,
    scheme: Scheme | str | None = None,
    exclude: Iterable[str] = ("lm_head",),
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    request: Request | None = None,
    emulate: bool = False,
    progress: Step | None = None,
) -> Any:
    """Load a checkpoint as a transformers causal language model.

    Args:
        path: an FP8 checkpoint folder; or a 16-bit one or a GGUF file, which stays in 16 bits
            unless
            `scheme` says how to quantize it while loading.
        scheme: a dynamic or weight-only scheme, for 16-bit checkpoints only.
        exclude: linears that `scheme` leaves in 16 bits.
        device: where to put the model; a GPU if there is one, else the CPU.
        dtype: of activations and unquantized weights; the checkpoint's own by default.
        request: what to ask of the selection for every layer.
        emulate: on devices without FP8 units, compute what those would (activations quantized as
            the checkpoint says) instead of running weight-only.
        progress: called with (layers loaded, layers in all).

    Returns:
        The model in eval mode; every quantized linear is an `Fp8Linear`, prepared.

    Raises:
        CheckpointError: the files are not consistent, or do not fit the model's architecture.
        InputError: `scheme` with an FP8 checkpoint, or one that needs calibration; no such device.
    """
    device = usable_device(device)
    request = request or Request(emulate=emulate)
    if is_quantized(path):
        if scheme is not None:
            raise InputError(
                f"{path} is an FP8 checkpoint already",
                got=f"scheme={scheme}",
                want="scheme=None",
                hint="quantize its 16-bit original to get another scheme",
            )
        checkpoint = open_checkpoint(path)
        model = skeleton(checkpoint.plan.config, dtype)
        _fill_quantized(model, checkpoint, device, request, progress)
        folder: Path | None = Path(path)
    else:
        source = open_source(path)
        model = skeleton(source.config, dtype)
        _fill_source(model, source, _parsed(scheme), list(exclude), device, request, progress)
        folder = Path(path) if Path(path).is_dir() else None
    _finish(model, folder, device)
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


def _fill_quantized(
    model: Any, checkpoint: Checkpoint, device: torch.device, request: Request, step: Step | None
) -> None:
    layers = checkpoint.plan.layers
    for name, plan in layers.items():
        _replace(model, name, plan.scheme, (plan.n, plan.k), plan.bias is not None, request)
    for done, name in enumerate(layers, 1):
        found = checkpoint.layer(name)
        _load_layer(
            model.get_submodule(name),
            found.weight,
            found.input_scale,
            found.bias,
            device,
            found.extras,
        )
        if step:
            step(done, len(layers))
    for name in checkpoint.plan.plain:
        _place(model, name, checkpoint.tensor(name), device)


def _fill_source(
    model: Any,
    source: Source,
    scheme: Scheme | None,
    exclude: list[str],
    device: torch.device,
    request: Request,
    step: Step | None,
) -> None:
    chosen: set[str] = set()
    if scheme is not None:
        chosen = set(linears(model, exclude)[0])
        if not chosen:
            raise InputError(
                "no linear layer to quantize", got=f"exclude={exclude}", want="at least one"
            )
    names = list(source.specs)
    for done, name in enumerate(names, 1):
        module, _, leaf = name.rpartition(".")
        if module in chosen and leaf == "weight":
            assert scheme is not None
            w = source.tensor(name)
            biased = getattr(model.get_submodule(module), "bias", None) is not None
            bias = source.tensor(f"{module}.bias") if biased else None
            _replace(model, module, scheme, (w.shape[0], w.shape[1]), biased, request)
            q = reference.quantize_weight(w.to(device), scheme)
            _load_layer(model.get_submodule(module), q, None, bias, device, {})
        elif not (module in chosen and leaf == "bias"):
            _place(model, name, source.tensor(name), device)
        if step:
            step(done, len(names))


def _replace(
    model: Any, name: str, scheme: Scheme, shape: tuple[int, int], bias: bool, request: Request
) -> None:
    module = _submodule(model, name)
    n, k = shape
    weight = getattr(module, "weight", None) if isinstance(module, torch.nn.Linear) else None
    if weight is None or tuple(weight.shape) != shape:
        found = "no such module" if module is None else repr(module)
        raise CheckpointError(
            f"the quantized layer {name} has no place in {type(model).__name__}",
            got=found,
            want=f"a linear of {n}x{k}",
            hint="config.json and the weights may be of different models",
        )
    layer = Fp8Linear(k, n, scheme, bias=bias, dtype=model.dtype, device="meta", request=request)
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent) if parent else model, leaf, layer.eval())


def _submodule(model: Any, name: str) -> Any | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def _load_layer(
    layer: Any,
    weight: QTensor,
    input_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    device: torch.device,
    extras: dict[str, torch.Tensor],
) -> None:
    def there(t: torch.Tensor | None) -> torch.Tensor | None:
        return None if t is None else t.to(device)

    moved = QTensor(weight.codes.to(device), weight.scale.to(device), weight.block, weight.fmt)
    layer.load(
        moved,
        input_scale=there(input_scale),
        bias=there(bias),
        extras={name: value.to(device) for name, value in extras.items()},
    )
    layer.prepare()


def _place(model: Any, name: str, value: torch.Tensor, device: torch.device) -> None:
    """Put an unquantized tensor where the model has it on meta."""
    module, _, leaf = name.rpartition(".")
    owner = _submodule(model, module)
    old = None if owner is None else owner._parameters.get(leaf, owner._buffers.get(leaf))
    if owner is None or old is None:
        ignored = (*_COMPUTED, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()))
        if any(re.search(pattern, name) for pattern in ignored):
            return
        raise CheckpointError(
            f"the tensor {name} has no place in {type(model).__name__}",
            got=f"shape {tuple(value.shape)}",
            want="only tensors that the model has",
            hint="config.json and the weights may be of different models",
        )
    if old.shape != value.shape:
        raise CheckpointError(
            f"the tensor {name} does not fit {type(model).__name__}",
            got=f"shape {tuple(value.shape)}",
            want=f"{tuple(old.shape)}",
            hint="config.json and the weights may be of different models",
        )
    moved = value.to(device=device, dtype=old.dtype if value.is_floating_point() else None)
    if leaf in owner._parameters:
        owner._parameters[leaf] = torch.nn.Parameter(moved, requires_grad=False)
    else:
        owner._buffers[leaf] = moved


def _finish(model: Any, folder: Path | None, device: torch.device) -> None:
    model.tie_weights()
    empty = [name for name, p in model.named_parameters() if p.device.type == "meta"]
    if empty:
        raise CheckpointError(
            f"the checkpoint does not fill {type(model).__name__}",
            got=f"{len(empty)} parameters are missing: " + ", ".join(empty[:3]),
            want="a tensor for every parameter",
            hint="the download may be incomplete",
        )
    for module in model.modules():
        if not isinstance(module, Fp8Linear):
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)
    model.requires_grad_(False)
    if folder is not None and (folder / "generation_config.json").is_file():
        transformers = _transformers()
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)


def _parsed(scheme: Scheme | str | None) -> Scheme | None:
    scheme = Scheme.parse(scheme) if isinstance(scheme, str) else scheme
    if scheme is not None and scheme.activation == "tensor" and not scheme.dynamic:
        raise InputError(
            f"{scheme.name} needs calibration and cannot be made while loading",
            want="a dynamic or weight-only scheme, such as w8a8-channel-token or w8a16-channel",
            hint="anyfp8 quantize calibrates and writes a checkpoint",
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
