"""compressed-tensors' layout: W = weight · weight_scale, each group of layers in its own scheme.

Written by llmcompressor and read by vLLM, SGLang and transformers; here as version 0.19 writes it.
A group has targets (module names, "re:" patterns, class names), weights and input_activations; a
name wins over a class, then the first group wins.

The surprises: scales come in the model's 16-bit dtype; a tensor scale is [1]; the block scale is
called weight_scale and not weight_scale_inv; the scales of the KV cache lie on the attention module
and not on a projection; and "group" activations of a W8A8 file are what others call 1x128 blocks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

import torch

from anyfp8 import fp8
from anyfp8.checkpoint.declaration import Algorithm, ConfigFiles, Declaration
from anyfp8.checkpoint.files import TensorSpec
from anyfp8.checkpoint.formats import MXFP8, formats_for
from anyfp8.checkpoint.rules import Rule
from anyfp8.checkpoint.words import names, number_format, objects, version_of
from anyfp8.errors import CheckpointError, InputError
from anyfp8.problem import QTensor, Scheme

NAME = "compressed-tensors"
READABLE = (
    "8-bit float weights (tensor, channel, block or group) with no, static per-tensor or dynamic "
    "(tensor, token, group) activations"
)

# the library's named schemes, as a config may use them in place of a group
PRESETS = {
    "FP8": Scheme("tensor", "tensor"),
    "FP8_DYNAMIC": Scheme("channel", "token", dynamic=True),
    "FP8_BLOCK": Scheme("block", "group", True, (128, 128), 128),
    "MXFP8": MXFP8,
}
# classes that are linear layers in transformers and in the engines
_LINEAR = ("Linear", "LinearBase", "ColumnParallelLinear", "RowParallelLinear", "ReplicatedLinear")


def claims(files: ConfigFiles) -> bool:
    """Whether a checkpoint is in this format."""
    method = str(files.quantization.get("quant_method", "")).lower().replace("_", "-")
    return method == NAME or (not method and "config_groups" in files.quantization)


def declare(files: ConfigFiles) -> Declaration:
    """The declaration of a compressed-tensors config.

    Raises:
        CheckpointError: no groups, fields of the wrong type, sparse or rotated weights.
    """
    config = files.quantization
    _refuse_transforms(config)
    groups = objects(config, "config_groups", presets=True)
    if not groups:
        raise CheckpointError(
            "no config_groups in the quantization_config",
            got=repr(config.get("config_groups"))[:80],
            want="at least one",
            hint="correct config.json, or export the checkpoint again",
        )
    named: list[tuple[Rule, Algorithm]] = []
    default: Algorithm | None = None
    warnings: list[str] = []
    for key, group in groups.items():
        algorithm, targets = _group(key, group, config)
        if isinstance(group, dict) and group.get("output_activations"):
            warnings.append(f"{key} quantizes outputs too, which stay in 16 bits here")
        for target in targets:
            if target in _LINEAR:
                default = default or algorithm
            elif "." not in target and target[:1].isupper():
                warnings.append(f"the target {target} is a class, which no tensor shows: not used")
            else:
                named.append((Rule(target), algorithm))
    cache = config.get("kv_cache_scheme")
    words = dict.fromkeys(a.name for a in (*(a for _, a in named), default) if a is not None)
    return Declaration(
        NAME,
        producer=version_of(NAME, config.get("version")),
        algorithm=", ".join(words),
        kv_cache=number_format(cache) if isinstance(cache, dict) else "",
        default=default,
        groups=tuple(named),
        ignore=names(config, "ignore"),
        warnings=tuple(warnings),
    )


def _group(key: str, group: Any, config: Mapping[str, Any]) -> tuple[Algorithm, Iterable[str]]:
    """What a group says and the modules that it is for."""
    if not isinstance(group, dict):
        scheme = PRESETS.get(key.upper())
        refusal = "" if scheme else f"{key} is none of {', '.join(PRESETS)}"
        return Algorithm(key, scheme, refusal), names({key: group}, key)
    targets = names(group, "targets")
    weights, inputs = group.get("weights"), group.get("input_activations")
    fields = (weights, inputs, group.get("output_activations"))
    if not all(field is None or isinstance(field, dict) for field in fields):
        raise CheckpointError(
            f"cannot read the config group {key}",
            got=repr(fields)[:80],
            want="weights, input_activations and output_activations as objects or null",
            hint="correct config.json, or export the checkpoint again",
        )
    if weights is None:
        return Algorithm("no weights", None, "its weights are not quantized"), targets
    word = f"{_describe(weights)} weights, {_describe(inputs)} activations"
    layout = str(group.get("format") or config.get("format") or "")
    try:
        return Algorithm(word, _scheme(weights, inputs, layout)), targets
    except (CheckpointError, InputError) as error:
        return Algorithm(word, None, error.what), targets


def _scheme(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None, layout: str) -> Scheme:
    """The scheme of a group; the error's `what` is the refusal."""
    for args in (weights, inputs or {}):
        kind = number_format(args, "FP8")
        if kind != "FP8":
            raise CheckpointError(f"{kind} is not FP8 ({layout or 'no format given'})")
        if args.get("symmetric") is False:
            raise CheckpointError("FP8 with zero points is not run")
    strategy, size = _strategy(weights), weights.get("group_size")
    if weights.get("dynamic"):
        raise CheckpointError("dynamic weights are not run")
    exponents = "uint8" in str(weights.get("scale_dtype")) or layout.startswith("mxfp8")
    if strategy == "group" and _positive(size):
        # MXFP8 asks for group activations too; its weights are dequantized and x is left alone
        if exponents:
            return Scheme("block", block=(1, size), scale_format="ue8m0")
        return Scheme("block", **_activation(inputs, strategy), block=(1, size))
    if strategy == "block":
        block = weights.get("block_structure")
        if isinstance(block, str) and re.fullmatch(r"\d+x\d+", block):
            # as early versions wrote it
            block = [int(side) for side in block.split("x")]
        if not (isinstance(block, list) and len(block) == 2 and all(map(_positive, block))):
            raise CheckpointError(f"block_structure {block!r} is not [rows, columns]")
        return Scheme("block", **_activation(inputs, strategy), block=(block[0], block[1]))
    if strategy not in ("tensor", "channel"):
        raise CheckpointError(f"{strategy} weights are not run")
    return Scheme(strategy, **_activation(inputs, strategy))


def _activation(inputs: Mapping[str, Any] | None, weight: str) -> dict[str, Any]:
    if inputs is None:
        return {"activation": "none"}
    strategy, dynamic = _strategy(inputs), inputs.get("dynamic", False)
    if dynamic is True and strategy in ("tensor", "token"):
        return {"activation": strategy, "dynamic": True}
    if dynamic is True and strategy == "group" and _positive(size := inputs.get("group_size")):
        return {"activation": "group", "dynamic": True, "group": size}
    if not dynamic and strategy == "tensor":
        return {"activation": "tensor"}
    timing = "static" if not dynamic else f"dynamic ({dynamic!r})"
    raise CheckpointError(f"{weight} weights with {timing} {strategy} activations are not run")


def _describe(args: Mapping[str, Any] | None) -> str:
    if args is None:
        return "16-bit"
    timing = "dynamic " if args.get("dynamic") else ""
    return f"{timing}{number_format(args, 'FP8')} {_strategy(args)}"


def _strategy(args: Mapping[str, Any]) -> str:
    return str(args.get("strategy") or "tensor").lower()


def _positive(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _refuse_transforms(config: Mapping[str, Any]) -> None:
    sparsity = config.get("sparsity_config") or {}
    transforms = config.get("transform_config") or {}
    sparse = isinstance(sparsity, dict) and sparsity.get("format") not in (None, "dense")
    rotated = (transforms.get("config_groups") or {}) if isinstance(transforms, dict) else {}
    if sparse or rotated:
        raise CheckpointError(
            "cannot run these weights: they are not plain FP8",
            got=f"sparsity format {sparsity.get('format')!r}"
            if sparse
            else f"transforms {', '.join(map(str, rotated))}"[:80],
            want="sparsity_config dense or empty, transform_config empty",
            hint="export the model again without sparsity and rotations",
        )


def algorithm_for(scheme: Scheme) -> str:
    """The word for a scheme that this format can hold. Raises InputError for any other."""
    if NAME not in formats_for(scheme):
        raise InputError(
            f"the compressed-tensors format cannot hold {scheme.name}",
            want="schemes with fp32 scales, or w8a16-block1x32-ue8m0",
            hint=f"formats that hold it: {', '.join(formats_for(scheme)) or 'none'} (--format)",
        )
    return "float-quantized" if scheme.activation != "none" else "naive-quantized"


def layer_specs(name: str, scheme: Scheme, n: int, k: int) -> list[TensorSpec]:
    """Names, dtypes and shapes of the tensors that store a quantized linear, bias and extras aside.

    Raises:
        InputError: a scheme that the format cannot hold.
    """
    algorithm_for(scheme)
    dtype = "U8" if scheme == MXFP8 else "F32"
    specs = [
        TensorSpec(f"{name}.weight", "F8_E4M3", (n, k)),
        TensorSpec(f"{name}.weight_scale", dtype, _scale_shape(scheme, n, k)),
    ]
    if scheme.activation == "tensor" and not scheme.dynamic:
        specs.append(TensorSpec(f"{name}.input_scale", "F32", (1,)))
    return specs


def layer_tensors(
    name: str, scheme: Scheme, weight: QTensor, input_scale: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """The tensors of `layer_specs` from canonical ones."""
    n, k = weight.data.shape
    scale = weight.scale.float().reshape(_scale_shape(scheme, n, k))
    tensors = {
        f"{name}.weight": weight.codes.view(torch.float8_e4m3fn),
        f"{name}.weight_scale": fp8.encode_ue8m0(scale) if scheme == MXFP8 else scale,
    }
    if scheme.activation == "tensor" and not scheme.dynamic:
        assert input_scale is not None
        tensors[f"{name}.input_scale"] = input_scale.float().reshape(1)
    return tensors


def quantization_configs(
    layers: Mapping[str, Scheme], ignore: Iterable[str], kv_cache: str = ""
) -> tuple[dict[str, Any], None]:
    """What goes into config.json as "quantization_config": a group for each scheme."""
    by_scheme: dict[Scheme, list[str]] = {}
    for name, scheme in layers.items():
        by_scheme.setdefault(scheme, []).append(name)
    groups = {}
    for i, (scheme, names_) in enumerate(by_scheme.items()):
        targets = ["Linear"] if len(by_scheme) == 1 else sorted(names_)
        groups[f"group_{i}"] = _written_group(scheme, targets)
    formats = {group["format"] for group in groups.values()}
    cache = _written_args("tensor", False) if kv_cache else None
    config = {
        "config_groups": groups,
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "ignore": sorted(ignore),
        "kv_cache_scheme": cache,
        "quant_method": NAME,
        "quantization_status": "compressed",
    }
    return config, None


def _written_group(scheme: Scheme, targets: list[str]) -> dict[str, Any]:
    block = scheme.block
    if scheme == MXFP8:
        weights = _written_args("group", False, group_size=32, scale_dtype="torch.uint8")
    elif block is not None and block[0] == 1:
        weights = _written_args("group", False, group_size=block[1])
    elif block is not None:
        weights = _written_args("block", False, block_structure=list(block))
    else:
        weights = _written_args(scheme.weight, False)
    inputs = None
    if scheme.activation != "none":
        inputs = _written_args(scheme.activation, scheme.dynamic, group_size=scheme.group)
    return {
        "format": "mxfp8-quantized" if scheme == MXFP8 else algorithm_for(scheme),
        "input_activations": inputs,
        "output_activations": None,
        "targets": targets,
        "weights": weights,
    }


def _written_args(strategy: str, dynamic: bool, **more: Any) -> dict[str, Any]:
    given = {key: value for key, value in more.items() if value is not None}
    return {
        "dynamic": dynamic,
        "num_bits": 8,
        "strategy": strategy,
        "symmetric": True,
        "type": "float",
        **given,
    }


def _scale_shape(scheme: Scheme, n: int, k: int) -> tuple[int, ...]:
    return scheme.weight_scale_shape(n, k) or (1,)
