"""nn.Linear → Fp8Linear in place: quantize a 16-bit model that is already in memory.

Each weight is quantized and its 16-bit tensor freed before the next one is touched. The report says
what was converted, what was left and why; a conversion that touches nothing is an error, since it
would otherwise be benchmarked as FP8.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from anyfp8 import reference
from anyfp8.checkpoint.rules import Rule
from anyfp8.errors import InputError
from anyfp8.linear.calibrate import input_scales
from anyfp8.linear.experts import fused_experts, split_experts, why_not_split
from anyfp8.linear.layer import Fp8Linear
from anyfp8.problem import Scheme
from anyfp8.select import Request

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ConvertReport:
    """What `convert` did.

    Attributes:
        scheme: name of the scheme.
        converted: names of the layers that are FP8 now.
        skipped: (name, reason) of each linear that was left.
        backends: backend -> number of layers it serves at M = 1.
        bytes_before, bytes_after: of all linears seen, as stored.
    """

    scheme: str
    converted: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]
    backends: tuple[tuple[str, int], ...]
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        total = len(self.converted) + len(self.skipped)
        served = ", ".join(f"{count} by {name}" for name, count in self.backends)
        return (
            f"{len(self.converted)} of {total} linear layers converted to {self.scheme} "
            f"({served or 'none'}); "
            f"{self.bytes_before / 1e6:.1f} -> {self.bytes_after / 1e6:.1f} MB"
        )


def linears(
    model: torch.nn.Module, exclude: Iterable[str] = ("lm_head",)
) -> tuple[dict[str, torch.nn.Linear], list[tuple[str, str]]]:
    """The linear layers of a model that FP8 can serve, and those left with the reason.

    Args:
        exclude: as in a checkpoint's ignore list, see `checkpoint.rules`.
    """
    chosen: dict[str, torch.nn.Linear] = {}
    skipped: list[tuple[str, str]] = []
    rules = [Rule(pattern) for pattern in exclude]
    for name, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, torch.nn.Linear):
            continue
        hit = next((rule.pattern for rule in rules if rule.matches(name)), None)
        if hit is not None:
            skipped.append((name, f"excluded by {hit!r}"))
        elif type(module).forward is not torch.nn.Linear.forward:
            skipped.append((name, f"{type(module).__name__} has a forward of its own"))
        elif module.weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            skipped.append((name, f"its weight is {module.weight.dtype}"))
        else:
            chosen[name] = module
    return chosen, skipped


def convert(
    model: torch.nn.Module,
    scheme: Scheme | str = "w8a8-channel-token",
    *,
    exclude: Iterable[str] = ("lm_head",),
    calib: Iterable[torch.Tensor] | None = None,
    request: Request | None = None,
    allow_none: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ConvertReport:
    """Replace the linear layers of a model by FP8 ones, in place.

    Args:
        model: a model with 16- or 32-bit `nn.Linear` layers; experts that transformers has fused
            become linears first.
        scheme: a `Scheme` or its name.
        exclude: layers to leave in 16 bits: names, globs or re:..., as in an ignore list.
        calib: token windows [B, T] int64 for static schemes, read by the model before converting.
        request: what to ask of the selection for every layer.
        allow_none: accept that nothing matched.
        progress: called with (layers done, layers in all).

    Returns:
        What was converted and what was left, with the reasons.

    Raises:
        InputError: nothing matched; a static scheme without `calib`.
        CalibrationError: a layer never ran during calibration.
    """
    scheme = Scheme.parse(scheme) if isinstance(scheme, str) else scheme
    fused = _split_all(model)
    chosen, skipped = linears(model, exclude)
    skipped += fused
    if not chosen and not allow_none:
        raise InputError(
            f"0 of {len(skipped)} linear layers would be converted",
            got="; ".join(f"{name}: {why}" for name, why in skipped[:3]) or "no nn.Linear at all",
            want="at least one nn.Linear",
            hint="change `exclude`, or pass allow_none=True",
        )
    scales: dict[str, float] = {}
    if scheme.activation == "tensor" and not scheme.dynamic and chosen:
        if calib is None:
            raise InputError(
                f"{scheme.name} needs calibration",
                got="calib=None",
                want="token windows [B, T]",
                hint="or a dynamic scheme such as w8a8-channel-token",
            )
        scales = input_scales(model, chosen, calib)
    before = after = 0
    served: dict[str, int] = {}
    shared: dict[int, Fp8Linear] = {}
    for done, (name, module) in enumerate(chosen.items(), 1):
        layer = shared.get(id(module))
        if layer is None:
            before += module.weight.numel() * module.weight.element_size()
            layer = shared[id(module)] = _layer(module, scheme, scales.get(name), request)
            layer.prepare()
            after += layer.nbytes
            backend = layer.plan().choice(1).backend
            served[backend] = served.get(backend, 0) + 1
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent) if parent else model, leaf, layer)
        if progress:
            progress(done, len(chosen))
    report = ConvertReport(
        scheme.name,
        tuple(chosen),
        tuple(skipped),
        tuple(sorted(served.items())),
        before,
        after,
    )
    log.info("%s", report)
    return report


def _split_all(model: torch.nn.Module) -> list[tuple[str, str]]:
    """Give experts linears of their own; returns those that cannot have them, with the reason."""
    left = []
    for name, module in fused_experts(model).items():
        why = why_not_split(module)
        if why:
            left.append((name, why))
        else:
            split_experts(model, name)
    return left


def _layer(
    module: torch.nn.Linear, scheme: Scheme, input_scale: float | None, request: Request | None
) -> Fp8Linear:
    layer = Fp8Linear(
        module.in_features,
        module.out_features,
        scheme,
        bias=module.bias is not None,
        dtype=module.weight.dtype,
        device="meta",
        request=request,
    )
    weight = reference.quantize_weight(module.weight.detach(), scheme)
    static = None
    if input_scale is not None:
        static = torch.tensor(input_scale, dtype=torch.float32, device=module.weight.device)
    layer.load(weight, input_scale=static, bias=None if module.bias is None else module.bias.data)
    # whoever still holds the module must not keep the 16-bit weight alive with it
    module.weight = torch.nn.Parameter(module.weight.new_empty(0), requires_grad=False)
    return layer.train(module.training)
