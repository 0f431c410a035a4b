"""input_scale = amax(|x|) / 448 over calibration tokens: static scales by watching a 16-bit model.

A forward pre-hook on every linear keeps the largest finite magnitude of its input; nothing else is
stored, so calibration costs the model and one set of activations. ModelOpt and llm-compressor
calibrate static FP8 the same way by default ("max").

The surprise: a linear that the text never reaches (an expert, an unused head) has no scale. That
    is an error naming it, not a scale of zero.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

import torch

from anyfp8 import reference
from anyfp8.errors import CalibrationError

log = logging.getLogger(__name__)


def input_amax(
    model: torch.nn.Module,
    modules: Mapping[str, torch.nn.Module],
    batches: Iterable[torch.Tensor],
    progress: Callable[[int], None] | None = None,
) -> dict[str, float]:
    """Largest finite input magnitude of each module while the model reads the batches.

    Args:
        model: called as `model(input_ids)`; runs without gradients, in eval mode.
        modules: name -> submodule of `model` to watch.
        batches: token ids, each [B, T] int64 on the model's device.
        progress: called with the number of batches done.

    Returns:
        name -> amax. A name is absent when its module never ran.
    """
    seen: dict[str, torch.Tensor] = {}
    broken: set[str] = set()

    def watch(name: str):
        def hook(_module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            x = args[0].detach()
            amax = x.abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)
            if not bool(amax.isfinite()):
                broken.add(name)
                amax = reference.finite_amax(x)
            seen[name] = torch.maximum(seen[name], amax) if name in seen else amax

        return hook

    handles = [m.register_forward_pre_hook(watch(name)) for name, m in modules.items()]
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            for done, batch in enumerate(batches, 1):
                model(batch)
                if progress:
                    progress(done)
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    if broken:
        log.warning("inf or NaN in the calibration input of %s", ", ".join(sorted(broken)[:5]))
    return {name: float(amax) for name, amax in seen.items()}


def input_scales(
    model: torch.nn.Module,
    modules: Mapping[str, torch.nn.Module],
    batches: Iterable[torch.Tensor],
    progress: Callable[[int], None] | None = None,
) -> dict[str, float]:
    """Static scales for `modules`: amax / 448 each. Arguments as for `input_amax`.

    Raises:
        CalibrationError: a module never ran, or its input was zero throughout; names up to five.
    """
    amax = input_amax(model, modules, batches, progress)
    missing = [name for name in modules if name not in amax]
    zero = [name for name, value in amax.items() if value == 0.0]
    if missing or zero:
        kind, names = ("never ran", missing) if missing else ("saw only zeros", zero)
        raise CalibrationError(
            f"no input scale for {len(names)} of {len(modules)} linear layers",
            got=f"{kind}: " + ", ".join(names[:5]) + (", ..." if len(names) > 5 else ""),
            want="every quantized linear sees nonzero input during calibration",
            hint="calibrate on more text, exclude these layers, or use a dynamic scheme",
        )
    return {
        name: float(reference.scale_of(torch.tensor(value, dtype=torch.float32)))
        for name, value in amax.items()
    }
