"""folder → its tensors: the index, the single file, or the shards that their names make complete.

The surprise: a folder often holds more than one save. What the index does not name is not read, and
said; two files with one name and no index are an error, since either may be the stale one.
"""

from __future__ import annotations

import re
from pathlib import Path

from anyfp8.checkpoint.files import INDEX, StoredTensor, TensorFiles, read_header, read_json
from anyfp8.errors import CheckpointError


def list_tensors(path: Path) -> TensorFiles:
    """The tensors of a folder: its index, its single file or its shards.

    Args:
        path: a folder, or one safetensors file.

    Raises:
        CheckpointError: no safetensors there, a shard is absent or cut, two files hold one name, or
            the index and the files disagree.
    """
    if path.is_file():
        return TensorFiles(path, read_header(path))
    index = path / INDEX
    if index.is_file():
        return _from_index(path, index)
    files = sorted(path.glob("*.safetensors"))
    if path / "model.safetensors" in files:
        extra = [f.name for f in files if f.name != "model.safetensors"]
        warnings = (f"not read: {', '.join(extra)}",) if extra else ()
        return TensorFiles(path, read_header(path / "model.safetensors"), warnings)
    if not files:
        raise CheckpointError(
            f"no weights in {path.name}",
            got=", ".join(sorted(p.name for p in path.iterdir())[:8]) or "an empty folder",
            want="model.safetensors, or shards with their index",
            hint="PyTorch .bin files: save them as safetensors first",
        )
    _check_shard_names(files)
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, stored in read_header(file).items():
            if name in tensors:
                raise CheckpointError(
                    f"two files hold the tensor {name}",
                    got=f"{tensors[name].file.name} and {file.name}, and no {INDEX}",
                    want="one of them",
                    hint="remove the files that another save left over",
                )
            tensors[name] = stored
    return TensorFiles(path, tensors)


def _check_shard_names(files: list[Path]) -> None:
    present = {f.name for f in files}
    for file in files:
        match = re.fullmatch(r"(.*-)(\d+)(-of-)(\d+)(\.safetensors)", file.name)
        if not match:
            continue
        head, number, of, total, tail = match.groups()
        for i in range(1, int(total) + 1):
            wanted = f"{head}{i:0{len(number)}d}{of}{total}{tail}"
            if wanted not in present:
                raise CheckpointError(
                    f"the shard {wanted} is absent",
                    got=f"{len(files)} files, and no {INDEX}",
                    want=f"all {int(total)} shards",
                    hint="copy or download the missing ones",
                )


def _from_index(path: Path, index: Path) -> TensorFiles:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise CheckpointError(
            f"{INDEX} has no weight_map",
            got=repr(weight_map)[:80],
            want="tensor name -> file name",
            hint="copy the file again from where the model came from",
        )
    tensors: dict[str, StoredTensor] = {}
    unlisted: list[str] = []
    for shard in sorted(set(weight_map.values())):
        if Path(shard).is_absolute() or ".." in Path(shard).parts:
            raise CheckpointError(
                f"{INDEX} leads out of its folder",
                got=repr(shard),
                want="names of files in it",
                hint="get the checkpoint from a source that you trust",
            )
        if not (path / shard).is_file():
            lost = [name for name, file in weight_map.items() if file == shard]
            raise CheckpointError(
                f"the shard {shard} is absent",
                got=f"{INDEX} puts {len(lost)} tensors there, such as {lost[0]}",
                want=f"{path.name}/{shard}",
                hint="copy or download the missing shard",
            )
        for name, stored in read_header(path / shard).items():
            if name not in weight_map:
                unlisted.append(name)
            elif weight_map[name] != shard:
                continue
            tensors[name] = stored
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].file.name != shard:
            raise CheckpointError(
                f"the tensor {name} is not in its shard",
                got=f"{shard} without it",
                want=f"what {INDEX} says",
                hint="index and shards come from different saves: copy both again",
            )
    warnings = []
    if unlisted:
        warnings.append(f"{len(unlisted)} tensors are in no index, such as {unlisted[0]}")
    extra = sorted({f.name for f in path.glob("*.safetensors")} - set(weight_map.values()))
    if extra:
        warnings.append(f"not read, the index does not name them: {', '.join(extra)}")
    return TensorFiles(path, tensors, tuple(warnings))
