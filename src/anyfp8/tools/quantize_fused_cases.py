"""Cases of quantizers that compute something first, or store elsewhere: SiLU, RMSNorm, MLA."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from anyfp8 import fp8, quantize, reference, testing
from anyfp8.problem import QTensor
from anyfp8.tools.quantize_case import DTYPES, Case, grouped, name_of, rows_of
from anyfp8.tools.quantize_inputs import exact_rows, norm_weight


def fused_cases() -> Iterator[Case]:
    """SiLU · mul, MLA's layouts, RMSNorm."""
    yield from _silu_cases()
    yield from _mla_cases()
    yield from _norm_cases()


def _silu_cases() -> Iterator[Case]:
    # fp16 and few values: a last bit of exp that differs would show once in 8,000 values
    for m, k in ((3, 256), (17, 576)):
        x = rows_of(m, 2 * k, torch.float16)
        yield Case(
            f"token-silu-m{m}-k{k}",
            x,
            lambda x: quantize.per_token(x, silu_mul=True),
            lambda x: reference.quantize_per_token(reference.silu_mul(x)),
        )
        for layout in reference.SCALE_LAYOUTS:
            yield Case(
                f"group64-{layout}-silu-m{m}-k{k}",
                x,
                lambda x, layout=layout: quantize.per_group(x, 64, layout=layout, silu_mul=True),
                lambda x, layout=layout: grouped(
                    reference.silu_mul(x), 64, layout, False, fp8.E4M3FN
                ),
            )


def _valid(made: tuple[QTensor, torch.Tensor]) -> QTensor:
    """The rows that masked_m counts: what lies behind them may be anything."""
    q, counts = made
    rows = max(counts.tolist(), default=0)
    return QTensor(q.data[:, :rows], q.scale[:, :rows], q.block, q.fmt, q.packed)


def _mla_reference(x: torch.Tensor, group: int, ue8m0: bool, packed: bool) -> QTensor:
    q, counts = reference.quantize_mla_per_group(x, group, 256, ue8m0 or packed)
    scale = reference.arrange_scale(q.scale, "packed") if packed else q.scale
    return _valid((QTensor(q.data, scale, q.block, q.fmt, packed), counts))


def _mla_cases() -> Iterator[Case]:
    for dtype in DTYPES:
        for heads, tokens, dim in ((4, 5, 128), (3, 1, 192), (2, 17, 512), (16, 0, 128)):
            # projections come as [tokens, heads, dim]; the cached part is the head of each row
            made = testing.random_rows(tokens * heads, dim + 64, dtype)
            x = made.view(tokens, heads, dim + 64)[..., :dim].transpose(0, 1)
            shape = f"{heads}x{tokens}x{dim}-{name_of(dtype)}"
            yield Case(
                f"mla-tensor-{shape}",
                lambda x=x: x,
                quantize.mla_per_tensor,
                reference.quantize_per_tensor,
            )
            for ue8m0, packed in ((False, False), (True, False), (False, True)):
                kind = "packed" if packed else "ue8m0" if ue8m0 else "fp32"
                yield Case(
                    f"mla-group64-{kind}-{shape}",
                    lambda x=x: x,
                    lambda x, ue8m0=ue8m0, packed=packed: _valid(
                        quantize.mla_per_group(x, 64, ue8m0=ue8m0, packed=packed)
                    ),
                    lambda x, ue8m0=ue8m0, packed=packed: _mla_reference(x, 64, ue8m0, packed),
                )


def _normed(x: torch.Tensor) -> torch.Tensor:
    return reference.rms_norm(x, norm_weight(x.shape[-1], x.dtype), 1e-6)


def _norm_cases() -> Iterator[Case]:
    for dtype in DTYPES:
        for m, k in ((3, 128), (17, 576), (5, 4096), (0, 128)):
            shape = f"m{m}-k{k}-{name_of(dtype)}"
            yield Case(
                f"norm-token-{shape}",
                lambda m=m, k=k, dtype=dtype: exact_rows(m, k, dtype),
                lambda x: quantize.norm_per_token(x, norm_weight(x.shape[-1], x.dtype, x.device)),
                lambda x: reference.quantize_per_token(_normed(x)),
            )
            for layout in reference.SCALE_LAYOUTS:
                yield Case(
                    f"norm-group64-{layout}-{shape}",
                    lambda m=m, k=k, dtype=dtype: exact_rows(m, k, dtype),
                    lambda x, layout=layout: quantize.norm_per_group(
                        x, norm_weight(x.shape[-1], x.dtype, x.device), 64, layout=layout
                    ),
                    lambda x, layout=layout: grouped(_normed(x), 64, layout, False, fp8.E4M3FN),
                )
