"""Other libraries' quantizers behind one call: (x, q, s) -> None or a new (q, s).

They come as shared objects in a folder (sglC.so, vllmC.so, fbgC.so: the extensions of
sglang-kernel, vLLM and FBGEMM) or as an importable gemlite. What is missing is left out, with its
reason.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Quantize = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]


@dataclass(frozen=True)
class Peer:
    """A quantizer of another library.

    Attributes:
        name: library and function.
        kind: "token", "group" (row-major scales) or "group-column" (transposed scales).
        call: quantizes x into q and s, or returns new ones.
        comparable: bytes are expected to equal ours up to the differences the tests explain.
        allocates: returns new tensors. In a graph they are the same memory in each call and stay in
            L2, so such a peer races our own allocating call.
    """

    name: str
    kind: str
    call: Quantize
    comparable: bool = True
    allocates: bool = False


def find_peers(folder: str | Path | None) -> tuple[list[Peer], dict[str, str]]:
    """The peers that load here.

    Args:
        folder: where the shared objects lie; None finds nothing.

    Returns:
        (peers, {library: why it is missing}).
    """
    peers: list[Peer] = []
    missing: dict[str, str] = {}
    if folder is None:
        return peers, {"all": "no folder of peers was given"}
    for file, library, add in (
        ("sglC.so", "sglang-kernel", _sglang),
        ("vllmC.so", "vllm", _vllm),
        ("fbgC.so", "fbgemm", _fbgemm),
    ):
        try:
            torch.ops.load_library(str(Path(folder) / file))
            peers += add()
        except (OSError, AttributeError, RuntimeError) as error:
            missing[library] = str(error).splitlines()[0][:200]
    try:
        peers += _gemlite(Path(folder) / "gemlite")
    except Exception as error:  # an optional package may fail to import in any way
        missing["gemlite"] = repr(error)[:200]
    return peers, missing


def _sglang() -> list[Peer]:
    ops = torch.ops.sgl_kernel
    group = ops.sgl_per_token_group_quant_8bit_v2.default

    def grouped(x: torch.Tensor, q: torch.Tensor, s: torch.Tensor) -> None:
        group(x, q, s, 128, 1e-10, -448.0, 448.0, False, False, None)

    return [
        Peer("sglang per_token", "token", ops.sgl_per_token_quant_fp8.default),
        Peer("sglang group_v2", "group", grouped),
        Peer("sglang group_v2", "group-column", grouped),
    ]


def _vllm() -> list[Peer]:
    ops = torch.ops._C
    token = ops.dynamic_per_token_scaled_fp8_quant.default
    group = ops.per_token_group_fp8_quant.default
    rest = (128, 1e-10, -448.0, 448.0, False)
    return [
        Peer("vllm per_token", "token", lambda x, q, s: token(q, x, s, None)),
        Peer("vllm group", "group", lambda x, q, s: group(x, q, s, *rest, False, False)),
        Peer("vllm group", "group-column", lambda x, q, s: group(x, q, s, *rest, True, True)),
    ]


def _fbgemm() -> list[Peer]:
    op = torch.ops.fbgemm.quantize_fp8_per_row.default
    return [
        Peer(
            "fbgemm per_row",
            "token",
            lambda x, q, s: op(x, None, None, None, False),
            allocates=True,
        )
    ]


def _quick_bench(call: Callable[[], Any], quantiles: Any = None) -> Any:
    """Times a tile of a kernel that tunes itself, in 15 ms instead of 125: it has 8 for each M."""
    from triton.testing import do_bench

    return do_bench(call, warmup=3, rep=12, quantiles=quantiles)


def _gemlite(folder: Path) -> list[Peer]:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    from gemlite import quant_utils
    from gemlite.quant_utils import scale_activations_per_block, scale_activations_per_token

    for kernel in vars(quant_utils).values():
        if hasattr(kernel, "configs"):
            kernel.do_bench = _quick_bench
    dtype = torch.float8_e4m3fn
    return [
        Peer(
            "gemlite per_token",
            "token",
            lambda x, q, s: scale_activations_per_token(x, w_dtype=dtype),
            comparable=False,
            allocates=True,
        ),
        Peer(
            "gemlite per_block128",
            "group",
            lambda x, q, s: scale_activations_per_block(x, w_dtype=dtype),
            comparable=False,
            allocates=True,
        ),
    ]
