"""Scheme: how a layer is quantized. Problem: one call to place. QTensor: codes with their scales.

A checkpoint gives a layer its Scheme; a call with M rows makes a Problem of it; `select` answers
the Problem with a Choice. Scheme and Problem are hashable and have one canonical string, which is
also what tuned tables, logs and the torch op use.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from anyfp8 import fp8
from anyfp8.errors import InputError

WEIGHTS = ("tensor", "channel", "block")
ACTIVATIONS = ("none", "tensor", "token", "group")
ACCUMULATES = ("auto", "fast", "fp32_128")
NUMERICS = ("scheme", "at_least")
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class Scheme:
    """How the weights and the activations of a linear layer are quantized.

    Attributes:
        weight: one scale per "tensor", output "channel" (row of W) or "block".
        activation: "none" (weight-only), one scale per "tensor", "token" (row of x) or "group" of
            K.
        dynamic: activation scales are computed at run time; False with "tensor" means a static
            `input_scale` from calibration. Always False with "none".
        block: (rows, columns) of one weight block, only with weight "block".
        group: length of one activation group along K, only with activation "group".
        scale_format: "float32", or "ue8m0" (powers of two) for block and group scales.
    """

    weight: str = "tensor"
    activation: str = "none"
    dynamic: bool = False
    block: tuple[int, int] | None = None
    group: int | None = None
    scale_format: str = "float32"

    def __post_init__(self) -> None:
        complaint = self._complaint()
        if complaint:
            raise InputError("not a quantization scheme", got=repr(self), want=complaint)

    def _complaint(self) -> str:
        if self.weight not in WEIGHTS or self.activation not in ACTIVATIONS:
            return f"weight in {WEIGHTS}, activation in {ACTIVATIONS}"
        if (self.weight == "block") != (self.block is not None):
            return "block=(rows, columns) with weight='block', and only there"
        if (self.activation == "group") != (self.group is not None):
            return "group=columns with activation='group', and only there"
        if min(self.block or (1, 1)) < 1 or (self.group is not None and self.group < 1):
            return "positive block and group sizes"
        if self.activation in ("token", "group") and not self.dynamic:
            return "dynamic=True with per-token and per-group activations"
        if self.activation == "none" and self.dynamic:
            return "dynamic=False with weight-only"
        if self.scale_format not in ("float32", "ue8m0"):
            return "scale_format 'float32' or 'ue8m0'"
        if self.scale_format == "ue8m0" and self.block is None and self.group is None:
            return "scale_format 'ue8m0' with block or group scales, and only there"
        return ""

    @property
    def name(self) -> str:
        """Canonical name: `w8a8-tensor-static`, `w8a8-block128x128-group128`, `w8a16-channel`."""
        weight = self.weight if self.block is None else "block{}x{}".format(*self.block)
        suffix = "" if self.scale_format == "float32" else f"-{self.scale_format}"
        if self.activation == "none":
            return f"w8a16-{weight}{suffix}"
        if self.activation == "tensor":
            activation = "dynamic" if self.dynamic else "static"
        else:
            activation = self.activation if self.group is None else f"group{self.group}"
        return f"w8a8-{weight}-{activation}{suffix}"

    @classmethod
    def parse(cls, name: str) -> Scheme:
        """The scheme of a canonical name. Raises InputError for any other text."""
        parts = name.split("-")
        try:
            scale_format = parts.pop() if parts[-1] == "ue8m0" else "float32"
            kind, weight = parts[0], parts[1]
            activation = parts[2] if len(parts) > 2 else "none"
            block = group = None
            if weight.startswith("block"):
                rows, columns = weight[len("block") :].split("x")
                weight, block = "block", (int(rows), int(columns))
            if activation.startswith("group"):
                activation, group = "group", int(activation[len("group") :])
            dynamic = activation in ("dynamic", "token", "group")
            activation = "tensor" if activation in ("static", "dynamic") else activation
            scheme = cls(weight, activation, dynamic, block, group, scale_format)
            if (kind == "w8a16") != (activation == "none") or scheme.name != name:
                raise ValueError(name)
        except (IndexError, ValueError) as error:
            raise InputError(
                "not the name of a quantization scheme",
                got=repr(name),
                want="such as w8a8-tensor-static, w8a8-channel-token, w8a8-block128x128-group128",
            ) from error
        return scheme

    @property
    def weight_only(self) -> Scheme:
        """The same weights without activation quantization."""
        scale_format = self.scale_format if self.block else "float32"
        return replace(
            self, activation="none", dynamic=False, group=None, scale_format=scale_format
        )

    def weight_scale_shape(self, n: int, k: int) -> tuple[int, ...]:
        """Shape of the canonical fp32 weight scale: [], [N, 1] or [ceil(N/bn), ceil(K/bk)]."""
        if self.weight == "tensor":
            return ()
        if self.block is None:
            return (n, 1)
        return (-(-n // self.block[0]), -(-k // self.block[1]))


@dataclass(frozen=True)
class Problem:
    """One call to place on a backend: y[M, N] = (x · Wᵀ) · scales (+ bias).

    Attributes:
        op: "linear" (x arrives in 16 bits, quantization included) or "gemm" (x arrives quantized).
        scheme: of the layer.
        m, n, k: rows of x, rows of W, columns of both.
        x_dtype, out_dtype: "bf16", "fp16" or "fp32".
        bias: whether one is added.
        accumulate: "auto", "fast" or "fp32_128"; resolved before a table is asked.
        numerics: "scheme" (the arithmetic the checkpoint asks for) or "at_least" (weight-only too).
    """

    op: str
    scheme: Scheme
    m: int
    n: int
    k: int
    x_dtype: str = "bf16"
    out_dtype: str = "bf16"
    bias: bool = False
    accumulate: str = "auto"
    numerics: str = "scheme"

    def __post_init__(self) -> None:
        if self.op not in ("linear", "gemm"):
            raise InputError("not an op", got=self.op, want="'linear' or 'gemm'")
        if min(self.m, self.n, self.k) < 0 or self.n == 0 or self.k == 0:
            raise InputError(
                "not a matrix problem",
                got=f"m={self.m}, n={self.n}, k={self.k}",
                want="m >= 0, n >= 1, k >= 1",
            )
        if self.x_dtype not in DTYPES or self.out_dtype not in DTYPES:
            raise InputError(
                "not a dtype of activations",
                got=f"x_dtype={self.x_dtype!r}, out_dtype={self.out_dtype!r}",
                want=", ".join(DTYPES),
            )
        if self.accumulate not in ACCUMULATES or self.numerics not in NUMERICS:
            raise InputError(
                "not an arithmetic mode",
                got=f"accumulate={self.accumulate!r}, numerics={self.numerics!r}",
                want=f"accumulate in {ACCUMULATES}, numerics in {NUMERICS}",
            )

    @property
    def key(self) -> str:
        """Canonical string; `from_key` reads it back."""
        bias = "bias" if self.bias else "nobias"
        dtypes = f"{self.x_dtype}>{self.out_dtype}"
        shape = f"{self.m}x{self.n}x{self.k}"
        return "|".join(
            (self.op, self.scheme.name, shape, dtypes, bias, self.accumulate, self.numerics)
        )

    @classmethod
    def from_key(cls, key: str) -> Problem:
        """The problem of a canonical string. Raises InputError for any other text."""
        try:
            op, scheme, shape, dtypes, bias, accumulate, numerics = key.split("|")
            m, n, k = (int(part) for part in shape.split("x"))
            x_dtype, out_dtype = dtypes.split(">")
            if bias not in ("bias", "nobias"):
                raise ValueError(bias)
        except ValueError as error:
            raise InputError(
                "not the key of a problem",
                got=repr(key),
                want="such as gemm|w8a8-channel-token|16x4096x4096|bf16>bf16|nobias|fast|scheme",
            ) from error
        return cls(
            op,
            Scheme.parse(scheme),
            m,
            n,
            k,
            x_dtype,
            out_dtype,
            bias == "bias",
            accumulate,
            numerics,
        )


@dataclass(frozen=True, eq=False)
class QTensor:
    """FP8 data with the scales that give its values back: x ≈ decode(data) · scale.

    Attributes:
        data: [..., K] of the torch FP8 dtype (or uint8 where torch lacks it).
        scale: fp32; [] (tensor), [..., 1] (token, channel), [..., ceil(K/g)] (group, any strides)
            or [ceil(N/bn), ceil(K/bk)] (block); int32 of four UE8M0 exponents when `packed`.
        block: (1, g) for groups, (bn, bk) for blocks, None when a scale covers whole rows or all.
        fmt: format of `data`.
        packed: whether `scale` holds packed UE8M0 exponents.
    """

    data: torch.Tensor
    scale: torch.Tensor
    block: tuple[int, int] | None = None
    fmt: fp8.Format = fp8.E4M3FN
    packed: bool = False

    @property
    def codes(self) -> torch.Tensor:
        """The bytes: [..., K] uint8 view of `data`."""
        return self.data if self.data.dtype == torch.uint8 else self.data.view(torch.uint8)
