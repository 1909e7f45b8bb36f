"""Weight files that are damaged, hostile or incomplete: one message each, and no code is run."""

import json
import os
import pickle
from pathlib import Path

import llavas
import pytest
import torch
from safetensors.torch import save_file

from llava_ds.constants import DataError
from llava_ds.model.open.weights import Overlaid, TensorSource, WeightFiles, tensor_names

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c.d": torch.zeros(1)}


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
@pytest.mark.parametrize("shards", [1, 3])
def test_folders_of_both_kinds_give_every_tensor_once(suffix, shards, tmp_path):
    llavas.write_tensors(tmp_path, TENSORS, suffix, shards)
    files = WeightFiles(tmp_path)
    read = [(name, read()) for name, read in files.tensors()]
    assert sorted(name for name, _ in read) == sorted(TENSORS) == sorted(files.shapes)
    for name, tensor in read:
        assert torch.equal(tensor, TENSORS[name]) and files.shapes[name] == tuple(tensor.shape)
    assert tensor_names(tmp_path) == set(TENSORS)


def test_pickles_from_before_zip_files_are_read(tmp_path):
    torch.save(TENSORS, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert all(torch.equal(read(), TENSORS[name]) for name, read in WeightFiles(tmp_path).tensors())


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("how", ["zip", "legacy", "plain"])
def test_a_pickle_with_code_is_refused_and_not_run(how, tmp_path):
    file = tmp_path / "pytorch_model.bin"
    if how == "plain":
        file.write_bytes(pickle.dumps({"a": Evil(tmp_path / "ran")}))
    else:
        torch.save({**TENSORS, "x": Evil(tmp_path / "ran")}, file, _use_new_zipfile_serialization=how == "zip")
    with pytest.raises(DataError) as caught:
        WeightFiles(tmp_path)
    assert not (tmp_path / "ran").exists()
    message = str(caught.value)
    assert message.startswith(f"{file} ") and "weights_only" not in message and "\n" not in message
    if how == "zip":
        assert "is refused: it holds" in message and "system" in message


def whole(folder: Path) -> bytes:
    save_file(TENSORS, folder / "model.safetensors")
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("model.safetensors", lambda f: whole(f)[:-3], "can't be read as weights ("),
        ("model.safetensors", lambda f: b"", "can't be read as weights ("),
        ("model.safetensors", lambda f: b"\xff" * 100, "can't be read as weights ("),
        ("pytorch_model.bin", lambda f: b"", "can't be read as weights ("),
        ("pytorch_model.bin", lambda f: b"<html>", "can't be read as weights ("),
        ("model.safetensors.index.json", lambda f: b"{", "model.safetensors.index.json can't be read ("),
        ("model.safetensors.index.json", lambda f: b"{}", "can't be read as an index of weights ("),
        ("model.safetensors.index.json", lambda f: b'{"weight_map": {}}', "can't be read as an index of weights ("),
        (
            "pytorch_model.bin.index.json",
            lambda f: b'{"weight_map": {"a": "x-1.bin"}}',
            "pytorch_model.bin.index.json names x-1.bin, but that is missing: copy it again",
        ),
        (
            "model.safetensors.index.json",
            lambda f: b'{"weight_map": {"a": "../../etc/passwd"}}',
            "names '../../etc/passwd': expected a file of weights in the same folder",
        ),
    ],
)
def test_a_damaged_file_is_named(name, content, expected, tmp_path):
    (tmp_path / name).write_bytes(content(tmp_path))
    with pytest.raises(DataError) as caught:
        WeightFiles(tmp_path)
    assert str(caught.value).startswith(str(tmp_path)) and expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_half_a_pickle_is_named(tmp_path):
    torch.save(TENSORS, tmp_path / "pytorch_model.bin")
    data = (tmp_path / "pytorch_model.bin").read_bytes()
    (tmp_path / "pytorch_model.bin").write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match="can't be read as weights"):
        WeightFiles(tmp_path)


@pytest.mark.parametrize("content", [[1, 2], {"state_dict": TENSORS}, torch.ones(2), {"epoch": 3}])
def test_something_else_than_tensors_by_name_is_refused(content, tmp_path):
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(DataError, match="expected tensors by name and nothing else"):
        WeightFiles(tmp_path)


def test_an_empty_folder_says_what_is_expected(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(DataError, match=r"holds no weights: expected model.safetensors or pytorch_model.bin, or their"):
        WeightFiles(tmp_path)


def test_what_lies_above_hides_what_lies_below():
    below, above = TensorSource(dict(TENSORS), "below"), TensorSource({"a": torch.ones(1), "e": torch.ones(2)}, "above")
    both = Overlaid(below, above)
    read = {name: tuple(read().shape) for name, read in both.tensors()}
    assert read == both.shapes == {"a": (1,), "b": (4,), "c.d": (1,), "e": (2,)}
    assert both.notes == ("2 of them from above",)
