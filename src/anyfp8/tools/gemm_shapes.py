"""(N, K) of the linear layers that benchmarks run on, by model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anyfp8.errors import InputError

MS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class Shape:
    """A weight [n, k] and what it is called."""

    name: str
    n: int
    k: int


# merged as engines run them: q, k and v in one, gate and up in one
MODELS: dict[str, tuple[Shape, ...]] = {
    "qwen3-8b": (
        Shape("qkv", 6144, 4096),
        Shape("o", 4096, 4096),
        Shape("gate_up", 24576, 4096),
        Shape("down", 4096, 12288),
    ),
    "llama-3-70b": (
        Shape("qkv", 10240, 8192),
        Shape("o", 8192, 8192),
        Shape("gate_up", 57344, 8192),
        Shape("down", 8192, 28672),
    ),
    "llama-3-70b-tp8": (
        Shape("qkv", 1280, 8192),
        Shape("o", 8192, 1024),
        Shape("gate_up", 7168, 8192),
        Shape("down", 8192, 3584),
    ),
}


def parse_shapes(texts: Sequence[str]) -> list[Shape]:
    """Models' names and "N,K" or "NxK", in one text or several, to shapes.

    Raises:
        InputError: a text is neither, or a side is no positive multiple of 128.
    """
    found: list[Shape] = []
    for text in " ".join(texts).split():
        if text in MODELS:
            found += MODELS[text]
            continue
        sides = text.replace("x", ",").split(",")
        if len(sides) != 2 or not all(side.isdecimal() for side in sides):
            raise InputError(
                "not a shape", got=repr(text), want=f"N,K such as 6144,4096, or {', '.join(MODELS)}"
            )
        n, k = map(int, sides)
        if min(n, k) < 1 or n % 128 or k % 128:
            raise InputError("this shape cannot be raced", got=text, want="multiples of 128")
        found.append(Shape(f"{n}x{k}", n, k))
    return found
