"""stored scale -> canonical scale: fp32, [] or [N, 1] or [ceil(N/bn), ceil(K/bk)].

Files store one scale as [], [1] or [1, 1], a column as [N] or [N, 1], a block grid as 2-D or, from
ModelOpt, 4-D [N/bn, 1, K/bk, 1]; in fp32, 16 bits or E8M0. The stored shape decides what it is; the
config only where two readings fit (a [1, 1] of one block, a [1] of one row).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from anyfp8 import fp8
from anyfp8.checkpoint.files import FLOATS, StoredTensor
from anyfp8.errors import CheckpointError
from anyfp8.problem import Scheme

SCALE_DTYPES = (*FLOATS, "F8_E8M0")
BLOCK = (128, 128)
_EXPONENTS = ("F8_E8M0", "U8")


def fit_scale(shape: tuple[int, ...], n: int, k: int, scheme: Scheme) -> Scheme | None:
    """The scheme with the weight granularity of a stored scale's shape; None where none fits.

    Args:
        shape: of the stored scale. n, k: of the weight.
        scheme: what the config says; kept where its granularity fits.
    """
    candidates = (
        scheme,
        _regranulated(scheme, "tensor", None),
        _regranulated(scheme, "channel", None),
        _regranulated(scheme, "block", BLOCK),
    )
    return next((c for c in candidates if _fits(shape, n, k, c)), None)


def _regranulated(scheme: Scheme, weight: str, block: tuple[int, int] | None) -> Scheme:
    # powers of two are for block and group scales only
    scale_format = scheme.scale_format if block or scheme.group else "float32"
    return replace(scheme, weight=weight, block=block, scale_format=scale_format)


def _fits(shape: tuple[int, ...], n: int, k: int, scheme: Scheme) -> bool:
    if scheme.weight == "tensor":
        return shape in ((), (1,), (1, 1))
    if scheme.weight == "channel":
        return shape in ((n,), (n, 1))
    rows, columns = scheme.weight_scale_shape(n, k)
    return shape in ((rows, columns), (rows, 1, columns, 1))


def canonical_scale(scale: torch.Tensor, scheme: Scheme, n: int, k: int) -> torch.Tensor:
    """A stored scale as fp32 in the canonical shape of its scheme, contiguous."""
    e8m0 = getattr(torch, "float8_e8m0fnu", None)
    # a torch without the dtype reads it as uint8, and no other scale is that
    if scale.dtype in (torch.uint8, e8m0):
        scale = fp8.decode_ue8m0(scale)
    return scale.float().reshape(scheme.weight_scale_shape(n, k)).contiguous()


def check_scale(scale: torch.Tensor, stored: StoredTensor, single: bool = False) -> None:
    """Refuse scales that are not finite and positive.

    Args:
        scale: as stored. stored: where it comes from, for the message.
        single: it must have one element.

    Raises:
        CheckpointError: names tensor, file, index and value.
    """
    where = f"{stored.name} in {stored.file.name}"
    exponents = stored.dtype in _EXPONENTS and not single
    if not (exponents or stored.dtype in SCALE_DTYPES) or (single and scale.numel() != 1):
        raise CheckpointError(
            f"cannot use the scale {where}",
            got=f"{stored.dtype} {list(stored.shape)}",
            want="one floating-point value" if single else ", ".join(SCALE_DTYPES),
            hint="export the checkpoint again",
        )
    values = fp8.decode_ue8m0(scale) if stored.dtype in _EXPONENTS else scale.float()
    bad = ~(values.isfinite() & (values > 0))
    if bool(bad.any()):
        index = bad.nonzero()[0].tolist()
        raise CheckpointError(
            f"cannot use the scale {where}",
            got=f"{values[bad][0].item():g}" + (f" at {index}" if index else ""),
            want="finite positive values",
            hint="the layer was exported without calibration, or the file is damaged",
        )
