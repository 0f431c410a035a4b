"""bf16 -> (fp8, scale): the same bytes on every GPU, at memory speed.

Each function returns a `QTensor` and obeys `anyfp8.reference` bit for bit.
"""

from anyfp8.quantize.mla import mla_per_group, mla_per_tensor
from anyfp8.quantize.norm import norm_per_group, norm_per_token
from anyfp8.quantize.per_group import per_group
from anyfp8.quantize.per_tensor import cast, per_tensor
from anyfp8.quantize.per_token import per_token
from anyfp8.quantize.weights import per_block, weight

__all__ = [
    "cast",
    "mla_per_group",
    "mla_per_tensor",
    "norm_per_group",
    "norm_per_token",
    "per_block",
    "per_group",
    "per_tensor",
    "per_token",
    "weight",
]
