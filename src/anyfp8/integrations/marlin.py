"""y = x · (decode(w) · sw)ᵀ + bias: SGLang's weight-only FP8 functions, under its names.

Who uses it: SGLang's ModelOpt path on GPUs without FP8 units, or with the activations kept in 16
bits by `SGLANG_FORCE_FP8_MARLIN`. Marlin serves where it is installed and passes its trial, this
library's own kernel everywhere else; a layer's tensors say which of the two they were prepared for.

The surprise: scales stay fp32 and each shard of a merged layer keeps its own, by repeating it per
row. Requantizing to the largest, as is usual, would change codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from anyfp8 import env, gemm
from anyfp8.device import Device, device_of, planning_device
from anyfp8.errors import InputError
from anyfp8.gemm.base import CanonicalWeight, PreparedWeight
from anyfp8.gemm.marlin import MarlinWeight
from anyfp8.linear import linear
from anyfp8.problem import DTYPE_NAMES, QTensor, Scheme
from anyfp8.select import Plan, Request
from anyfp8.select import plan as make_plan

__all__ = [
    "ModelOptFp8LinearMethod",
    "apply_fp8_marlin_linear",
    "can_auto_enable_marlin_fp8",
    "prepare_fp8_layer_for_marlin",
]

# what SGLang fills scales with before a checkpoint is read
_UNSET = torch.finfo(torch.float32).min


def can_auto_enable_marlin_fp8() -> bool:
    """Whether the GPU has no FP8 units, so that FP8 layers run weight-only by themselves."""
    device = planning_device()
    return device.vendor != "cpu" and not device.has_fp8


def prepare_fp8_layer_for_marlin(layer: torch.nn.Module, size_k_first: bool = True) -> None:
    """Store a layer's weight as `apply_fp8_marlin_linear` takes it.

    Reads weight [K, N] or [N, K] e4m3fn as `size_k_first` says, weight_scale or weight_scale_inv,
    input_size_per_partition, output_size_per_partition, orig_dtype, and logical_widths and
    weight_block_size where there are any. Replaces weight and weight_scale, adds workspace.

    Raises:
        InputError: the weight or the scale has another shape than the layer says.
    """
    module: Any = layer
    n, k = module.output_size_per_partition, module.input_size_per_partition
    want = (k, n) if size_k_first else (n, k)
    if tuple(module.weight.shape) != want:
        raise InputError(
            "the weight does not fit this layer",
            got=f"shape {tuple(module.weight.shape)} with size_k_first={size_k_first}",
            want=f"{want}",
        )
    codes = module.weight.data.view(torch.uint8)
    codes = codes.t().contiguous() if size_k_first else codes.contiguous()
    inverse = getattr(module, "weight_scale", None) is None
    scale = module.weight_scale_inv.data if inverse else module.weight_scale.data
    block = getattr(module, "weight_block_size", None)
    scheme = Scheme("block", block=(block[0], block[1])) if block else None
    if scheme is not None:
        scale = scale.t() if size_k_first else scale
    else:
        widths = list(getattr(module, "logical_widths", None) or ())
        scale = _by_shard(scale.float().reshape(-1), widths, n)
        scheme = Scheme("channel" if scale.ndim else "tensor")
    device = codes.device
    plan = _plan(scheme, n, k, device_of(device), module.orig_dtype, False, env.snapshot())
    data = codes.view(torch.float8_e4m3fn)
    prepared = plan.prepare(QTensor(data, scale.float().contiguous(), scheme.block))
    _store(module, prepared)
    if inverse:
        del module.weight_scale_inv


def _store(module: Any, prepared: PreparedWeight) -> None:
    if isinstance(prepared, MarlinWeight):
        weight, scale, workspace = prepared.shuffled, prepared.shuffled_scale, prepared.workspace
    else:
        assert isinstance(prepared, CanonicalWeight)
        weight, scale = prepared.codes.view(torch.float8_e4m3fn), prepared.scale
        workspace = torch.zeros(1, dtype=torch.int32, device=weight.device)
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    module.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
    module.workspace = workspace


def apply_fp8_marlin_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    workspace: torch.Tensor,
    size_n: int,
    size_k: int,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Multiply by a weight that `prepare_fp8_layer_for_marlin` stored.

    Also the torch op `anyfp8::apply_fp8_marlin_linear`.

    Args:
        input: [..., K] bf16 or fp16.
        weight, weight_scale, workspace: the layer's.
        bias: [N] or None.

    Returns:
        [..., N] of input's dtype.

    Raises:
        InputError: input does not fit; or a scale whose blocks cannot be told from its shape.
    """
    scheme = Scheme("channel")
    if weight.dtype == torch.int32:
        size = (size_n, size_k)
        # its canonical scale is for giving codes back, which nobody asks of a call
        stored = (weight, weight_scale, workspace, weight_scale)
        prepared = MarlinWeight(*stored, scheme, size, input.dtype)
    else:
        scheme = _scheme_of(weight_scale, size_n, size_k)
        prepared = CanonicalWeight(weight.view(torch.uint8), weight_scale, scheme)
    plan = _plan(
        scheme,
        size_n,
        size_k,
        device_of(weight.device),
        input.dtype,
        bias is not None,
        env.snapshot(),
    )
    if plan.layout != prepared.layout:
        rows = input.reshape(-1, size_k)
        backend = gemm.backend("marlin" if weight.dtype == torch.int32 else "triton_w8a16")
        problem = plan.problem_at(rows.shape[0])
        config = backend.default_config(problem, device_of(weight.device))
        y = backend.run(rows, prepared, problem, config, bias)
        return y.reshape(*input.shape[:-1], size_n)
    return linear(input, prepared, plan, bias=bias)


_LIBRARY = torch.library.Library("anyfp8", "FRAGMENT")
_LIBRARY.define(
    "apply_fp8_marlin_linear(Tensor input, Tensor weight, Tensor weight_scale, Tensor workspace, "
    "int size_n, int size_k, Tensor? bias) -> Tensor"
)
_LIBRARY.impl("apply_fp8_marlin_linear", apply_fp8_marlin_linear, "CompositeExplicitAutograd")


@torch.library.register_fake("anyfp8::apply_fp8_marlin_linear", lib=_LIBRARY)
def _fake(
    input: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    workspace: torch.Tensor,
    size_n: int,
    size_k: int,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    return input.new_empty((*input.shape[:-1], size_n))


class ModelOptFp8LinearMethod:
    """SGLang's linear method for ModelOpt FP8 layers: one scale a tensor, static activations.

    Attributes:
        quant_config: kept for the caller.
        use_marlin: weight-only, because the GPU has no FP8 units or because the environment says
            so (`ANYFP8_FORCE_FP8_MARLIN`, `SGLANG_FORCE_FP8_MARLIN`).
    """

    def __init__(self, quant_config: Any = None) -> None:
        self.quant_config = quant_config
        self.use_marlin = env.flag("ANYFP8_FORCE_FP8_MARLIN") or can_auto_enable_marlin_fp8()

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int | None = None,
        output_size: int | None = None,
        params_dtype: torch.dtype = torch.bfloat16,
        **extra_weight_attrs: Any,
    ) -> None:
        """Give a layer empty parameters for a loader to fill.

        Adds weight [N, K] e4m3fn, and weight_scale and input_scale fp32 with one element for each
        of `output_partition_sizes`; each parameter gets `extra_weight_attrs` as attributes.
        """
        module: Any = layer
        n, k = sum(output_partition_sizes), input_size_per_partition
        module.logical_widths = list(output_partition_sizes)
        module.input_size_per_partition, module.output_size_per_partition = k, n
        module.orig_dtype = params_dtype
        shards = len(output_partition_sizes)
        parameters = {
            "weight": torch.empty(n, k, dtype=torch.float8_e4m3fn),
            "weight_scale": torch.full((shards,), _UNSET),
            "input_scale": torch.full((shards,), _UNSET),
        }
        for name, value in parameters.items():
            parameter = torch.nn.Parameter(value, requires_grad=False)
            for key, attribute in extra_weight_attrs.items():
                setattr(parameter, key, attribute)
            module.register_parameter(name, parameter)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Prepare a loaded layer; a weight-only one has no input_scale afterwards.

        Raises:
            InputError: a scale that no checkpoint filled, or that is not positive and finite.
        """
        module: Any = layer
        widths = module.logical_widths
        n, k = module.output_size_per_partition, module.input_size_per_partition
        scale = _by_shard(module.weight_scale.data, widths, n)
        module.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
        if self.use_marlin:
            del module.input_scale
            prepare_fp8_layer_for_marlin(module, size_k_first=False)
            return
        scales = _filled("input_scale", module.input_scale.data)
        module.input_scale = torch.nn.Parameter(scales.amax(), requires_grad=False)
        scheme = Scheme("channel" if scale.ndim else "tensor", "tensor")
        device = device_of(module.weight.device)
        plan = _plan(scheme, n, k, device, module.orig_dtype, False, env.snapshot())
        module.prepared_weight = plan.prepare(QTensor(module.weight.data, scale))
        tensors = module.prepared_weight.tensors()
        module.weight = torch.nn.Parameter(next(iter(tensors.values())), requires_grad=False)

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [..., K] -> [..., N] of x's dtype. Raises InputError as `linear` does."""
        module: Any = layer
        n, k = module.output_size_per_partition, module.input_size_per_partition
        if self.use_marlin:
            stored = (module.weight, module.weight_scale, module.workspace)
            return apply_fp8_marlin_linear(x, *stored, n, k, bias)
        prepared = module.prepared_weight
        device = device_of(module.weight.device)
        plan = _plan(prepared.scheme, n, k, device, x.dtype, bias is not None, env.snapshot())
        return linear(x, prepared, plan, bias=bias, input_scale=module.input_scale)


@lru_cache(maxsize=1024)
def _plan(
    scheme: Scheme,
    n: int,
    k: int,
    device: Device,
    x_dtype: torch.dtype,
    bias: bool,
    snapshot: env.Snapshot,
) -> Plan:
    """`snapshot` is in the key only: another environment is another plan."""
    name = DTYPE_NAMES.get(x_dtype)
    if name is None:
        raise InputError("not a dtype of activations", got=str(x_dtype), want="bf16 or fp16")
    # codes are kept: the layer's tensors are read by name
    weight_only = scheme.activation == "none" or None
    request = Request(force_weight_only=weight_only, memory="per_call")
    return make_plan(scheme, n, k, device, name, name, bias, request)


def _by_shard(scales: torch.Tensor, widths: Sequence[int], n: int) -> torch.Tensor:
    """[] where all shards have one scale, else [N, 1] with each row's own.

    Args:
        scales: [1], [shards] or [N]. widths: rows of each shard, or empty for equal ones.
    """
    scales = _filled("weight_scale", scales)
    count = scales.numel()
    if bool((scales == scales[0]).all()):
        return scales[0].clone()
    if count == n:
        return scales.reshape(n, 1).contiguous()
    if len(widths) != count:
        widths = [n // count] * count
    if sum(widths) != n:
        raise InputError(
            "the weight scale does not fit this layer",
            got=f"{count} scales for {n} rows",
            want=f"1, {n}, or one for each shard",
        )
    rows = torch.tensor(widths, device=scales.device)
    return scales.repeat_interleave(rows).reshape(n, 1)


def _filled(name: str, scales: torch.Tensor) -> torch.Tensor:
    """[shards] fp32, the first one's for those that a checkpoint of merged layers left out."""
    scales = scales.detach().float().reshape(-1)
    filled = torch.where(scales == _UNSET, scales[0], scales)
    if not bool(((filled > 0) & filled.isfinite()).all()):
        raise InputError(
            f"{name} holds a value that is no scale",
            got=", ".join(f"{v:g}" for v in filled.tolist()[:4]),
            want="finite values above zero",
            hint="the checkpoint has no such scale for this layer, or was not calibrated",
        )
    return filled


def _scheme_of(scale: torch.Tensor, n: int, k: int) -> Scheme:
    if scale.numel() == 1:
        return Scheme("tensor")
    if tuple(scale.shape) == (n, 1):
        return Scheme("channel")
    for block in ((128, 128), (64, 64), (32, 32), (128, 64), (64, 128)):
        if tuple(scale.shape) == Scheme("block", block=block).weight_scale_shape(n, k):
            return Scheme("block", block=block)
    raise InputError(
        "cannot tell what this weight scale covers",
        got=f"shape {tuple(scale.shape)} for a weight of {n}x{k}",
        want="one scale, [N, 1], or one for each block of 128x128",
        hint="use anyfp8.linear.Fp8Linear, which is told the block",
    )
