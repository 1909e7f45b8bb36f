"""An exported folder is there whole or not at all."""

import os

import pytest
import torch

from llava_ds.constants import ConfigError
from llava_ds.export.output_folder import staged
from llava_ds.export.safetensors_shards import write_shards
from llava_ds.export.tensors import Entry
from llava_ds.model.open.weights import WeightFiles


def files(folder) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_a_folder_that_is_not_finished_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), staged(tmp_path / "new" / "model") as stage:
        assert stage.name == "model"
        (stage / "config.json").write_text("half")
        raise KeyboardInterrupt
    assert not (tmp_path / "new" / "model").exists()


def test_what_was_there_stays_until_all_is_written(tmp_path):
    (tmp_path / "config.json").write_text("old")
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(OSError, match="full"), staged(tmp_path) as stage:
        (stage / "config.json").write_text("half")
        raise OSError("full")
    assert files(tmp_path) == {"config.json": "old", "notes": "mine"}
    with staged(tmp_path) as stage:
        (stage / "config.json").write_text("new")
        (stage / "weights").write_text("1")
    assert files(tmp_path) == {"config.json": "new", "notes": "mine", "weights": "1"}


def exported(folder, value: float, max_bytes: int) -> dict[str, float]:
    """Export two tensors of a value, and what the folder is then read as."""
    entries = [Entry(name, (4,), lambda: torch.full((4,), value)) for name in ("a", "b")]
    with staged(folder) as stage:
        write_shards(entries, stage, torch.float32, max_bytes)
        (stage / "config.json").write_text("{}")
    return {name: read()[0].item() for name, read in WeightFiles(folder).tensors()}


def test_an_export_over_another_is_read_as_the_new_one(tmp_path):
    """In shards or whole, before and after."""
    for value, max_bytes in enumerate((16, 32, 16, 16, 32)):
        assert exported(tmp_path, value, max_bytes) == {"a": value, "b": value}
        assert len(list(tmp_path.glob("model*.safetensors"))) == 32 // max_bytes


def test_all_files_of_the_model_before_go_and_nothing_else(tmp_path):
    """Also those that the new form has none of: they would be read with it, or in its place."""
    theirs = (
        "adapter_config.json", "adapter_model.bin", "non_lora_trainables.bin", "mm_projector.bin", "tokenizer.model",
        "pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json", "chat_template.jinja",
        "llava_tokenizer/tokenizer.json", "additional_chat_templates/a.jinja",
    )  # fmt: skip
    mine = ("run.json", "checkpoint-500/model.safetensors", "notes.bin", "README.md")
    for name in (*theirs, *mine):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("old")
    exported(tmp_path, 1.0, 32)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {*mine, "config.json", "model.safetensors"}
    assert not (tmp_path / "llava_tokenizer").exists() and not (tmp_path / "additional_chat_templates").exists()


def test_a_link_to_a_folder_is_taken_away_and_not_what_it_leads_to(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "tokenizer.json").write_text("mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "llava_tokenizer").symlink_to(tmp_path / "kept")
    with staged(tmp_path / "out") as stage:
        (stage / "llava_tokenizer").mkdir()
        (stage / "llava_tokenizer" / "tokenizer.json").write_text("new")
    assert files(tmp_path / "kept") == {"tokenizer.json": "mine"}
    assert files(tmp_path / "out" / "llava_tokenizer") == {"tokenizer.json": "new"}


@pytest.mark.parametrize("killed_at", range(4))
def test_a_folder_that_is_half_replaced_has_no_config(killed_at, tmp_path, monkeypatch):
    exported(tmp_path, 1.0, 16)
    before, calls, replace = files_by_bytes(tmp_path), [], os.replace

    def fails(source, target):
        if len(calls) == killed_at:
            raise OSError("gone")
        calls.append(target.name)
        replace(source, target)

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="gone"):
        exported(tmp_path, 2.0, 16)
    assert not (tmp_path / "config.json").exists() and before.keys() > files_by_bytes(tmp_path).keys()
    assert (
        calls == [*sorted(name for name in before if name.endswith("ors")), "model.safetensors.index.json"][:killed_at]
    )


def test_a_folder_in_a_files_place_is_named_before_anything_goes(tmp_path):
    exported(tmp_path / "out", 1.0, 32)
    (tmp_path / "out" / "tokenizer.json").mkdir()
    with pytest.raises(ConfigError, match=r"tokenizer\.json is a folder, expected a file: remove it, or name another"):
        exported(tmp_path / "out", 2.0, 32)
    assert {name: read()[0].item() for name, read in WeightFiles(tmp_path / "out").tensors()} == {"a": 1.0, "b": 1.0}


def files_by_bytes(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
