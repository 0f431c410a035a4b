"""Named inputs for the quantizers with what the reference makes of them: one list, run everywhere.

The same cases run in Triton's interpreter, natively on a GPU, as another architecture's PTX, and
(for their launches alone) through the compile matrix. Expected values always come from `reference`
on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from anyfp8 import fp8, quantize, reference, testing
from anyfp8.problem import QTensor
from anyfp8.quantize.per_group import GroupConfig
from anyfp8.quantize.per_token import TokenConfig
from anyfp8.tools.quantize_case import DTYPES, Case, group_case, grouped, name_of, rows_of
from anyfp8.tools.quantize_fused_cases import fused_cases
from anyfp8.tools.quantize_inputs import largest_anywhere, nan_anywhere, odd_rows

COLUMNS = (16, 100, 576, 4096, 12288, 28672)
ROWS = (0, 1, 3, 17, 257)
MANY_ROWS = 4096
GROUPS = (16, 32, 64, 128, 256)


def cases() -> Iterator[Case]:
    """Every case; the interpreter runs those that are not slow by default."""
    yield from _token_cases()
    yield from _group_cases()
    yield from _tensor_cases()
    yield from _block_cases()
    yield from _stride_cases()
    yield from fused_cases()


def _shapes() -> Iterator[tuple[int, int, bool]]:
    for m in (*ROWS, MANY_ROWS):
        for k in COLUMNS:
            yield m, k, m == MANY_ROWS or m * k > 300_000 or (m == 257 and k != 576)


def _token_cases() -> Iterator[Case]:
    for m, k, slow in _shapes():
        for dtype in DTYPES if m in (3, 17) else (torch.bfloat16,):
            name = f"token-m{m}-k{k}-{name_of(dtype)}"
            yield Case(
                name, rows_of(m, k, dtype), quantize.per_token, reference.quantize_per_token, slow
            )
    yield Case(
        "token-loop-m3-k40000",
        rows_of(3, 40000, torch.bfloat16),
        quantize.per_token,
        reference.quantize_per_token,
    )
    for dtype in DTYPES:
        yield Case(
            f"token-odd-{name_of(dtype)}",
            lambda dtype=dtype: odd_rows(dtype),
            quantize.per_token,
            reference.quantize_per_token,
        )
    for k, dtype in ((576, torch.bfloat16), (768, torch.float16), (4096, torch.bfloat16)):
        yield Case(
            f"token-largest-anywhere-k{k}-{name_of(dtype)}",
            lambda k=k, dtype=dtype: largest_anywhere(k, dtype),
            quantize.per_token,
            reference.quantize_per_token,
            True,
        )
    for dtype in (torch.bfloat16, torch.float16):
        yield Case(
            f"token-patterns-{name_of(dtype)}",
            lambda dtype=dtype: testing.every_16_bit_pattern(dtype).view(64, 1024),
            quantize.per_token,
            reference.quantize_per_token,
        )
    for fmt in (fp8.E4M3FNUZ, fp8.E5M2):
        yield Case(
            f"token-{fmt.name}",
            lambda: odd_rows(torch.bfloat16),
            lambda x, fmt=fmt: quantize.per_token(x, fmt=fmt),
            lambda x, fmt=fmt: reference.quantize_per_token(x, fmt),
        )
    for fmt in (fp8.E4M3FN, fp8.E5M2, fp8.E4M3FNUZ):
        yield Case(
            f"token-nan-to-zero-{fmt.name}",
            lambda: testing.every_16_bit_pattern(torch.bfloat16).view(64, 1024),
            lambda x, fmt=fmt: quantize.per_token(x, fmt=fmt, nan_to_zero=True),
            lambda x, fmt=fmt: reference.quantize_per_token(reference.nan_to_zero(x), fmt),
        )
    for config in (
        TokenConfig(1, 1024, 1),
        TokenConfig(4, 1024, 4),
        TokenConfig(1, 1024, 8),
        TokenConfig(2, 512, 2, 256),
        TokenConfig(1, 512, 1, 256),
        TokenConfig(1, 256, 4),
    ):
        for dtype in DTYPES:
            yield Case(
                f"token-{config.rows}x{config.block_k}+{config.tail_k}-warps{config.num_warps}"
                f"-{name_of(dtype)}",
                lambda dtype=dtype: odd_rows(dtype, 700),
                lambda x, config=config: quantize.per_token(x, config=config),
                reference.quantize_per_token,
            )
            if config.rows == 1 and not config.tail_k:
                continue
            yield Case(
                f"token-nan-to-zero-{config.rows}x{config.block_k}+{config.tail_k}-{name_of(dtype)}",
                lambda dtype=dtype: odd_rows(dtype, 700),
                lambda x, config=config: quantize.per_token(x, nan_to_zero=True, config=config),
                lambda x: reference.quantize_per_token(reference.nan_to_zero(x)),
            )


def _group_cases() -> Iterator[Case]:
    for m, k, slow in _shapes():
        name = f"group128-m{m}-k{k}-bf16"
        yield group_case(name, rows_of(m, k, torch.bfloat16), 128, slow=slow)
    for group in GROUPS:
        for layout in reference.SCALE_LAYOUTS:
            for m, k in ((17, 1280), (3, 4864), (5, 256)):
                for ue8m0 in (False, True) if layout != "packed" else (False,):
                    name = f"group{group}-{layout}-m{m}-k{k}{'-ue8m0' if ue8m0 else ''}"
                    yield group_case(
                        name, rows_of(m, k, torch.bfloat16), group, layout, ue8m0, slow=k > 1280
                    )
    for dtype in DTYPES:
        for layout in reference.SCALE_LAYOUTS:
            yield group_case(
                f"group64-{layout}-odd-{name_of(dtype)}",
                lambda dtype=dtype: odd_rows(dtype),
                64,
                layout,
            )
    for dtype in (torch.bfloat16, torch.float16):
        yield group_case(
            f"group128-patterns-{name_of(dtype)}",
            lambda dtype=dtype: testing.every_16_bit_pattern(dtype).view(64, 1024),
            128,
        )
    for fmt in (fp8.E4M3FNUZ, fp8.E5M2):
        yield group_case(f"group128-{fmt.name}", lambda: odd_rows(torch.bfloat16), 128, fmt=fmt)
    patterns = testing.every_16_bit_pattern
    replaced: dict[str, tuple[Callable[[], torch.Tensor], int]] = {
        "patterns-bf16": (lambda: patterns(torch.bfloat16).view(64, 1024), 128),
        "patterns-fp16": (lambda: patterns(torch.float16).view(64, 1024), 128),
        "ragged-bf16": (lambda: odd_rows(torch.bfloat16, 576), 128),
        "ragged-fp16": (lambda: odd_rows(torch.float16, 100), 32),
        "odd-fp32": (lambda: odd_rows(torch.float32), 64),
    }
    for name, (x, group) in replaced.items():
        yield Case(
            f"group{group}-nan-to-zero-{name}",
            x,
            lambda x, group=group: quantize.per_group(x, group, nan_to_zero=True),
            lambda x, group=group: reference.quantize_per_group(reference.nan_to_zero(x), group),
        )
    # threads of 4, 16 (a row, half of one, many) and 32 values replace it in ways of their own
    for group, rows, groups, warps in (
        *((128, 1, 2, 2), (128, 1, 4, 1), (128, 4, 2, 2), (128, 4, 4, 2)),
        *((16, 4, 8, 1), (64, 8, 2, 2), (256, 2, 1, 1)),
    ):
        for layout in ("row", "tma", "packed"):
            for dtype in (torch.bfloat16, torch.float16):
                config = GroupConfig(rows, groups, warps)
                yield Case(
                    f"group{group}-{layout}-nan-anywhere-{rows}x{groups}-warps{warps}"
                    f"-{name_of(dtype)}",
                    lambda dtype=dtype: nan_anywhere(256, dtype),
                    lambda x, group=group, layout=layout, config=config: quantize.per_group(
                        x, group, layout=layout, nan_to_zero=True, config=config
                    ),
                    lambda x, group=group, layout=layout: grouped(
                        reference.nan_to_zero(x), group, layout, False, fp8.E4M3FN
                    ),
                    True,
                )
    # whole tiles, cut ones, and one of fewer values than threads
    for rows, groups, warps in (
        *((1, 1, 1), (1, 2, 1), (1, 8, 1), (1, 8, 4), (4, 4, 4), (8, 4, 8)),
        *((1, 1, 8), (4, 1, 4), (2, 2, 4)),
    ):
        for layout in ("row", "tma"):
            config = GroupConfig(rows, groups, warps)
            yield Case(
                f"group128-{layout}-{rows}x{groups}-warps{warps}",
                lambda: odd_rows(torch.bfloat16, 1280),
                lambda x, layout=layout, config=config: quantize.per_group(
                    x, layout=layout, config=config
                ),
                lambda x, layout=layout: grouped(x, 128, layout, False, fp8.E4M3FN),
            )
    for group in GROUPS:
        for layout in ("row", "tma", "packed"):
            for dtype in (torch.bfloat16, torch.float16):
                yield group_case(
                    f"group{group}-{layout}-largest-anywhere-{name_of(dtype)}",
                    lambda dtype=dtype: largest_anywhere(256, dtype),
                    group,
                    layout,
                    slow=True,
                )
    yield group_case("group100-ragged", rows_of(5, 576, torch.bfloat16), 100)
    yield group_case("group128-ragged-column", rows_of(5, 576, torch.bfloat16), 128, "column")


def _tensor_cases() -> Iterator[Case]:
    one = torch.ones(())
    for m, k, _ in _shapes():
        yield Case(
            f"tensor-m{m}-k{k}",
            rows_of(m, k, torch.bfloat16),
            quantize.per_tensor,
            reference.quantize_per_tensor,
            m * k > 300_000,
        )
    inputs: dict[str, Callable[[], torch.Tensor]] = {
        "patterns-bf16": lambda: testing.every_16_bit_pattern(torch.bfloat16),
        "patterns-fp16": lambda: testing.every_16_bit_pattern(torch.float16),
        "ties-fp32": testing.e4m3_ties,
        "random-fp32": lambda: (
            torch.randn(1 << 18, generator=torch.Generator().manual_seed(1))
            * torch.exp2(torch.arange(1 << 18) % 24 - 12.0)
        ),
        "odd-bf16": lambda: odd_rows(torch.bfloat16),
    }
    for name, x in inputs.items():
        for fmt in fp8.FORMATS.values():
            yield Case(
                f"static-{name}-{fmt.name}",
                x,
                lambda x, fmt=fmt: quantize.per_tensor(x, one.to(x.device), fmt=fmt),
                lambda x, fmt=fmt: reference.quantize_per_tensor(x, one, fmt),
            )
        yield Case(f"tensor-{name}", x, quantize.per_tensor, reference.quantize_per_tensor)
    for factor in (2.0, 0.37):
        for fmt in (fp8.E4M3FN, fp8.E5M2):
            yield Case(
                f"cast-{factor}-{fmt.name}",
                lambda: odd_rows(torch.bfloat16),
                lambda x, fmt=fmt, factor=factor: _as_qtensor(
                    quantize.cast(x, factor, fmt=fmt), fmt
                ),
                lambda x, fmt=fmt, factor=factor: _as_qtensor(
                    fp8.encode(x.float() * torch.tensor(factor), fmt), fmt
                ),
            )


def _as_qtensor(data: torch.Tensor, fmt: fp8.Format) -> QTensor:
    return QTensor(data, torch.ones((), device=data.device), fmt=fmt)


def _block_cases() -> Iterator[Case]:
    for n, k, block in ((256, 256, (128, 128)), (200, 300, (128, 128)), (70, 100, (32, 64))):
        for dtype in DTYPES:
            for ue8m0 in (False, True):
                suffix = "-ue8m0" if ue8m0 else ""
                yield Case(
                    f"block{block[0]}x{block[1]}-n{n}-k{k}-{name_of(dtype)}{suffix}",
                    rows_of(n, k, dtype),
                    lambda x, block=block, ue8m0=ue8m0: quantize.per_block(x, block, ue8m0=ue8m0),
                    lambda x, block=block, ue8m0=ue8m0: reference.quantize_block(x, block, ue8m0),
                )
    corner = torch.zeros(256, 256, dtype=torch.bfloat16)
    corner[0, 0] = 1
    yield Case(
        "block128x128-zeros",
        lambda: corner.clone(),
        quantize.per_block,
        reference.quantize_block,
    )


def _stride_cases() -> Iterator[Case]:
    base = testing.random_rows(6 * 5 * 4, 192).view(6, 5, 4, 192)
    views = {
        "slice": base[..., 64:192],
        "transposed": base[:, :, 0].transpose(0, 1),
        "three-levels": base[::2, ::2, ::2, :128],
        "vector": base[0, 0, 0],
        "one-column": base[..., 7:8],
        "last-stride-2": base[..., ::2],
    }
    for name, view in views.items():
        for kind, kernel, expected in (
            ("token", quantize.per_token, reference.quantize_per_token),
            ("tensor", quantize.per_tensor, reference.quantize_per_tensor),
        ):
            yield Case(f"{kind}-strided-{name}", lambda view=view: view, kernel, expected)
        for layout in ("row", "column"):
            if view.ndim > 1 or layout == "row":
                yield group_case(
                    f"group32-{layout}-strided-{name}", lambda view=view: view, 32, layout
                )
