"""CheckpointWriter: tensors to safetensors shards, all or nothing.

Names, dtypes and shapes are told first, so the shards, their headers and the bytes that the disk
must hold are known before the first tensor; each tensor then goes straight to its place in its file
and nothing is kept. Everything is written beside the target under a temporary name, synced and
renamed: the target holds the whole checkpoint or what it held before.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from anyfp8.checkpoint.files import INDEX, StoredTensor, TensorSpec, dtype_name, nbytes_of
from anyfp8.errors import CheckpointError, InputError

SHARD_BYTES = 5_000_000_000


def check_output(out: str | Path, *, overwrite: bool = False) -> Path:
    """The folder to write, checked before any long work.

    Args:
        out: absent or empty, unless `overwrite`.

    Raises:
        CheckpointError: a file, a folder that holds something, or a parent that is not writable.
    """
    folder = Path(out).expanduser().absolute()
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(
            f"cannot write to {out}", got="a file", want="a folder", hint="name another folder"
        )
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise CheckpointError(
            f"{out} is not empty",
            got=", ".join(sorted(p.name for p in folder.iterdir())[:4]),
            want="an empty folder, or a new name",
            hint="overwrite=True (--overwrite) replaces it once the new one is complete",
        )
    if not os.access(_existing(folder), os.W_OK):
        raise CheckpointError(
            f"cannot write to {out}",
            got=f"{_existing(folder)} is not writable",
            want="a folder that you may write to",
            hint="name another one, or chmod this one",
        )
    return folder


class CheckpointWriter:
    """Writes one checkpoint folder; a context manager.

    Leaving it without an error checks that every tensor came, syncs and renames; leaving it with
    one removes what was written.

    Args:
        out: the folder; absent or empty, unless `overwrite`.
        specs: name, dtype and shape of every tensor, in the order of the shards.
        shard_bytes: largest shard; a single tensor may exceed it.
        overwrite: replace a folder that holds something.

    Attributes:
        folder: where files go until the end; further files may be put there.
        nbytes: bytes of all tensors.

    Raises:
        CheckpointError: the folder cannot be written or the disk is too full.
        InputError: two tensors of one name.
    """

    def __init__(
        self,
        out: str | Path,
        specs: Iterable[TensorSpec],
        *,
        shard_bytes: int = SHARD_BYTES,
        overwrite: bool = False,
    ) -> None:
        self.out = check_output(out, overwrite=overwrite)
        self.folder = self.out.parent / f".{self.out.name}.{uuid.uuid4().hex[:8]}.partial"
        self._shards = _shards(list(specs), shard_bytes)
        self._places = {s.name: s for shard in self._shards.values() for s in shard}
        self.nbytes = sum(place.size for place in self._places.values())
        self._missing = dict.fromkeys(self._places)
        self._handles: dict[Path, FileIO] = {}
        self._check_space()

    def __enter__(self) -> CheckpointWriter:
        with _disk_errors(self.out):
            self.folder.mkdir(parents=True)
        return self

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor to its place.

        Raises:
            InputError: a tensor that was not announced so, or one that was written already.
            CheckpointError: the disk is full or fails.
        """
        place = self._places.get(name)
        if place is None or name not in self._missing:
            raise InputError(
                f"cannot write the tensor {name}",
                got="written already" if place else "not announced",
                want="every announced tensor once",
            )
        found = (dtype_name(tensor.dtype), tuple(tensor.shape))
        if found != (place.dtype, place.shape):
            raise InputError(
                f"cannot write the tensor {name}",
                got=f"{found[0]} {list(found[1])}",
                want=f"{place.dtype} {list(place.shape)} as announced",
            )
        with _disk_errors(self.out):
            handle = self._open(place.file)
            handle.seek(place.start)
            flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            view = memoryview(flat.numpy())
            while view:
                view = view[handle.write(view) :]
        del self._missing[name]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            for handle in self._handles.values():
                handle.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _open(self, file: Path) -> FileIO:
        if file not in self._handles:
            header = _header(self._shards[file])
            # unbuffered: a full disk is reported by the write that meets it, not at close
            handle = (self.folder / file).open("xb", buffering=0)
            self._handles[file] = handle
            handle.write(header)
        return self._handles[file]

    def _finish(self) -> None:
        if self._missing:
            raise InputError(
                f"{len(self._missing)} announced tensors never came",
                got=f"none for {next(iter(self._missing))}",
                want="every announced tensor",
            )
        with _disk_errors(self.out):
            if len(self._shards) > 1:
                self._write_index()
            for handle in self._handles.values():
                handle.close()
            for file in self.folder.iterdir():
                _sync(file)
            _sync(self.folder)
            self._rename()
            _sync(self.out.parent)

    def _write_index(self) -> None:
        index = {
            "metadata": {"total_size": self.nbytes},
            "weight_map": {name: str(self._places[name].file) for name in sorted(self._places)},
        }
        (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _rename(self) -> None:
        old = self.folder.with_suffix(".old")
        if self.out.exists():
            self.out.rename(old)
        try:
            self.folder.rename(self.out)
        except OSError:
            if old.exists():
                old.rename(self.out)
            raise
        shutil.rmtree(old, ignore_errors=True)

    def _check_space(self) -> None:
        free = shutil.disk_usage(_existing(self.out)).free
        if free < self.nbytes:
            raise _disk_full(self.out, f"{free:,} bytes free", f"{self.nbytes:,} bytes")


def _shards(specs: list[TensorSpec], shard_bytes: int) -> dict[Path, list[StoredTensor]]:
    """File -> its tensors with their places; wider dtypes first, so that all stay aligned."""
    if shard_bytes < 1:
        raise InputError("not a shard size", got=str(shard_bytes), want="bytes, at least 1")
    if len({spec.name for spec in specs}) != len(specs):
        raise InputError("two tensors of one name", want="names that differ")
    groups: list[list[TensorSpec]] = [[]]
    held = 0
    for spec in specs:
        if groups[-1] and held + spec.nbytes > shard_bytes:
            groups.append([])
            held = 0
        groups[-1].append(spec)
        held += spec.nbytes
    total = len(groups)
    shards: dict[Path, list[StoredTensor]] = {}
    for number, group in enumerate(groups, 1):
        name = "model" if total == 1 else f"model-{number:05d}-of-{total:05d}"
        file = Path(f"{name}.safetensors")
        group.sort(key=lambda spec: -nbytes_of(spec.dtype, (1,)))
        # the header's length does not depend on where it says that it ends
        shards[file] = _placed(group, file, len(_header(_placed(group, file, 0))))
    return shards


def _placed(group: list[TensorSpec], file: Path, start: int) -> list[StoredTensor]:
    placed = []
    for spec in group:
        size = spec.nbytes
        placed.append(StoredTensor(spec.name, spec.dtype, spec.shape, file, start, size))
        start += size
    return placed


def _header(placed: list[StoredTensor]) -> bytes:
    start = placed[0].start if placed else 0
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for t in placed:
        offsets = [t.start - start, t.start - start + t.size]
        header[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": offsets}
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw


@contextmanager
def _disk_errors(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _disk_full(out, str(error), "enough free space") from error
        raise CheckpointError(
            f"cannot write {out}",
            got=str(error),
            want="a folder that can be written to",
            hint="name another folder",
        ) from error


def _disk_full(out: Path, got: str, want: str) -> CheckpointError:
    return CheckpointError(
        f"not enough disk space for {out}",
        got=got,
        want=want,
        hint="free some, or write to another disk; nothing was left behind",
    )


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def specs_of(tensors: Mapping[str, torch.Tensor]) -> list[TensorSpec]:
    """What `CheckpointWriter` must be told of tensors in memory."""
    return [TensorSpec(name, dtype_name(t.dtype), tuple(t.shape)) for name, t in tensors.items()]
