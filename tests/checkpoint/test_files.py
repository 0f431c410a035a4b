from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from anyfp8.checkpoint.files import read_header, torch_dtype
from anyfp8.checkpoint.shards import list_tensors
from anyfp8.errors import CheckpointError

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4),
    "b": torch.tensor([True, False, True]),
    "c.scale": torch.tensor(0.5),
    "d": torch.empty(0, 4),
    "e.weight": torch.arange(16, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(2, 8),
    "f": torch.tensor([1.0], dtype=torch.float64),
}


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tolist() == b.tolist()


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    return path


def test_what_the_safetensors_library_wrote_is_read_bit_for_bit(file):
    found = list_tensors(file.parent)
    assert set(found.tensors) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert same(found.read(name).float(), tensor.float())
        assert found.read(name).dtype == tensor.dtype
        assert found.tensors[name].shape == tuple(tensor.shape)


def test_a_tensor_that_is_read_does_not_share_memory_with_the_file(file):
    found = list_tensors(file.parent)
    found.read("a.weight").zero_()
    assert same(found.read("a.weight"), TENSORS["a.weight"])


def test_tensors_at_odd_offsets_are_read(tmp_path):
    header = {
        "x": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "y": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]},
    }
    raw = json.dumps(header).encode()
    values = torch.tensor([1.5, -2.0])
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + b"abc" + values.numpy().tobytes())
    assert same(list_tensors(path).read("y"), values)


@pytest.mark.parametrize("keep", [0, 5, 100, -1, -9])
def test_a_truncated_file_is_refused_by_name(file, keep):
    content = file.read_bytes()
    file.write_bytes(content[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors") as caught:
        list_tensors(file.parent)
    assert caught.value.hint


def test_bytes_after_the_last_tensor_are_refused(file):
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(CheckpointError, match="too long"):
        list_tensors(file.parent)


def test_a_git_lfs_pointer_is_told(file):
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    with pytest.raises(CheckpointError, match="git lfs pull"):
        list_tensors(file.parent)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        {"dtype": "F32", "shape": [2]},
        {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]},
    ],
)
def test_an_inconsistent_header_is_refused(tmp_path, entry):
    raw = json.dumps({"x": entry}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + b"\0" * 12)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        read_header(path)


def sharded(tmp_path, index=True):
    first = {"a": torch.zeros(2), "b": torch.ones(2)}
    second = {"c": torch.full((2,), 2.0)}
    save_file(first, tmp_path / "model-00001-of-00002.safetensors")
    save_file(second, tmp_path / "model-00002-of-00002.safetensors")
    if index:
        weight_map = dict.fromkeys(first, "model-00001-of-00002.safetensors")
        weight_map |= dict.fromkeys(second, "model-00002-of-00002.safetensors")
        write_index(tmp_path, weight_map)
    return tmp_path


def write_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("index", [True, False])
def test_shards_are_read_with_and_without_an_index(tmp_path, index):
    found = list_tensors(sharded(tmp_path, index))
    assert list(found.tensors) == ["a", "b", "c"]
    assert found.read("c").tolist() == [2.0, 2.0]


@pytest.mark.parametrize("index", [True, False])
def test_an_absent_shard_is_named(tmp_path, index):
    (sharded(tmp_path, index) / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is absent"):
        list_tensors(tmp_path)


def test_a_tensor_that_is_not_in_its_shard_is_named(tmp_path):
    sharded(tmp_path)
    write_index(
        tmp_path,
        dict.fromkeys("ab", "model-00001-of-00002.safetensors")
        | {"lost": "model-00002-of-00002.safetensors", "c": "model-00002-of-00002.safetensors"},
    )
    with pytest.raises(CheckpointError, match="the tensor lost is not in its shard"):
        list_tensors(tmp_path)


def test_one_name_in_two_files_without_an_index_is_refused(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "x.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "y.safetensors")
    with pytest.raises(CheckpointError, match="two files hold the tensor a"):
        list_tensors(tmp_path)


def test_files_outside_the_index_are_reported_and_not_read(tmp_path):
    sharded(tmp_path)
    save_file({"other": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    found = list_tensors(tmp_path)
    assert "other" not in found
    assert "consolidated.safetensors" in found.warnings[0]


def test_a_folder_without_weights_says_what_is_there(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        list_tensors(tmp_path)


def test_an_8_bit_float_that_torch_lacks_is_read_as_bytes(file, monkeypatch):
    monkeypatch.delattr(torch, "float8_e8m0fnu")
    assert torch_dtype("F8_E8M0") == torch.uint8
    assert torch_dtype("F8_E4M3") == torch.float8_e4m3fn


def test_a_dtype_that_is_unknown_is_listed_and_refused_when_read(tmp_path):
    raw = json.dumps({"x": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + b"\0\0")
    found = list_tensors(path)
    assert found.tensors["x"].dtype == "F4"
    with pytest.raises(CheckpointError, match="F4"):
        found.read("x")


def test_large_tensors_are_private_mappings(tmp_path):
    # an odd length before it, so that the mapping starts inside a page
    tensors = {"a": torch.arange(99_999).to(torch.uint8), "b": torch.randn(300, 300)}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    before = path.read_bytes()
    found = list_tensors(tmp_path)
    for name, expected in tensors.items():
        tensor = found.read(name)
        assert torch.equal(tensor, expected)
        tensor.zero_()
    assert path.read_bytes() == before
    assert torch.equal(found.read("b"), tensors["b"])


def test_a_file_that_is_cut_after_its_header_was_read_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(100_000)}, path)
    found = list_tensors(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"cannot read a of model\.safetensors"):
        found.read("a")


def test_an_index_may_not_lead_out_of_its_folder(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "x.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    write_index(folder, {"a": "../x.safetensors"})
    with pytest.raises(CheckpointError, match="leads out of its folder"):
        list_tensors(folder)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 99) | st.text(max_size=4) | st.just("F32"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)
ENTRY = st.fixed_dictionaries({"dtype": JSON, "shape": JSON, "data_offsets": JSON}) | JSON


@settings(max_examples=300, deadline=None)
@given(header=st.dictionaries(st.text(max_size=3), ENTRY, max_size=3) | JSON)
def test_any_header_is_read_or_refused(tmp_path_factory, header):
    path = tmp_path_factory.getbasetemp() / "fuzz.safetensors"
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + b"\0" * 8)
    try:
        found = read_header(path)
    except CheckpointError:
        return
    assert sum(stored.size for stored in found.values()) == 8


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    save_file(TENSORS, path)
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(at, len(content)))])
    try:
        found = list_tensors(path)
        for name in found.tensors:
            found.read(name)
    except CheckpointError:
        return
