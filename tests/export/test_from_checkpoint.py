"""What a checkpoint's base models are compared with, and what the model card says of them."""

import json

import pytest

from llava_ds.checkpoint.run_identity import folder_digest
from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments, TrainingArguments
from llava_ds.constants import ConfigError
from llava_ds.export.card import write_card
from llava_ds.export.from_checkpoint import _check_bases, _holds_projector
from llava_ds.export.tensors import Entry
from llava_ds.files.writing import sha256

RECORD = {"num_steps": 2, "versions": {"torch": "2"}}


def run_with(**model: object) -> Arguments:
    return Arguments(ModelArguments(**model), DataArguments(), TrainingArguments(), frozenset())


def test_a_model_that_brings_its_tower_has_no_folder_of_one(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlavaForConditionalGeneration"]}))
    run = run_with(model_name_or_path=str(tmp_path), vision_tower=None, version="v1")
    saved = {"model_name_or_path": folder_digest(tmp_path), "model_base": None, "vision_tower": None}
    _check_bases(run, saved)
    with pytest.raises(ConfigError, match=r"--vision_tower .*: the run was trained without this flag, leave it out"):
        _check_bases(run.replaced(vision_tower=str(tmp_path)), saved)
    write_card(tmp_path, "hf", run, tmp_path, RECORD)
    assert f"{tmp_path.name} with its own vision tower, trained with" in (tmp_path / "README.md").read_text()


def test_an_adapter_that_a_run_began_with_has_its_own_settings_and_a_base(tmp_path):
    adapter, base = tmp_path / "adapter", tmp_path / "base"
    for folder, file in ((adapter, "adapter_config.json"), (base, "config.json")):
        folder.mkdir()
        (folder / file).write_text("{}")
    run = run_with(model_name_or_path=str(adapter), model_base=str(base))
    saved = {"model_name_or_path": folder_digest(adapter), "model_base": folder_digest(base), "vision_tower": None}
    _check_bases(run, saved)
    (base / "config.json").write_text('{"hidden_size": 1}')
    with pytest.raises(ConfigError, match=r"--model_base .* is not the model that training started from"):
        _check_bases(run, saved)


def test_the_projector_that_a_run_began_with_is_compared_and_may_have_moved(tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    first, other = tmp_path / "first.bin", tmp_path / "other.bin"
    first.write_bytes(b"1")
    other.write_bytes(b"2")
    saved = {"model_name_or_path": folder_digest(base), "model_base": None, "vision_tower": None}
    saved["pretrain_mm_mlp_adapter"] = sha256(first)
    run = run_with(model_name_or_path=str(base), pretrain_mm_mlp_adapter=str(first))
    _check_bases(run, saved)
    with pytest.raises(ConfigError, match=r"other\.bin is not the projector that training started from: give that one"):
        _check_bases(run.replaced(pretrain_mm_mlp_adapter=str(other)), saved)
    first.rename(tmp_path / "moved.bin")
    with pytest.raises(ConfigError, match=r"first\.bin not found: give its new path"):
        _check_bases(run, saved)
    _check_bases(run.replaced(pretrain_mm_mlp_adapter=str(tmp_path / "moved.bin")), saved)


def test_a_trained_projector_is_in_the_checkpoint_and_its_first_file_is_not_asked_for():
    entries = [Entry(f"{part}.weight", (1,), lambda: None) for part in ("language_model", "projector.layers.0")]
    assert _holds_projector(entries, run_with())
    assert not _holds_projector(entries[:1], run_with())
    assert not _holds_projector(entries, run_with(mm_use_im_start_end=True))
