"""One GEMM contender of a benchmark, and those of other libraries: their ops as calls.

The libraries come as shared objects in a folder (sglC.so, vllmC.so, fbgC.so: the extensions of
sglang-kernel, vLLM and FBGEMM) and as Python packages beside them (dg/deep_gemm, gemlite). An `add`
of `LIBRARIES` loads one and raises whatever loading raises. A contender is raced only where it does
the same arithmetic or a finer one; `Peer.beside` says why it is not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from anyfp8.problem import Scheme
from anyfp8.tools.gemm_operands import GROUP, Operands, rows_of
from anyfp8.tools.timing import Call

BF16 = torch.bfloat16
FP8 = torch.float8_e4m3fn

Calls = Callable[[int], list[Call]]

_FINENESS = {"tensor": 0, "token": 1, "group": 2}


@dataclass(frozen=True)
class Peer:
    """One contender of one op.

    Attributes:
        name: library and function. library: "torch", or where it comes from.
        op: "gemm" (quantized operands in) or "linear" (bf16 in, its quantizer included).
        weight, activation: granularity of the scales, see `Operands`.
        accumulate: "fast", "fp32_128" or "fp32".
        make: operands -> (m -> one call for each weight copy, returning [m, N] bf16).
        everywhere: shown beside schemes with other weight scales too.
    """

    name: str
    library: str
    op: str
    weight: str
    activation: str
    accumulate: str
    make: Callable[[Operands], Calls]
    everywhere: bool = False

    def beside(self, scheme: Scheme, accumulate: str) -> str:
        """Why it is shown but not raced against a scheme; "" where it is raced."""
        if self.weight == "dense":
            return "16-bit weights"
        if self.weight != scheme.weight and scheme.weight != "tensor":
            return f"{self.weight} weight scales"
        if scheme.activation == "none":
            return "" if self.activation == "none" else "quantizes activations"
        if self.activation == "none":
            return "weight-only"
        if _FINENESS[self.activation] < _FINENESS[scheme.activation]:
            return f"{self.activation} activation scales"
        # scales inside the sum over K take it out of the accumulator, whatever the mode
        if scheme.weight != "block" and self.accumulate != accumulate:
            return f"accumulates {self.accumulate}"
        return ""

    def shown(self, scheme: Scheme) -> bool:
        """Whether it belongs into a scheme's table at all."""
        finer = scheme.weight == "tensor" and self.weight == "channel"
        return self.everywhere or finer or self.weight == scheme.weight


def _new(o: Operands, m: int) -> torch.Tensor:
    return torch.empty(m, o.n, dtype=BF16, device=o.place)


def _codes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x, dtype=FP8), x.new_empty((len(x), 1), dtype=torch.float32)


def _row_pair(
    name: str,
    library: str,
    product: Callable[[Operands], Callable[..., torch.Tensor]],
    quantizer: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> list[Peer]:
    """The "gemm" and the "linear" of a per-token by per-channel kernel."""

    def gemm(o: Operands) -> Calls:
        run = product(o)

        def calls(m: int) -> list[Call]:
            q = rows_of(o.activations("token"), m)
            return [lambda w=w: run(q.data, q.scale, w.data) for w in o.weights("channel")]

        return calls

    def linear(o: Operands) -> Calls:
        run = product(o)
        return lambda m: [
            lambda w=w: run(*quantizer(o.x[:m]), w.data) for w in o.weights("channel")
        ]

    form = ("channel", "token", "fast")
    return [
        Peer(name, library, "gemm", *form, gemm),
        Peer(f"{name} + its quantizer", library, "linear", *form, linear),
    ]


def _sglang(root: Path) -> list[Peer]:
    torch.ops.load_library(str(root / "sglC.so"))
    multiply = torch.ops.sgl_kernel.fp8_scaled_mm.default
    token = torch.ops.sgl_kernel.sgl_per_token_quant_fp8.default

    def product(o: Operands) -> Callable[..., torch.Tensor]:
        sw = o.weights("channel")[0].scale.contiguous()
        return lambda q, sx, w: multiply(q, w.t(), sx, sw, BF16, None)

    def quantizer(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, s = _codes(x)
        token(x, q, s)
        return q, s

    return _row_pair("sglang fp8_scaled_mm", "sglang-kernel", product, quantizer)


# vLLM's number for float8_e4m3fn (vllm/scalar_type.py), and how Marlin deals out its scales
_MARLIN_E4M3 = 2814749767172868
_MARLIN_SCALES = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]


def _vllm(root: Path) -> list[Peer]:
    torch.ops.load_library(str(root / "vllmC.so"))
    ops = torch.ops._C
    multiply = ops.cutlass_scaled_mm.default
    token = ops.dynamic_per_token_scaled_fp8_quant.default

    def product(o: Operands) -> Callable[..., torch.Tensor]:
        sw = o.weights("channel")[0].scale.view(1, -1)

        def run(q: torch.Tensor, sx: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            y = _new(o, len(q))
            multiply(y, q, w.t(), sx, sw, None)
            return y

        return run

    def quantizer(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, s = _codes(x)
        token(q, x, s, None)
        return q, s

    def block(o: Operands) -> Calls:
        sw = o.weights("block")[0].scale.t()

        def calls(m: int) -> list[Call]:
            q = rows_of(o.activations("group"), m)
            sx = q.scale.t().contiguous().t()

            def run(w: torch.Tensor) -> torch.Tensor:
                y = _new(o, m)
                multiply(y, q.data, w.t(), sx, sw, None)
                return y

            return [lambda w=w: run(w.data) for w in o.weights("block")]

        return calls

    pair = _row_pair("vllm cutlass_scaled_mm", "vllm", product, quantizer)
    group = Peer("vllm cutlass block", "vllm", "gemm", "block", "group", "fp32_128", block)
    return [*pair, group, _marlin()]


def _marlin() -> Peer:
    ops = torch.ops._C

    def make(o: Operands) -> Calls:
        n, k, first = o.n, o.k, o.weights("channel")[0]
        none = torch.empty(0, dtype=torch.int32, device=o.place)
        words = first.data.view(torch.int32).t().contiguous()
        packed = ops.gptq_marlin_repack.default(words, none, k, n, 8, False)
        ws = [packed] + [packed.clone() for _ in range(o.copies - 1)]
        sw = first.scale.view(-1, 32)[:, _MARLIN_SCALES].reshape(1, n).to(BF16)
        # the kernel decodes e4m3 by moving bits into bf16, which leaves the exponent 120 short
        sw = (sw.float() * 2.0**120).to(BF16).contiguous()
        sms = torch.cuda.get_device_properties(o.place).multi_processor_count
        locks = torch.zeros(sms, dtype=torch.int32, device=o.place)
        multiply = ops.marlin_gemm.default

        def calls(m: int) -> list[Call]:
            x = o.x[:m]

            def run(w: torch.Tensor) -> torch.Tensor:
                unused = (None,) * 5
                form = (_MARLIN_E4M3, m, n, k, True, False, True, False)
                return multiply(x, None, w, None, sw, *unused, locks, *form)

            return [lambda w=w: run(w) for w in ws]

        return calls

    form = ("linear", "channel", "none", "fp32")
    return Peer("vllm marlin w8a16", "vllm", *form, make, everywhere=True)


def _fbgemm(root: Path) -> list[Peer]:
    torch.ops.load_library(str(root / "fbgC.so"))
    ops = torch.ops.fbgemm
    multiply, grouped = ops.f8f8bf16_rowwise.default, ops.f8f8bf16_groupwise.default
    per_row = ops.quantize_fp8_per_row.default

    def product(o: Operands) -> Callable[..., torch.Tensor]:
        sw = o.weights("channel")[0].scale.view(-1)
        return lambda q, sx, w: multiply(q, w, sx.view(-1), sw, None, True)

    def block(o: Operands) -> Calls:
        sw = o.weights("block")[0].scale.t().contiguous()

        def calls(m: int) -> list[Call]:
            q = rows_of(o.activations("group"), m)
            sx = q.scale.t().contiguous()
            return [lambda w=w: grouped(q.data, w.data, sx, sw) for w in o.weights("block")]

        return calls

    pair = _row_pair(
        "fbgemm f8f8bf16_rowwise", "fbgemm", product, lambda x: per_row(x, None, None, None, False)
    )
    group = Peer("fbgemm groupwise", "fbgemm", "gemm", "block", "group", "fp32_128", block)
    return [*pair, group]


def _deep_gemm(root: Path) -> list[Peer]:
    """Its kernels are compiled by nvcc at first use, into DG_JIT_CACHE_DIR."""
    _importable(root / "dg")
    import deep_gemm

    def call(o: Operands, q: torch.Tensor, sx: torch.Tensor, w: Any) -> torch.Tensor:
        y = _new(o, len(q))
        deep_gemm.fp8_gemm_nt((q, sx), (w.data, w.scale), y)
        return y

    def gemm(o: Operands) -> Calls:
        def calls(m: int) -> list[Call]:
            q = rows_of(o.activations("group"), m)
            sx = deep_gemm.get_mn_major_tma_aligned_tensor(q.scale.contiguous())
            return [lambda w=w: call(o, q.data, sx, w) for w in o.weights("block")]

        return calls

    name, form = "deep_gemm fp8_gemm_nt", ("block", "group", "fp32_128")
    peers = [Peer(name, "deep_gemm", "gemm", *form, gemm, everywhere=True)]
    try:
        group = torch.ops.sgl_kernel.sgl_per_token_group_quant_8bit_v2.default
    except AttributeError:
        # it has no quantizer of its own
        return peers

    def linear(o: Operands) -> Calls:
        def run(x: torch.Tensor, w: Any) -> torch.Tensor:
            m = len(x)
            q = torch.empty_like(x, dtype=FP8)
            aligned = -(-m // 4) * 4
            sx = torch.empty(o.k // GROUP, aligned, device=o.place).t()[:m]
            group(x, q, sx, GROUP, 1e-10, -448.0, 448.0, False, False, None)
            return call(o, q, sx, w)

        return lambda m: [lambda w=w: run(o.x[:m], w) for w in o.weights("block")]

    name += " + sglang's quantizer"
    return [*peers, Peer(name, "deep_gemm", "linear", *form, linear, everywhere=True)]


def _gemlite(root: Path) -> list[Peer]:
    _importable(root / "gemlite")
    from gemlite.helper import A16W8_FP8, A8W8_fp8_dynamic

    def make(helper: Any, **options: Any) -> Callable[[Operands], Calls]:
        def layers(o: Operands) -> Calls:
            found = [
                helper(device=str(o.place), dtype=BF16, **options).from_weights(
                    w.data, None, scales=w.scale
                )
                for w in o.weights("channel")
            ]
            return lambda m: [lambda each=each: each.forward(o.x[:m]) for each in found]

        return layers

    return [
        Peer("gemlite a8w8", "gemlite", "linear", "channel", "token", "fast",
             make(A8W8_fp8_dynamic)),
        Peer("gemlite a16w8", "gemlite", "linear", "channel", "none", "fp32",
             make(A16W8_FP8, post_scale=True), everywhere=True),
    ]  # fmt: skip


def _importable(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


# those that tune themselves for minutes are in SLOW too
LIBRARIES: dict[str, Callable[[Path], list[Peer]]] = {
    "sglang-kernel": _sglang,
    "vllm": _vllm,
    "fbgemm": _fbgemm,
    "deep_gemm": _deep_gemm,
    "gemlite": _gemlite,
}
SLOW = ("gemlite",)
