"""Other weights into a model that is loaded: all of them, or the old ones stay.

Engines that train and serve in turns (RL), that sleep and wake, or that swap a model's version
reload without building anything again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from anyfp8.checkpoint import Checkpoint, open_checkpoint
from anyfp8.errors import CheckpointError
from anyfp8.integrations.filling import Step, fill_quantized
from anyfp8.integrations.fitting import fitted
from anyfp8.integrations.parallel import Parallel
from anyfp8.integrations.saving import origin_of
from anyfp8.linear import Fp8Linear


def reload(model: Any, path: str | Path, *, progress: Step | None = None) -> None:
    """Load other weights of the same architecture and schemes into a loaded model, in place.

    Everything in the new checkpoint is read and checked before anything in the model changes: a
    reload that fails leaves the old weights.

    Args:
        model: of `load`; its layers stay prepared.
        path: an FP8 checkpoint folder.
        progress: called with (layers loaded, layers in all).

    Raises:
        CheckpointError: the files are not consistent, or hold other layers than the model.
    """
    checkpoint = fitted(model, open_checkpoint(path))
    plan = checkpoint.plan
    origin = origin_of(model)
    parallel = origin.parallel if origin is not None else None
    own = {name: m for name, m in model.named_modules() if isinstance(m, Fp8Linear)}
    _check_same(model, own, checkpoint, parallel)
    for name in plan.layers:
        # reads every byte: NaN codes are an error here, not in a model half changed
        checkpoint.layer(name)
    device = next(iter(own.values())).device
    fill_quantized(model, checkpoint, parallel, device, progress)
    model.tie_weights()


def _check_same(
    model: Any, own: dict[str, Fp8Linear], checkpoint: Checkpoint, parallel: Parallel | None
) -> None:
    plan = checkpoint.plan
    differ = sorted(own.keys() ^ plan.layers.keys())
    if differ or not own:
        raise CheckpointError(
            f"{plan.path.name} holds other FP8 layers than the model",
            got=", ".join(differ[:3]) or "none",
            want="the same layers",
            hint="load() it as a new model",
        )
    for name, layer in plan.layers.items():
        scheme = layer.scheme if parallel is None else parallel.scheme(name, layer.scheme)
        shape = (layer.n, layer.k) if parallel is None else parallel.shape(name, layer.n, layer.k)
        bias = layer.bias is not None and (parallel is None or parallel.keeps_bias(name))
        module = own[name]
        wanted = (module.scheme, (module.out_features, module.in_features), module.bias is not None)
        if (scheme, shape, bias) != wanted:
            raise CheckpointError(
                f"{name} of {plan.path.name} does not fit the model",
                got=f"{scheme.name} {shape}" + " with bias" * bias,
                want=f"{wanted[0].name} {wanted[1]}" + " with bias" * wanted[2],
                hint="load() it as a new model",
            )
    values = model.state_dict()
    for name in plan.plain:
        local = checkpoint.tensor(name)
        local = local if parallel is None else parallel.tensor(name, local)
        if local is not None and name in values and values[name].shape != local.shape:
            raise CheckpointError(
                f"the tensor {name} of {plan.path.name} does not fit the model",
                got=f"shape {tuple(local.shape)}",
                want=f"{tuple(values[name].shape)}",
                hint="load() it as a new model",
            )
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    absent = [
        name
        for name in values
        if name.rpartition(".")[0] not in own and name not in plan.plain and name not in tied
    ]
    if absent:
        raise CheckpointError(
            f"{plan.path.name} does not fill the model",
            got=f"{len(absent)} tensors are missing: {', '.join(absent[:3])}",
            want="a tensor for every parameter",
            hint="load() it as a new model",
        )
