"""GGUF bytes → metadata and where each tensor lies; used by `gguf_source`.

A header of counts, typed key-value pairs, names and offsets of tensors, then their blocks, aligned.
The `gguf` package reads the same, an object for each token of the vocabulary: 3 s where this takes
a tenth; it still dequantizes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# the format's number of a value's type -> struct's letter
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufTensor:
    """One tensor as it lies in the file.

    Attributes:
        shape: outermost dimension first.
        tensor_type: gguf's GGMLQuantizationType.
        data: uint8, the last dimension in bytes; a view of the file.
    """

    name: str
    shape: tuple[int, ...]
    tensor_type: Any
    data: np.ndarray


@dataclass(frozen=True)
class GgufFile:
    metadata: Mapping[str, Any]
    tensors: tuple[GgufTensor, ...]


def read_gguf(path: Path) -> GgufFile:
    """Read the header of a GGUF file; tensors are mapped, not read.

    Raises:
        ValueError: not a whole GGUF file of version 2 or 3, little-endian.
        ImportError: the gguf package is missing.
        OSError: the file cannot be opened.
    """
    from gguf import GGMLQuantizationType
    from gguf.quants import quant_shape_to_byte_shape

    mapped = np.memmap(path, mode="r")
    header = _Header(mapped.data)
    if bytes(header.take(4)) != b"GGUF":
        raise ValueError("does not begin with GGUF")
    version = header.scalar("I")
    if version not in (2, 3):
        raise ValueError(f"GGUF version {version}, not 2 or 3")
    tensors, pairs = header.scalar("Q"), header.scalar("Q")
    metadata = {header.string(): header.value(header.scalar("I")) for _ in range(pairs)}
    infos = []
    for _ in range(tensors):
        name = header.string()
        shape = tuple(header.scalar("Q") for _ in range(header.scalar("I")))[::-1]
        infos.append((name, shape, GGMLQuantizationType(header.scalar("I")), header.scalar("Q")))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"aligns tensors to {alignment!r} bytes")
    start = -(-header.at // alignment) * alignment
    found = []
    for name, shape, kind, offset in infos:
        stored = quant_shape_to_byte_shape(shape, kind)
        size = math.prod(stored)
        data = mapped[start + offset : start + offset + size]
        if data.size != size:
            raise ValueError(f"ends inside {name}")
        found.append(GgufTensor(name, shape, kind, data.reshape(stored)))
    return GgufFile(metadata, tuple(found))


class _Header:
    """Reads values one after the other; ValueError past the end."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.at = 0

    def take(self, size: int) -> memoryview:
        part = self._data[self.at : self.at + size]
        if len(part) != size:
            raise ValueError("ends inside its header")
        self.at += size
        return part

    def scalar(self, letter: str) -> Any:
        form = f"<{letter}"
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def string(self) -> str:
        return str(self.take(self.scalar("Q")), "utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            inner, count = self.scalar("I"), self.scalar("Q")
            if count > len(self._data):
                raise ValueError("has an array longer than the file")
            if inner == _ARRAY:
                raise ValueError("has an array of arrays")
            if inner in _SCALARS:
                form = f"<{count}{_SCALARS[inner]}"
                return list(struct.unpack(form, self.take(struct.calcsize(form))))
            return [self.value(inner) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"has a value of the unknown type {kind}")
        return self.scalar(_SCALARS[kind])
