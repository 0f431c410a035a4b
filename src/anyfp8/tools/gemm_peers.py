"""Whom a GEMM benchmark races ours against: torch's own products and the libraries that load here.

torch is always there; what does not load is left out, with its reason.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from anyfp8 import quantize
from anyfp8.tools.gemm_libraries import BF16, FP8, LIBRARIES, SLOW, Calls, Peer
from anyfp8.tools.gemm_operands import GROUP, Operands, rows_of
from anyfp8.tools.timing import Call


def baselines() -> list[Peer]:
    """torch: row-wise and per-tensor in both accumulate modes, block-wise, and bf16."""
    peers = []
    for op in ("gemm", "linear"):
        form = (op, "dense", "none", "fp32")
        peers.append(Peer("torch bf16", "torch", *form, _torch_bf16, everywhere=True))
        for fast in (True, False):
            mode, word = ("fast", "fast") if fast else ("fp32_128", "slow")
            for weight, activation in (("channel", "token"), ("tensor", "tensor")):
                make = _torch_scaled(op, weight, activation, fast)
                kind = "row" if weight == "channel" else "tensor"
                every = weight == "channel" or fast
                peers.append(
                    Peer(
                        f"torch {kind} {word}", "torch", op, weight, activation, mode, make,
                        everywhere=every,
                    )
                )  # fmt: skip
        make = _torch_scaled(op, "block", "group", False)
        peers.append(Peer("torch block", "torch", op, "block", "group", "fp32_128", make))
    return peers


def find_peers(folder: str | Path | None, slow: bool = False) -> tuple[list[Peer], dict[str, str]]:
    """The libraries that load here.

    Args:
        folder: where the shared objects and packages lie; None finds nothing.
        slow: include those that tune themselves for minutes.

    Returns:
        (peers, {library: why it is missing}).
    """
    if folder is None:
        return [], {"all": "no folder of peers was given"}
    root = Path(folder)
    peers: list[Peer] = []
    missing: dict[str, str] = {}
    for library, add in LIBRARIES.items():
        if library in SLOW and not slow:
            missing[library] = "tunes itself for minutes; raced on request (--slow-peers)"
            continue
        try:
            peers += add(root)
        except Exception as error:  # an optional library may fail to load in any way
            missing[library] = (str(error) or repr(error)).splitlines()[0][:200]
    return peers, missing


def _quantizer(activation: str, o: Operands) -> Callable[[torch.Tensor], Any]:
    """Ours, as torch's products want its scales."""
    if activation == "token":
        return quantize.per_token
    if activation == "tensor":
        scale = o.input_scale
        return lambda x: quantize.per_tensor(x, scale)
    return lambda x: quantize.per_group(x, GROUP, layout="tma")


def _torch_scaled(op: str, weight: str, activation: str, fast: bool) -> Callable[[Operands], Calls]:
    def make(o: Operands) -> Calls:
        copies = o.weights(weight)
        ws = [w.data.t() for w in copies]
        sw = copies[0].scale
        sw = sw if weight == "tensor" else sw.reshape(1, -1) if weight == "channel" else sw.t()

        def product(q: Any, sx: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return torch._scaled_mm(
                q.data.view(FP8), w, sx, sw, out_dtype=BF16, use_fast_accum=fast
            )

        def calls(m: int) -> list[Call]:
            if op == "linear":
                x, quantizer = o.x[:m], _quantizer(activation, o)

                def linear(w: torch.Tensor) -> torch.Tensor:
                    q = quantizer(x)
                    return product(q, q.scale, w)

                return [lambda w=w: linear(w) for w in ws]
            q = rows_of(o.activations(activation), m)
            sx = q.scale.t().contiguous().t() if activation == "group" else q.scale
            return [lambda w=w: product(q, sx, w) for w in ws]

        return calls

    return make


def _torch_bf16(o: Operands) -> Calls:
    ws = o.dense()
    return lambda m: [lambda w=w: torch.nn.functional.linear(o.x[:m], w) for w in ws]
