"""Scheme -> the checkpoint formats that can hold it, readers of other projects in mind.

| format | weights | activations |
|---|---|---|
| modelopt | tensor | static |
| | channel | token |
| | block 128x128 | none |
| compressed-tensors | tensor, channel, block, MXFP8 | none, static, dynamic tensor, token, group |
| finegrained ("fp8") | block | group of the block's width |
| | tensor | static, dynamic tensor |
"""

from __future__ import annotations

from anyfp8.problem import Scheme

MODELOPT: dict[str, Scheme] = {
    "FP8": Scheme("tensor", "tensor"),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme("channel", "token", dynamic=True),
    "FP8_PB_WO": Scheme("block", block=(128, 128)),
}
# microscaling, weights alone: an exponent for 32 columns
MXFP8 = Scheme("block", block=(1, 32), scale_format="ue8m0")


def formats_for(scheme: Scheme) -> tuple[str, ...]:
    """Names of the formats that hold a scheme, the most widely read first; () for none."""
    holders = {
        "modelopt": scheme in MODELOPT.values(),
        "compressed-tensors": scheme.scale_format == "float32" or scheme == MXFP8,
        "finegrained": _fine_grained(scheme),
    }
    return tuple(name for name, holds in holders.items() if holds)


def _fine_grained(scheme: Scheme) -> bool:
    if scheme.weight == "tensor":
        return scheme.activation == "tensor"
    return scheme.block is not None and scheme.group == scheme.block[1]
