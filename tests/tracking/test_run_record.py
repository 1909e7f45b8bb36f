"""run.json is read from wherever its run lies now, whoever has touched it since."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments, TrainingArguments
from llava_ds.constants import DataError
from llava_ds.export.from_checkpoint import located
from llava_ds.tracking.run_record import read_run_record

FLAGS = Arguments(ModelArguments(), DataArguments(), TrainingArguments(), frozenset())


def write(run_dir: Path, **changed: object) -> Path:
    record = {"arguments": FLAGS.as_dict(), "num_steps": 2, "versions": {"torch": "2"}, **changed}
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "run.json").write_text(json.dumps(record))
    return run_dir


def test_flags_come_back_as_they_were(tmp_path):
    assert read_run_record(write(tmp_path))[0] == FLAGS  # of an earlier version
    args, record = read_run_record(write(tmp_path, given=["video_fps"]))
    assert args == replace(FLAGS, given=frozenset({"video_fps"})) and record["num_steps"] == 2


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"arguments": None}, "arguments: input should be a valid dict"),
        ({"num_steps": "2"}, "num_steps: input should be a valid integer"),
        ({"versions": 1}, "versions: input should be a valid dict"),
        ({"given": "video_fps"}, "given: input should be a valid list"),
        ({"arguments": {"model_name_or_path": {"a": 1}}}, "--model_name_or_path in it is of the wrong type"),
        ({"arguments": {"train_batch_size": "x"}}, "--train_batch_size in it is of the wrong type"),
        ({"arguments": {"unheard_of": 1}}, "flags that this version does not know: unheard_of"),
    ],
)
def test_wrong_types_are_named(tmp_path, changed, reason):
    with pytest.raises(DataError, match=reason):
        read_run_record(write(tmp_path, **changed))


def test_what_is_no_file_is_said_at_once(tmp_path):
    with pytest.raises(DataError, match=r"run\.json can't be read \(it is missing\)"):
        read_run_record(tmp_path)
    os.mkfifo(tmp_path / "run.json")
    with pytest.raises(DataError, match="it is a named pipe"):
        read_run_record(tmp_path)


def test_paths_are_those_of_the_folder_that_the_run_was_started_in_also_where_it_was_moved(tmp_path, monkeypatch):
    project = tmp_path / "project"
    for folder in ("models/llama", "output/pretrain", "output/mine"):
        (project / folder).mkdir(parents=True)
    (project / "output/pretrain/mm_projector.bin").write_bytes(b"1")
    (tmp_path / "elsewhere" / "models" / "llama").mkdir(parents=True)  # of the caller, and not meant
    monkeypatch.chdir(tmp_path / "elsewhere")
    given = {
        "model_name_or_path": "models/llama",
        "vision_tower": str(project / "models" / "llama"),
        "pretrain_mm_mlp_adapter": "output/pretrain/mm_projector.bin",
        "output_dir": "output/mine",
    }
    args, record = FLAGS.replaced(**given), {"folder": str(project)}

    def found(run_dir: Path) -> list[str]:
        model = located(args, record, run_dir).model
        return [model.model_name_or_path, model.vision_tower, model.pretrain_mm_mlp_adapter]

    def under(root: Path) -> list[str]:
        return [str(root / place) for place in ("models/llama", "models/llama", "output/pretrain/mm_projector.bin")]

    assert found(project / "output" / "mine") == under(project)
    project.rename(tmp_path / "moved")
    assert found(tmp_path / "moved" / "output" / "mine") == under(tmp_path / "moved")
    (tmp_path / "moved" / "output").rename(tmp_path / "results")
    assert found(tmp_path / "results" / "mine")[2] == str(tmp_path / "results" / "pretrain" / "mm_projector.bin")
    gone = located(args.replaced(model_name_or_path="models/gone"), record, tmp_path / "results" / "mine")
    assert gone.model.model_name_or_path == str(project / "models" / "gone")
