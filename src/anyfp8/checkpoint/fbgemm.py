"""FBGEMM FP8 (quant_method "fbgemm_fp8"): W = weight · weight_scale, a scale per row, x per token.

Llama 3.1 405B's official FP8 files and transformers' FbgemmFp8Config are in this layout.

The surprise: `activation_scale_ub` caps the amax of a token before it is quantized. Only values
beyond it (1200 by default) see the difference, as saturation; here they keep their own scale.
"""

from __future__ import annotations

from anyfp8.checkpoint.declaration import Algorithm, ConfigFiles, Declaration
from anyfp8.checkpoint.words import names
from anyfp8.problem import Scheme

NAME = "fbgemm_fp8"
READABLE = "a scale per row of the weight and per token"


def claims(files: ConfigFiles) -> bool:
    """Whether a checkpoint is in this format."""
    return str(files.quantization.get("quant_method", "")).lower() == NAME


def declare(files: ConfigFiles) -> Declaration:
    """The declaration of an FBGEMM config. Raises CheckpointError for fields of the wrong type."""
    return Declaration(
        NAME,
        algorithm="per-row",
        default=Algorithm("per-row", Scheme("channel", "token", dynamic=True)),
        ignore=names(files.quantization, "modules_to_not_convert"),
    )
