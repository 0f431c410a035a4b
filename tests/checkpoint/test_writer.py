from __future__ import annotations

import errno
import json
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from anyfp8.checkpoint import check_output
from anyfp8.checkpoint.shards import list_tensors
from anyfp8.checkpoint.writer import CheckpointWriter, specs_of
from anyfp8.errors import CheckpointError, InputError

TENSORS = {
    "a.weight": torch.arange(21, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(3, 7),
    "a.weight_scale": torch.tensor(0.5),
    "b.weight": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "c": torch.tensor([1, 2], dtype=torch.int64),
    "empty": torch.empty(0, 3),
}


def write(out, tensors=TENSORS, **options):
    with CheckpointWriter(out, specs_of(tensors), **options) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    return out


def listing(folder):
    return sorted(path.name for path in folder.iterdir())


def equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert found[name].float().tolist() == tensor.float().tolist()


def test_one_shard_is_read_back_by_the_safetensors_library(tmp_path):
    out = write(tmp_path / "out")
    assert listing(out) == ["model.safetensors"]
    assert listing(tmp_path) == ["out"]
    equal(load_file(out / "model.safetensors"), TENSORS)


def test_shards_hold_at_most_their_size_and_have_an_index(tmp_path):
    out = write(tmp_path / "out", shard_bytes=24)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in TENSORS.values())
    assert set(index["weight_map"]) == set(TENSORS)
    loaded = {}
    for file in sorted(set(index["weight_map"].values())):
        shard = load_file(out / file)
        assert sum(t.nbytes for t in shard.values()) <= 24
        assert all(index["weight_map"][name] == file for name in shard)
        loaded |= shard
    equal(loaded, TENSORS)
    assert list_tensors(out).warnings == ()


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    shard_bytes=st.integers(1, 200),
    order=st.randoms(use_true_random=False),
)
def test_any_split_and_order_round_trips(tmp_path_factory, sizes, shard_bytes, order):
    dtypes = (torch.float32, torch.bfloat16, torch.uint8)
    tensors = {f"t{i}": torch.arange(n).to(dtypes[i % 3]) for i, n in enumerate(sizes)}
    out = tmp_path_factory.mktemp("split") / "out"
    names = list(tensors)
    order.shuffle(names)
    with CheckpointWriter(out, specs_of(tensors), shard_bytes=shard_bytes) as writer:
        for name in names:
            writer.add(name, tensors[name])
    found = list_tensors(out)
    equal({name: found.read(name) for name in found.tensors}, tensors)


def test_a_transposed_tensor_is_written_in_row_major_order(tmp_path):
    tensor = torch.arange(6.0).reshape(2, 3).t()
    out = write(tmp_path / "out", {"t": tensor})
    assert load_file(out / "model.safetensors")["t"].tolist() == tensor.tolist()


def test_two_tensors_that_share_memory_are_both_written(tmp_path):
    scale = torch.tensor([1.0, 2.0])
    out = write(tmp_path / "out", {"a": scale, "b": scale[1]})
    equal(load_file(out / "model.safetensors"), {"a": scale, "b": scale[1]})


def write_one_of_many(out, error=None, **options):
    """Announces all tensors, writes one, and stops or fails."""
    with CheckpointWriter(out, specs_of(TENSORS), **options) as writer:
        writer.add("c", TENSORS["c"])
        if error:
            raise error


def test_an_error_leaves_nothing_behind(tmp_path):
    for error in (ZeroDivisionError, KeyboardInterrupt):
        with pytest.raises(error):
            write_one_of_many(tmp_path / "out", error)
        assert listing(tmp_path) == []


def test_an_error_while_overwriting_leaves_the_old_checkpoint(tmp_path):
    old = {"old": torch.ones(2)}
    out = write(tmp_path / "out", old)
    with pytest.raises(InputError, match="never came"):
        write_one_of_many(out, overwrite=True)
    equal(load_file(out / "model.safetensors"), old)
    assert listing(tmp_path) == ["out"]


def test_the_old_checkpoint_stays_until_the_new_one_is_whole(tmp_path):
    old = {"old": torch.ones(2)}
    out = write(tmp_path / "out", old)
    with CheckpointWriter(out, specs_of(TENSORS), overwrite=True) as writer:
        for name, tensor in TENSORS.items():
            writer.add(name, tensor)
            equal(load_file(out / "model.safetensors"), old)
    equal(load_file(out / "model.safetensors"), TENSORS)


def test_overwriting_replaces_the_whole_folder(tmp_path):
    out = write(tmp_path / "out", {"old": torch.ones(2)})
    (out / "stale.json").write_text("{}")
    write(out, overwrite=True)
    assert listing(out) == ["model.safetensors"]
    assert listing(tmp_path) == ["out"]


def test_a_failed_rename_puts_the_old_folder_back(tmp_path, monkeypatch):
    out = write(tmp_path / "out", {"old": torch.ones(2)})
    real = type(out).rename

    def rename(self, target):
        if self.name.endswith(".partial"):
            raise OSError(errno.EIO, "input/output error")
        return real(self, target)

    monkeypatch.setattr(type(out), "rename", rename)
    with pytest.raises(CheckpointError, match="cannot write"):
        write(out, overwrite=True)
    assert list(load_file(out / "model.safetensors")) == ["old"]
    assert listing(tmp_path) == ["out"]


def test_a_folder_that_holds_something_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="is not empty") as caught:
        write(tmp_path)
    assert "notes.txt" in caught.value.got
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty")
    with pytest.raises(CheckpointError, match="want: a folder"):
        check_output(tmp_path / "notes.txt")


def test_a_disk_that_is_too_small_is_told_before_writing(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match="not enough disk space") as caught:
        write(tmp_path / "out")
    assert caught.value.got == "10 bytes free"
    assert listing(tmp_path) == []


def test_a_disk_that_fills_up_leaves_nothing_behind(tmp_path, monkeypatch):
    class Full:
        def seek(self, offset):
            pass

        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(CheckpointWriter, "_open", lambda self, file: Full())
    with pytest.raises(CheckpointError, match="not enough disk space") as caught:
        write(tmp_path / "out")
    assert caught.value.hint
    assert listing(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "tensor", "what"),
    [
        ("c", torch.tensor([1, 2, 3]), r"I64 \[3\]"),
        ("c", torch.tensor([1.0, 2.0]), r"F32 \[2\]"),
        ("x", torch.tensor([1]), "not announced"),
    ],
)
def test_a_tensor_that_was_not_announced_is_refused(tmp_path, name, tensor, what):
    writer = CheckpointWriter(tmp_path / "out", specs_of(TENSORS))
    with pytest.raises(InputError, match=what):
        writer.add(name, tensor)


def test_a_tensor_that_is_written_twice_is_refused(tmp_path):
    twice = CheckpointWriter(tmp_path / "out", specs_of({"c": TENSORS["c"]}))
    with twice as writer:
        writer.add("c", TENSORS["c"])
        with pytest.raises(InputError, match="written already"):
            writer.add("c", TENSORS["c"])


def test_two_tensors_of_one_name_are_refused(tmp_path):
    with pytest.raises(InputError, match="two tensors of one name"):
        CheckpointWriter(tmp_path / "out", [*specs_of(TENSORS), *specs_of(TENSORS)])
