"""A start from the cache knows the records by the note of an earlier one, and opens them where anything has changed."""

import dataclasses
import json
import os
import time
from pathlib import Path

import pytest
import toys

from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments, TrainingArguments
from llava_ds.config.parsing import parse_arguments
from llava_ds.data import known_records, open_records
from llava_ds.data.dataset import open_data
from llava_ds.data.sources.options import SourceOptions

OLD_S = 3600  # no file was being written when it was opened


@pytest.fixture
def data(tmp_path):
    """Paths of toy data whose files are old."""
    paths = toys.write_data(tmp_path / "data", ["n", "i", "n", "i", "t", "i"])
    age(Path(paths["data_path"]))
    return paths


def age(path: Path) -> None:
    written = time.time() - OLD_S
    os.utime(path, (written, written))


@pytest.fixture
def start(tmp_path, tokenizer):
    """Opens data by flags, as training does."""

    def start(**flags):
        named = {"deepspeed_config": "zero2", "version": "v1", "cache_dir": str(tmp_path / "cache"), **flags}
        argv = [word for name, value in named.items() for word in (f"--{name}", str(value))]
        args, _ = parse_arguments(argv, to_train=False)
        return open_data(args, tokenizer, toys.image_options())

    return start


@pytest.fixture
def opened(monkeypatch):
    """Data paths of the records that were opened."""
    paths, genuine = [], open_records.open_records

    def noted(args, *rest):
        paths.append(args.data.data_path)
        return genuine(args, *rest)

    monkeypatch.setattr(open_records, "open_records", noted)
    return paths


def test_a_second_start_opens_no_records_and_is_the_same(data, start, opened):
    first, again = start(**data), start(**data)
    assert opened == [data["data_path"]]
    assert (again.fingerprint, again.folder, again.summary()) == (first.fingerprint, first.folder, first.summary())


@pytest.mark.parametrize("change", ["content", "flag", "note"])
def test_whatever_has_changed_is_opened(change, data, start, opened, tmp_path):
    path, first = Path(data["data_path"]), start(**data)
    if change == "content":
        path.write_text(json.dumps(json.loads(path.read_text())[1:]))
        age(path)
    if change == "note":
        [note] = (tmp_path / "cache" / "records").iterdir()
        note.write_text(note.read_text()[:-9])  # as by a kill
    again = start(**data, **({"bbox_type": "norm1000"} if change == "flag" else {}))
    assert len(opened) == 2
    assert (again.fingerprint == first.fingerprint) == (change == "note")


FLAGS = {  # of every field of SourceOptions, a flag that changes it
    "data_format": {"data_format": "jsonl"},
    "columns": {"data_columns": "text=caption"},
    "image_folder": {"image_folder": "elsewhere"},
    "video_folder": {"video_folder": "elsewhere"},
    "cache_dir": {"cache_dir": "elsewhere"},
    "on_unmarked_image": {"on_unmarked_image": "text"},
    "bbox_type": {"bbox_type": "norm1000"},
    "split": {"data_split": "train"},
    "are_preferences": {"objective": "dpo"},
    "other_columns": {"objective": "grpo"},
    "are_labelled": {"objective": "kto"},
}


def test_every_option_of_sources_counts_for_the_note():
    assert FLAGS.keys() == {field.name for field in dataclasses.fields(SourceOptions)}

    def note(**flags: str) -> Path:
        args = Arguments(ModelArguments(), DataArguments(), TrainingArguments(), frozenset())
        return known_records.note_path(args.replaced(**flags), ["encoding"])

    assert len({note(), *(note(**flags) for flags in FLAGS.values())}) == 1 + len(FLAGS)


def test_a_file_that_was_just_written_and_a_folder_are_opened_every_time(data, start, opened):
    path = Path(data["data_path"])
    os.utime(path)
    for _ in range(2):
        start(**data)
    age(path)
    for _ in range(2):
        start(**{**data, "data_path": str(path.parent)})
    assert opened == [str(path)] * 2 + [str(path.parent)] * 2


def test_a_mixture_of_files_is_known_until_one_of_them_changes(data, start, opened, tmp_path):
    mixture, other = tmp_path / "mixture.yaml", tmp_path / "other.json"
    other.write_text(Path(data["data_path"]).read_text())
    mixture.write_text(
        f"datasets:\n  - {{path: {data['data_path']}}}\n  - {{path: {other}, sampling_strategy: 'first:2'}}\n"
    )
    for path in (mixture, other):
        age(path)
    flags = {**data, "data_path": str(mixture)}
    assert start(**flags).fingerprint == start(**flags).fingerprint
    assert len(opened) == 1
    other.write_text(json.dumps(json.loads(other.read_text())[1:]))
    start(**flags)
    assert len(opened) == 2


def test_a_start_that_looks_for_missing_images_opens_the_records_again(data, start, opened):
    path = Path(data["data_path"])
    records = json.loads(path.read_text())
    image = next(record["image"] for record in records if "image" in record)
    moved = Path(data["image_folder"], image)
    moved.rename(moved.with_suffix(".gone"))
    before = start(**data, max_bad_fraction=1.0)
    moved.with_suffix(".gone").rename(moved)
    after = start(**data, max_bad_fraction=1.0)
    assert len(after) == len(before) + 1 and len(opened) == 2
