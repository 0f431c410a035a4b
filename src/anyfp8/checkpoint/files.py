"""The safetensors files of a folder: which tensors there are and where their bytes lie.

A file is an 8-byte little-endian header length, a JSON header (name -> dtype, shape, data_offsets)
and the data. Everything a plan needs is in the headers, so a 70B model is listed in milliseconds;
a tensor is memory-mapped when it is asked for, alone, and unmapped when it is dropped.

The surprise: real folders are broken more often than not (a cut download, a shard that never came,
a git-lfs pointer instead of the file), and the header shows it. All of that is checked here, before
anything is allocated.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from anyfp8.errors import CheckpointError

INDEX = "model.safetensors.index.json"
# the limit that the safetensors library itself keeps
MAX_HEADER_BYTES = 100_000_000
# below this a read is cheaper than a mapping
MAP_BYTES = 1 << 16

# safetensors name -> (torch name, bytes); torch versions differ in which of them they have
_DTYPES: dict[str, tuple[str, int]] = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class TensorSpec:
    """A tensor by name, safetensors dtype (such as "BF16") and shape, without its data."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.dtype, self.shape)


@dataclass(frozen=True)
class StoredTensor(TensorSpec):
    """A tensor in a file.

    Attributes:
        file: the file it lies in.
        start: offset of its first byte in the file.
        size: its bytes.
    """

    file: Path = field(default=Path())
    start: int = 0
    size: int = 0

    @property
    def nbytes(self) -> int:
        return self.size


def nbytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor of a safetensors dtype."""
    return math.prod(shape) * _DTYPES[dtype][1]


def dtype_name(dtype: torch.dtype) -> str:
    """The safetensors name of a torch dtype. Raises CheckpointError where there is none."""
    for name, (torch_name, _) in _DTYPES.items():
        if getattr(torch, torch_name, None) == dtype:
            return name
    raise CheckpointError(
        "cannot store this dtype in safetensors",
        got=str(dtype),
        want=", ".join(_DTYPES),
        hint="cast the tensor first",
    )


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a safetensors name; uint8 for 8-bit floats that this torch lacks."""
    torch_name, size = _DTYPES[name]
    found = getattr(torch, torch_name, None)
    if found is None and size == 1:
        return torch.uint8
    if found is None:
        raise CheckpointError(
            f"this torch has no dtype for safetensors {name}",
            got=f"torch {torch.__version__}",
            want="torch >= 2.10",
            hint="pip install -U torch",
        )
    return found


@dataclass(frozen=True)
class TensorFiles:
    """All tensors of a folder (or of one file), in shard order.

    Attributes:
        path: the folder or file.
        tensors: name -> where it is, in the order of the shards and of their data.
        warnings: what is odd but harmless.
    """

    path: Path
    tensors: Mapping[str, StoredTensor]
    warnings: tuple[str, ...] = ()

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata of all files, read when asked for."""
        found: dict[str, str] = {}
        for file in dict.fromkeys(stored.file for stored in self.tensors.values()):
            with file.open("rb") as handle:
                length = int.from_bytes(handle.read(8), "little")
                entries = json.loads(handle.read(length)).get("__metadata__")
            if isinstance(entries, dict):
                found |= {key: text for key, text in entries.items() if isinstance(text, str)}
        return found

    def read(self, name: str) -> torch.Tensor:
        """One tensor, contiguous, on the CPU.

        Large ones are private mappings of their part of the file: writing to them does not reach
        the file, and their pages may be given back and read again.

        Raises:
            CheckpointError: no such tensor, a dtype that torch lacks, or a file cut meanwhile.
        """
        stored = self.tensors.get(name)
        if stored is None:
            raise CheckpointError(
                f"no tensor {name} in the checkpoint",
                got=f"{len(self.tensors)} other tensors",
                want="the name of one of them",
                hint="anyfp8 inspect FOLDER --layers lists the layers",
            )
        if stored.dtype not in _DTYPES:
            raise CheckpointError(
                f"cannot read {name} of {stored.file.name}",
                got=f"dtype {stored.dtype}",
                want=", ".join(_DTYPES),
            )
        dtype = torch_dtype(stored.dtype)
        descriptor = os.open(stored.file, os.O_RDONLY)
        try:
            size = os.fstat(descriptor).st_size
            # touching a mapping past the end of its file would kill the process
            if size < stored.start + stored.size:
                raise CheckpointError(
                    f"cannot read {stored.name} of {stored.file.name}",
                    got=f"{size} bytes",
                    want="the file as it was when its header was read",
                    hint="is something still writing it?",
                )
            aligned = stored.start % _DTYPES[stored.dtype][1] == 0
            if stored.size >= MAP_BYTES and aligned:
                raw = _map(descriptor, stored)
            else:
                raw = torch.empty(stored.size, dtype=torch.uint8)
                os.preadv(descriptor, [raw.numpy()], stored.start)
        finally:
            os.close(descriptor)
        return raw.view(dtype).reshape(stored.shape)


def _map(descriptor: int, stored: StoredTensor) -> torch.Tensor:
    skip = stored.start % mmap.ALLOCATIONGRANULARITY
    # the tensor keeps the mapping alive; a private one is writable, as torch expects
    mapping = mmap.mmap(
        descriptor, skip + stored.size, access=mmap.ACCESS_COPY, offset=stored.start - skip
    )
    return torch.frombuffer(mapping, dtype=torch.uint8, count=stored.size, offset=skip)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError naming file and position."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(
            f"cannot read {path.name}", got=str(error), want="a JSON object", hint=_lfs_hint(path)
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(
            f"cannot read {path.name}",
            got=type(content).__name__,
            want="a JSON object",
            hint="copy the file again from where the model came from",
        )
    return content


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, in the order of their data.

    Raises:
        CheckpointError: not a safetensors file, or one that is cut or inconsistent.
    """
    size = path.stat().st_size
    with path.open("rb") as handle:
        head = handle.read(8)
        length = int.from_bytes(head, "little")
        if len(head) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{path.name} is not a whole safetensors file",
                got=f"{size} bytes, of which the header alone wants {length}",
                want="an 8-byte header length, the header and the data",
                hint=_lfs_hint(path) or "copy or download it again",
            )
        raw = handle.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        found = [_entry(name, entry, path, 8 + length) for name, entry in header.items()]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{path.name} has a broken safetensors header",
            got=f"{type(error).__name__}: {error}",
            want="name -> dtype, shape, data_offsets",
            hint="copy or download it again",
        ) from error
    found.sort(key=lambda stored: (stored.start, stored.size))
    _check_layout(path, found, 8 + length, size)
    return {stored.name: stored for stored in found}


def _entry(name: str, entry: Any, path: Path, start: int) -> StoredTensor:
    dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not all(
        type(i) is int and i >= 0 for i in [*shape, begin, end]
    ):
        raise ValueError(f"tensor {name}: {entry}")
    return StoredTensor(name, dtype, tuple(shape), path, start + begin, end - begin)


def _check_layout(path: Path, found: list[StoredTensor], start: int, size: int) -> None:
    expected = start
    for stored in found:
        known = stored.dtype in _DTYPES
        fits = not known or nbytes_of(stored.dtype, stored.shape) == stored.size
        if stored.start != expected or not fits:
            raise CheckpointError(
                f"{path.name}: the header is inconsistent at tensor {stored.name}",
                got=f"{stored.dtype} {list(stored.shape)} in {stored.size} bytes at {stored.start}",
                want=f"tensors that follow each other, this one at byte {expected}",
                hint="copy or download it again",
            )
        expected += stored.size
    if expected != size:
        last = next((s.name for s in found if s.start + s.size > size), "")
        raise CheckpointError(
            f"{path.name} is {'truncated' if size < expected else 'too long'}",
            got=f"{size} bytes" + (f", ends inside {last}" if last else ""),
            want=f"{expected} bytes",
            hint="copy or download it again",
        )


def _lfs_hint(path: Path) -> str:
    try:
        with path.open("rb") as handle:
            pointer = handle.read(24).startswith(b"version https://git-lfs")
    except OSError:
        return ""
    return "this is a git-lfs pointer, not the file: git lfs pull" if pointer else ""
