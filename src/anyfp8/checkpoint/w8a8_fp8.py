"""SGLang's w8a8_fp8: W = weight · weight_scale, a scale per row [N, 1], x quantized per token.

The layout is compressed-tensors' FP8_DYNAMIC under a name of its own, without groups.
"""

from __future__ import annotations

from anyfp8.checkpoint.declaration import Algorithm, ConfigFiles, Declaration
from anyfp8.checkpoint.words import names
from anyfp8.problem import Scheme

NAME = "w8a8_fp8"
READABLE = "a scale per row of the weight and per token"


def claims(files: ConfigFiles) -> bool:
    """Whether a checkpoint is in this format."""
    return str(files.quantization.get("quant_method", "")).lower() == NAME


def declare(files: ConfigFiles) -> Declaration:
    """The declaration of the config. Raises CheckpointError for fields of the wrong type."""
    return Declaration(
        NAME,
        algorithm="per-channel per-token",
        default=Algorithm("per-channel per-token", Scheme("channel", "token", dynamic=True)),
        ignore=names(files.quantization, "ignore", "ignored_layers", "modules_to_not_convert"),
    )
