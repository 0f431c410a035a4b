"""Fine-grained FP8 (quant_method "fp8"): W = weight · weight_scale_inv, blocks of 128x128 mostly.

DeepSeek, Qwen and transformers' FineGrainedFP8Config write `weight_block_size`; without one there
is a scale per tensor. AutoFP8 and Quark's custom export use the same quant_method for another
layout: weight_scale, input_scale and `ignored_layers`. The tensors' names tell them apart.

The surprises: "_inv" is history, the scale is multiplied; a `scale_fmt` of "ue8m0" makes the scales
powers of two, stored as fp32, E8M0 or plain bytes; and transformers writes a static
activation_scale that it never calibrated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anyfp8.checkpoint.declaration import Algorithm, ConfigFiles, Declaration
from anyfp8.checkpoint.rules import Rule
from anyfp8.checkpoint.words import names
from anyfp8.errors import CheckpointError
from anyfp8.problem import Scheme

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
        return "mxfp8", Scheme("block", block=(1, 32), scale_format="ue8m0")
    if timing not in ("dynamic", "static"):
        raise CheckpointError(
            "cannot read the activation_scheme of the quantization config",
            got=repr(timing)[:80],
            want="'dynamic' or 'static'",
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
        )
    scale_format = "ue8m0" if ue8m0 else "float32"
    word = f"block {block[0]}x{block[1]} {timing}" + (" ue8m0" if ue8m0 else "")
    if timing == "static":
        return word, Scheme("block", "tensor", False, tuple(block), None, scale_format)
    return word, Scheme("block", "group", True, tuple(block), block[1], scale_format)
