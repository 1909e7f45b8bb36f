"""The written data set: LLaVA's format, balanced answers, disjoint splits, same bytes from the same seed."""

import collections
import errno
import json
import os

import numpy as np
import pytest
from PIL import Image

from llava_ds.constants import ConfigError, DataError
from llava_ds.tiny import scene_files as dataset
from llava_ds.tiny import scene_splits
from llava_ds.tiny.questions import ANSWERS, KINDS
from llava_ds.tiny.scenes import is_heldout

COUNTS = {"num_pretrain": 60, "num_finetune": 120, "num_heldout": 60}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "scenes"
    dataset.write_dataset(folder, seed=3, **COUNTS)
    return folder


@pytest.fixture(scope="module")
def heldout():
    return scene_splits.heldout_records(np.random.default_rng([0, 2]), 1200)


@pytest.fixture(scope="module")
def finetune():
    return scene_splits.finetune_records(np.random.default_rng([0, 1]), 1500)


def test_files_are_llava_records_with_pictures_that_open(folder):
    used = collections.Counter()
    for name, count in (("pretrain", 60), ("finetune", 120), ("heldout", 60)):
        records = json.loads((folder / f"{name}.json").read_text())
        assert len(records) == count
        assert len({r["id"] for r in records}) == count
        for record in records:
            turns = record["conversations"]
            assert [t["from"] for t in turns] == ["human", "gpt"] * (len(turns) // 2)
            assert ("<image>" in turns[0]["value"]) == ("image" in record)
            assert not any("<image>" in t["value"] for t in turns[1:])
            if "image" in record:
                used[record["image"]] += 1
                with Image.open(folder / record["image"]) as picture:
                    assert picture.mode == "RGB" and picture.size[0] == picture.size[1]
    assert set(used.values()) == {1}
    assert len(used) == len(list(folder.glob("*/*.png")))


def test_same_seed_writes_the_same_bytes(folder, tmp_path):
    dataset.write_dataset(tmp_path / "again", seed=3, **COUNTS)
    names = sorted(p.relative_to(folder) for p in folder.rglob("*") if p.is_file())
    assert names == sorted(p.relative_to(tmp_path / "again") for p in (tmp_path / "again").rglob("*") if p.is_file())
    assert all((folder / n).read_bytes() == (tmp_path / "again" / n).read_bytes() for n in names)


def test_a_complete_data_set_is_left_alone_and_other_parameters_replace_it(tmp_path):
    folder = tmp_path / "scenes"
    small = {"num_pretrain": 2, "num_finetune": 2, "num_heldout": 6}
    dataset.write_dataset(folder, seed=0, **small)
    before = (folder / "finetune.json").stat().st_mtime_ns
    dataset.write_dataset(folder, seed=0, **small)
    assert (folder / "finetune.json").stat().st_mtime_ns == before
    dataset.write_dataset(folder, seed=1, **small)
    assert (folder / "finetune.json").stat().st_mtime_ns != before


def test_a_failure_while_writing_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "disk full")

    monkeypatch.setattr("pathlib.Path.write_text", fail)
    with pytest.raises(ConfigError, match="disk full: make room there"):
        dataset.write_dataset(tmp_path / "scenes", seed=0, num_pretrain=2, num_finetune=2, num_heldout=6)
    assert [p.name for p in tmp_path.iterdir()] == [".scenes.lock"]


@pytest.mark.parametrize("damage", ["", '{"seed": ', "[1]", "\udcff"])
def test_a_damaged_note_counts_as_none(tmp_path, damage):
    small = {"num_pretrain": 2, "num_finetune": 2, "num_heldout": 6}
    dataset.write_dataset(tmp_path / "scenes", **small)
    whole = (tmp_path / "scenes" / dataset.RECORD_FILE).read_text()
    (tmp_path / "scenes" / dataset.RECORD_FILE).write_bytes(damage.encode("utf-8", "surrogateescape"))
    (tmp_path / "scenes" / "finetune.json").unlink()
    dataset.write_dataset(tmp_path / "scenes", **small)
    assert (tmp_path / "scenes" / dataset.RECORD_FILE).read_text() == whole
    assert len(json.loads((tmp_path / "scenes" / "finetune.json").read_text())) == 2


def test_a_kill_while_an_older_set_is_replaced_leaves_nothing_in_the_way(tmp_path, monkeypatch):
    small = {"num_pretrain": 2, "num_finetune": 2, "num_heldout": 6}
    dataset.write_dataset(tmp_path / "scenes", seed=0, **small)
    genuine = os.unlink

    def killed(path, *more, **options):
        genuine(path, *more, **options)
        if str(path).endswith(dataset.RECORD_FILE):
            os._exit(9)  # in the middle of deleting the older set

    child = os.fork()
    if child == 0:
        monkeypatch.setattr(os, "unlink", killed)
        dataset.write_dataset(tmp_path / "scenes", seed=1, **small)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 9 << 8
    dataset.write_dataset(tmp_path / "scenes", seed=1, **small)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".scenes.lock", "scenes"]


def test_a_folder_of_something_else_is_not_replaced(tmp_path):
    (tmp_path / "mine.txt").write_text("kept")
    with pytest.raises(DataError, match="something other than generated scenes"):
        dataset.write_dataset(tmp_path, seed=0, num_pretrain=2, num_finetune=2, num_heldout=6)
    assert (tmp_path / "mine.txt").read_text() == "kept"


def test_heldout_answers_are_uniform_so_that_blind_guessing_fails(heldout):
    per_kind = collections.defaultdict(collections.Counter)
    for record, _ in heldout:
        per_kind[record["kind"]][record["conversations"][1]["value"]] += 1
    assert {kind: sum(c.values()) for kind, c in per_kind.items()} == dict.fromkeys(KINDS, 200)
    for kind, answers in per_kind.items():
        fair = 200 / len(ANSWERS[kind])
        assert set(answers) == set(ANSWERS[kind])
        assert max(abs(n - fair) for n in answers.values()) <= max(2, 0.15 * fair), (kind, answers)


@pytest.mark.parametrize("split", ["heldout", "finetune"])
def test_the_best_answer_per_question_text_is_no_better_than_guessing(split, heldout, finetune):
    """Over texts asked often enough to tell, always giving a text's commonest answer is right as often as chance."""
    answers = collections.defaultdict(collections.Counter)
    for record, _ in {"heldout": heldout, "finetune": finetune}[split]:
        talk = record["conversations"]
        for question, answer in zip(talk[::2], talk[1::2], strict=True):
            answers[question["value"].split("\n")[-1]][answer["value"]] += 1
    blind = total = chance = 0
    for counts in answers.values():
        if counts.total() >= 12:
            (options,) = {len(a) for a in ANSWERS.values() if set(counts) <= set(a)}
            blind += max(counts.values())
            chance += counts.total() / options
            total += counts.total()
    assert total > 100
    assert blind / total < chance / total + 0.17


def test_training_and_heldout_show_disjoint_arrangements(heldout, finetune):
    pretrain = scene_splits.pretrain_records(np.random.default_rng([0, 0]), 500)
    training = {scene.arrangement for _, scene in pretrain + finetune if scene is not None}
    assert not training & {scene.arrangement for _, scene in heldout}
    assert all(is_heldout(scene.arrangement) for _, scene in heldout)


def test_a_tenth_of_the_conversations_is_text_only(finetune):
    share = sum(scene is None for _, scene in finetune) / len(finetune)
    assert 0.07 < share < 0.13
