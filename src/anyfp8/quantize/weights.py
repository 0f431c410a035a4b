"""W ≈ q · s: weights, quantized once, at load or when a checkpoint is written.

Per tensor and per channel are `per_tensor` and `per_token` on W; block scales (DeepSeek's 128×128)
have a kernel of their own. Nothing here needs to be fast; all of it gives the reference's bytes.
"""

from __future__ import annotations

import torch

from anyfp8 import fp8, reference
from anyfp8.errors import InputError
from anyfp8.problem import QTensor, Scheme
from anyfp8.quantize.launch import Launch, target_of
from anyfp8.quantize.per_tensor import per_tensor
from anyfp8.quantize.per_token import per_token
from anyfp8.quantize.rows import (
    check_input,
    check_out,
    codes_of,
    data_dtype,
    next_power_of_2,
)

WHAT = "quantize a weight per block"
TILE = 8192


def per_block(
    w: torch.Tensor,
    block: tuple[int, int] = (128, 128),
    *,
    ue8m0: bool = False,
    fmt: fp8.Format = fp8.E4M3FN,
    out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
) -> QTensor:
    """Quantize a weight with one scale per block; blocks at the lower and right edge are cut.

    Args:
        w: [N, K] bf16, fp16 or fp32, any row stride.
        block: rows and columns of a block.
        ue8m0: round scales up to powers of two, and quantize with the rounded ones.
        fmt: of the codes.
        out: [N, K] of the format's dtype or uint8, last stride 1.
        out_scale: [ceil(N / bn), ceil(K / bk)] fp32, last stride 1.

    Returns:
        QTensor with data [N, K] and scale [ceil(N / bn), ceil(K / bk)] fp32.

    Raises:
        InputError: w is not a matrix, its dtype, a block size below 1 or above 8192 columns, an
            `out`
            that does not fit.
    """
    w = check_input(WHAT, w)
    bn, bk = block
    if w.ndim != 2 or bn < 1 or not 1 <= bk <= TILE:
        raise InputError(
            f"cannot {WHAT}",
            got=f"w of shape {tuple(w.shape)}, block={block}",
            want=f"w [N, K], at least one row a block, 1 to {TILE} columns a block",
            hint="quantize.per_token covers whole rows",
        )
    n, k = w.shape
    scale_shape = (-(-n // bn), -(-k // bk))
    data = torch.empty(w.shape, dtype=data_dtype(fmt), device=w.device) if out is None else out
    scale = (
        torch.empty(scale_shape, dtype=torch.float32, device=w.device)
        if out_scale is None
        else out_scale
    )
    check_out(WHAT, "out", data, w.shape, (data_dtype(fmt), torch.uint8), w.device, True)
    check_out(WHAT, "out_scale", scale, scale_shape, (torch.float32,), w.device, True)
    result = QTensor(data, scale, block, fmt)
    target = target_of(w.device)
    if target is None:
        q = reference.quantize_block(w, block, ue8m0, fmt)
        result.codes.copy_(q.codes)
        scale.copy_(q.scale)
        return result
    if n == 0:
        return result

    from anyfp8.kernels.quantize_block import quantize_block_kernel

    columns = next_power_of_2(bk)
    rows = max(1, min(next_power_of_2(bn), TILE // columns))
    arguments = {
        "x_ptr": w,
        "q_ptr": codes_of(data),
        "s_ptr": scale,
        "M": n,
        "K": k,
        "x_stride": w.stride(0),
        "q_stride": data.stride(0),
        "s_stride": scale.stride(0),
        "floor": fp8.AMAX_FLOOR,
    }
    constants = dict(
        **target.numerics(fmt),
        BLOCK_ROWS=bn,
        BLOCK_COLS=bk,
        ROWS=rows,
        COLS=columns,
        UE8M0=ue8m0,
    )
    # few columns of blocks may meet many rows of them: the long axis goes first
    grid = (scale_shape[1], scale_shape[0])
    target.run(Launch(quantize_block_kernel, grid, arguments, constants, 8))
    return result


def weight(w: torch.Tensor, scheme: Scheme, fmt: fp8.Format = fp8.E4M3FN) -> QTensor:
    """Quantize a weight [N, K] as a scheme says; the scale has `scheme.weight_scale_shape`.

    Raises:
        InputError: as the quantizer of the scheme's weight does.
    """
    if scheme.weight == "tensor":
        return per_tensor(w, fmt=fmt)
    if scheme.weight == "channel":
        return per_token(w, fmt=fmt)
    assert scheme.block is not None
    return per_block(w, scheme.block, ue8m0=scheme.scale_format == "ue8m0", fmt=fmt)
