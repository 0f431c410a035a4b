"""Fine-grained FP8 (quant_method "fp8"): W = weight · weight_scale_inv, blocks of 128x128 mostly.

DeepSeek, Qwen and transformers' FineGrainedFP8Config write `weight_block_size`; without one there
is a scale per tensor. AutoFP8 and Quark's custom export use the same quant_method for another
layout: weight_scale, input_scale and `ignored_layers`. The tensors' names tell them apart.

The surprises: "_inv" is history, the scale is multiplied; a `scale_fmt` of "ue8m0" makes the scales
powers of two, stored as fp32, E8M0 or plain bytes; and transformers writes a static
activation_scale that it never calibrated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from anyfp8 import fp8
from anyfp8.checkpoint.declaration import Algorithm, ConfigFiles, Declaration
from anyfp8.checkpoint.files import TensorSpec
from anyfp8.checkpoint.formats import MXFP8, formats_for
from anyfp8.checkpoint.rules import Rule
from anyfp8.checkpoint.words import names
from anyfp8.errors import CheckpointError, InputError
from anyfp8.problem import QTensor, Scheme

NAME = "fp8"
READABLE = "weight_block_size [rows, columns] or null, activation_scheme dynamic or static"


def claims(files: ConfigFiles) -> bool:
    """Whether a checkpoint is in this format."""
    return str(files.quantization.get("quant_method", "")).lower() in (NAME, "mxfp8")


def declare(files: ConfigFiles) -> Declaration:
    """The declaration of a fine-grained or AutoFP8 config.

    Raises:
        CheckpointError: a field of the wrong type, or a value that no tool writes.
    """
    config = files.quantization
    algorithm = Algorithm(*_scheme(config))
    chosen = names(config, "modules_to_convert")
    groups = [(Rule(pattern), algorithm) for pattern in chosen]
    experts = str(config.get("expert_dtype") or NAME).lower()
    if experts not in (NAME, "float8_e4m3fn", "float8_e4m3", "mxfp8"):
        refused = Algorithm(experts, None, f"its experts are {experts}: this library runs FP8")
        groups.insert(0, (Rule(r"re:.*\.experts\..*"), refused))
    return Declaration(
        NAME,
        algorithm=algorithm.name,
        kv_cache="FP8" if config.get("kv_cache_scheme") else "",
        default=None if chosen else algorithm,
        groups=tuple(groups),
        ignore=names(config, "modules_to_not_convert", "ignored_layers"),
    )


def _scheme(config: Mapping[str, Any]) -> tuple[str, Scheme]:
    block, timing = config.get("weight_block_size"), config.get("activation_scheme") or "dynamic"
    ue8m0 = str(config.get("scale_fmt") or "float").lower() == "ue8m0"
    if str(config.get("quant_method")).lower() == "mxfp8":
        # dequantized: activations stay in 16 bits
        return "mxfp8", MXFP8
    if timing not in ("dynamic", "static"):
        raise CheckpointError(
            "cannot read the activation_scheme of the quantization config",
            got=repr(timing)[:80],
            want="'dynamic' or 'static'",
            hint="correct config.json, or export the checkpoint again",
        )
    if block is None:
        return f"per-tensor {timing}", Scheme("tensor", "tensor", dynamic=timing == "dynamic")
    if not (
        isinstance(block, list)
        and len(block) == 2
        and all(type(side) is int and side > 0 for side in block)
    ):
        raise CheckpointError(
            "cannot read the weight_block_size of the quantization config",
            got=repr(block)[:80],
            want="[rows, columns] or null",
            hint="correct config.json, or export the checkpoint again",
        )
    scale_format = "ue8m0" if ue8m0 else "float32"
    word = f"block {block[0]}x{block[1]} {timing}" + (" ue8m0" if ue8m0 else "")
    if timing == "static":
        return word, Scheme("block", "tensor", False, tuple(block), None, scale_format)
    return word, Scheme("block", "group", True, tuple(block), block[1], scale_format)


def algorithm_for(scheme: Scheme) -> str:
    """The word for a scheme that this format can hold. Raises InputError for any other."""
    if "finegrained" not in formats_for(scheme):
        raise InputError(
            f"the fine-grained format cannot hold {scheme.name}",
            want="blocks with groups of their width, or tensor weights with tensor activations",
            hint=f"formats that hold it: {', '.join(formats_for(scheme)) or 'none'} (--format)",
        )
    return "static" if not scheme.dynamic else "dynamic"


def layer_specs(name: str, scheme: Scheme, n: int, k: int) -> list[TensorSpec]:
    """Names, dtypes and shapes of the tensors that store a quantized linear, bias and extras aside.

    Raises:
        InputError: a scheme that the format cannot hold.
    """
    timing = algorithm_for(scheme)
    dtype = "F8_E8M0" if scheme.scale_format == "ue8m0" else "F32"
    specs = [
        TensorSpec(f"{name}.weight", "F8_E4M3", (n, k)),
        TensorSpec(f"{name}.weight_scale_inv", dtype, scheme.weight_scale_shape(n, k) or (1, 1)),
    ]
    if timing == "static":
        specs.append(TensorSpec(f"{name}.activation_scale", "F32", ()))
    return specs


def layer_tensors(
    name: str, scheme: Scheme, weight: QTensor, input_scale: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """The tensors of `layer_specs` from canonical ones."""
    n, k = weight.data.shape
    scale = weight.scale.float().reshape(scheme.weight_scale_shape(n, k) or (1, 1))
    if scheme.scale_format == "ue8m0":
        scale = fp8.encode_ue8m0(scale).view(torch.float8_e8m0fnu)
    tensors = {
        f"{name}.weight": weight.codes.view(torch.float8_e4m3fn),
        f"{name}.weight_scale_inv": scale,
    }
    if algorithm_for(scheme) == "static":
        assert input_scale is not None
        tensors[f"{name}.activation_scale"] = input_scale.float().reshape(())
    return tensors


def quantization_configs(
    layers: Mapping[str, Scheme], ignore: Iterable[str], kv_cache: str = ""
) -> tuple[dict[str, Any], None]:
    """What goes into config.json as "quantization_config".

    Raises:
        InputError: layers of several schemes, for which this format has no words.
    """
    schemes = dict.fromkeys(layers.values())
    if len(schemes) != 1:
        raise InputError(
            "the fine-grained format holds one scheme for all layers",
            got=", ".join(scheme.name for scheme in schemes),
            want="one scheme",
            hint="compressed-tensors and modelopt hold several (--format)",
        )
    (scheme,) = schemes
    config = {
        "activation_scheme": algorithm_for(scheme),
        "modules_to_not_convert": sorted(ignore),
        "quant_method": NAME,
        "scale_fmt": "ue8m0" if scheme.scale_format == "ue8m0" else "float",
        "weight_block_size": list(scheme.block) if scheme.block else None,
        **({"kv_cache_scheme": "static"} if kv_cache else {}),
    }
    return config, None
