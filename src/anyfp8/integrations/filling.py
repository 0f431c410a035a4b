"""tensors → the places of a model on meta: what `load` and `reload` fill, layer by layer.

Nothing here decides anything: the plan has, and a tensor without a place is an error that names
both.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from anyfp8 import reference
from anyfp8.checkpoint import Checkpoint, LayerData, Source
from anyfp8.errors import CheckpointError, InputError
from anyfp8.integrations.fitting import submodule_of
from anyfp8.integrations.parallel import Parallel
from anyfp8.linear import Fp8Linear
from anyfp8.linear.convert import linears
from anyfp8.problem import QTensor, Scheme
from anyfp8.select import Request

Step = Callable[[int, int], None]

# written by old tools into 16-bit checkpoints; every model computes them
_COMPUTED = (r"rotary_emb\.inv_freq$", r"\.attn\.masked_bias$", r"\.attn\.bias$")


def fill_quantized(
    model: Any,
    checkpoint: Checkpoint,
    parallel: Parallel | None,
    device: torch.device,
    step: Step | None,
) -> None:
    layers = checkpoint.plan.layers
    for done, name in enumerate(layers, 1):
        if parallel is None:
            found = checkpoint.layer(name, device)
        else:
            # searched for NaN whole, so that all ranks fail or none
            found = parallel.layer(checkpoint.layer(name))
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
        _place_part(model, name, checkpoint.tensor(name), parallel, device)


def fill_source(
    model: Any,
    source: Source,
    scheme: Scheme | None,
    exclude: list[str],
    parallel: Parallel | None,
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
            q = reference.quantize_weight(w.to(device), scheme)
            part = LayerData(module, scheme, q, None, bias)
            if parallel is not None:
                # quantized whole, so that the scales are those of one rank
                q = QTensor(q.codes.cpu(), q.scale.cpu(), q.block)
                part = parallel.layer(LayerData(module, scheme, q, None, bias))
            n, k = part.weight.data.shape
            replace_linear(model, module, part.scheme, (n, k), part.bias is not None, request)
            _load_layer(model.get_submodule(module), part.weight, None, part.bias, device, {})
        elif not (module in chosen and leaf == "bias"):
            _place_part(model, name, source.tensor(name), parallel, device)
        if step:
            step(done, len(names))


def replace_linear(
    model: Any, name: str, scheme: Scheme, shape: tuple[int, int], bias: bool, request: Request
) -> None:
    module = submodule_of(model, name)
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


def _place_part(
    model: Any, name: str, value: torch.Tensor, parallel: Parallel | None, device: torch.device
) -> None:
    part = value if parallel is None else parallel.tensor(name, value)
    if part is not None:
        _place(model, name, part, device)


def _place(model: Any, name: str, value: torch.Tensor, device: torch.device) -> None:
    """Put an unquantized tensor where the model has it on meta."""
    module, _, leaf = name.rpartition(".")
    owner = submodule_of(model, module)
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


def finish(model: Any, folder: Path | None, device: torch.device) -> None:
    model.tie_weights(
        missing_keys={name for name, p in model.named_parameters() if p.device.type == "meta"}
    )
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
        transformers: Any = import_module("transformers")
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
