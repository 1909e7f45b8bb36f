"""When a checkpoint exists, and what happens to one that is not whole."""

import errno
import json
import shutil
from pathlib import Path
from random import Random

import pytest
import torch

from llava_ds.checkpoint import commit, verification
from llava_ds.checkpoint import resume as state
from llava_ds.files import writing as files
from llava_ds.runtime.ranks import Ranks

RANKS = Ranks(0, 0, 1, torch.device("cpu"))


def write_checkpoint(output_dir: Path, step: int, content: bytes = b"0123456789") -> Path:
    scratch = commit.begin(output_dir, step, RANKS)
    (scratch / "engine").mkdir()
    (scratch / "engine" / "weights.pt").write_bytes(content)
    (scratch / "trainer.json").write_text("{}")
    return commit.commit(scratch, {}, None, RANKS)


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(bytes(content))


def test_a_committed_folder_verifies_and_lists_every_file(tmp_path):
    path = write_checkpoint(tmp_path, 3)
    assert path == tmp_path / "checkpoint-3" and verification.problem_with(path) is None
    files = json.loads((path / commit.MANIFEST).read_text())["files"]
    assert set(files) == {"engine/weights.pt", "trainer.json"}
    assert files["engine/weights.pt"]["bytes"] == 10
    assert not (tmp_path / "checkpoint-3.tmp").exists()
    assert verification.newest_whole(tmp_path) == (path, [])


def test_every_kind_of_damage_is_named(tmp_path):
    path = write_checkpoint(tmp_path, 1)
    weights, manifest = path / "engine" / "weights.pt", path / commit.MANIFEST
    whole, listed = weights.read_bytes(), manifest.read_bytes()
    flip(weights, 4)
    assert verification.problem_with(path) == "engine/weights.pt has changed since it was saved"
    weights.write_bytes(whole[:-3])
    assert verification.problem_with(path) == "engine/weights.pt has 7 bytes, not 10"
    weights.unlink()
    assert verification.problem_with(path) == "engine/weights.pt is missing"
    weights.write_bytes(whole)
    assert verification.problem_with(path) is None
    manifest.write_bytes(listed[: len(listed) // 2])
    assert verification.problem_with(path).startswith("its manifest.json can't be read (")
    manifest.unlink()
    assert verification.problem_with(path) == "it has no manifest.json, so the save did not finish"


def test_links_out_of_a_checkpoint_are_not_followed(tmp_path):
    path = write_checkpoint(tmp_path, 1)
    weights, manifest = path / "engine" / "weights.pt", path / commit.MANIFEST
    weights.rename(tmp_path / "elsewhere.pt")
    weights.symlink_to(tmp_path / "elsewhere.pt")  # of the same content, so that its hash fits
    assert verification.problem_with(path) == "engine/weights.pt is a link to a place outside the checkpoint"
    weights.unlink()
    weights.symlink_to(weights)
    assert verification.problem_with(path).startswith("'engine/weights.pt' can't be read (")
    manifest.rename(tmp_path / "manifest.json")
    manifest.symlink_to(tmp_path / "manifest.json")
    assert verification.problem_with(path) == "its manifest.json can't be read (it is a link)"


def test_no_flipped_bit_of_weights_goes_unseen(tmp_path):
    path = write_checkpoint(tmp_path, 1)
    for position in range(10):
        flip(path / "engine" / "weights.pt", position)
        assert verification.problem_with(path) is not None
        flip(path / "engine" / "weights.pt", position)
    assert verification.problem_with(path) is None


def test_no_flipped_bit_of_the_manifest_is_taken_or_stops_the_search(tmp_path):
    older, newer = write_checkpoint(tmp_path, 1), write_checkpoint(tmp_path, 2)
    manifest = newer / commit.MANIFEST
    for position in range(manifest.stat().st_size):
        flip(manifest, position)
        found, lines = verification.newest_whole(tmp_path)
        assert found == older and len(lines) == 1, manifest.read_bytes()
        flip(manifest, position)
    assert verification.newest_whole(tmp_path)[0] == newer


@pytest.mark.parametrize(
    "content", ["[]", '{"files": []}', '{"files": {"trainer.json": 3}}', '{"files": null}', "null"]
)
def test_a_manifest_of_another_shape_is_refused(tmp_path, content):
    path = write_checkpoint(tmp_path, 1)
    (path / commit.MANIFEST).write_text(content)
    assert verification.problem_with(path).startswith("its manifest.json can't be read (")


def test_the_newest_whole_one_is_taken_by_number_and_the_refusals_say_why(tmp_path):
    paths = {step: write_checkpoint(tmp_path, step) for step in (2, 9, 10, 100)}
    assert commit.checkpoints(tmp_path) == [paths[100], paths[10], paths[9], paths[2]]
    flip(paths[100] / "trainer.json", 0)
    (paths[10] / commit.MANIFEST).unlink()
    found, lines = verification.newest_whole(tmp_path)
    assert found == paths[9]
    assert lines == [
        "checkpoint-100 is not used: trainer.json has changed since it was saved",
        "checkpoint-10 is not used: it has no manifest.json, so the save did not finish",
    ]


def test_nothing_whole_is_nothing(tmp_path):
    assert verification.newest_whole(tmp_path) == (None, [])
    assert verification.newest_whole(tmp_path / "not there") == (None, [])
    (tmp_path / "checkpoint-4").mkdir()
    found, lines = verification.newest_whole(tmp_path)
    assert found is None and len(lines) == 1


def test_an_unfinished_folder_is_never_taken_and_the_next_try_starts_empty(tmp_path):
    scratch = commit.begin(tmp_path, 5, RANKS)
    (scratch / "half.pt").write_bytes(b"half")
    assert scratch.name == "checkpoint-5.tmp"
    (tmp_path / "checkpoint-5.bak").mkdir()
    (tmp_path / "checkpoint-x").mkdir()
    assert commit.checkpoints(tmp_path) == [] and verification.newest_whole(tmp_path) == (None, [])
    path = write_checkpoint(tmp_path, 5)
    assert verification.newest_whole(tmp_path)[0] == path and not (path / "half.pt").exists()


def test_a_step_saved_again_replaces_a_broken_one(tmp_path):
    path = write_checkpoint(tmp_path, 5)
    flip(path / "trainer.json", 0)
    assert write_checkpoint(tmp_path, 5, b"new") == path
    assert verification.problem_with(path) is None and (path / "engine" / "weights.pt").read_bytes() == b"new"


@pytest.mark.parametrize(("limit", "kept"), [(1, [12]), (2, [12, 9]), (7, [12, 9, 2]), (None, [12, 9, 2])])
def test_the_newest_are_kept(tmp_path, limit, kept):
    for step in (2, 9, 12):
        write_checkpoint(tmp_path, step)
    (tmp_path / "metrics.jsonl").write_text("")
    commit.keep_newest(tmp_path, limit)
    assert [path.name for path in commit.checkpoints(tmp_path)] == [f"checkpoint-{step}" for step in kept]
    assert (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("limit", "best", "kept"),
    [
        (1, 2, [12, 2]),
        (2, 2, [12, 2]),
        (2, 9, [12, 9]),
        (3, 2, [12, 9, 2]),
        (1, 12, [12]),
        (1, 5, [12]),
        (None, 2, [12, 9, 4, 2]),
    ],
)
def test_the_best_stays_in_the_place_of_the_oldest(tmp_path, limit, best, kept):
    for step in (2, 4, 9, 12):
        write_checkpoint(tmp_path, step)
    commit.keep_newest(tmp_path, limit, tmp_path / f"checkpoint-{best}")
    assert [path.name for path in commit.checkpoints(tmp_path)] == [f"checkpoint-{step}" for step in kept]


def test_a_fresh_start_moves_the_books_of_an_earlier_run(tmp_path):
    for folder in (tmp_path, tmp_path / "run"):
        folder.mkdir(exist_ok=True)
        (folder / "metrics.jsonl").write_text("")
    state.set_aside(tmp_path, state.ResumePoint(), RANKS)
    [moved] = tmp_path.glob("previous-*")
    assert {path.relative_to(moved).as_posix() for path in moved.rglob("*.jsonl")} == {
        "metrics.jsonl",
        "run/metrics.jsonl",
    }
    assert not [*tmp_path.glob("*.jsonl"), *tmp_path.glob("run/*")]


def test_a_broken_newer_checkpoint_never_costs_the_one_just_saved(tmp_path):
    """A run that fell back to step 6, for 9 is damaged, saves step 8 next if --save_steps is another one."""
    for step in (6, 9):
        write_checkpoint(tmp_path, step)
    flip(tmp_path / "checkpoint-9" / "engine" / "weights.pt", 0)
    assert verification.newest_whole(tmp_path)[0] == tmp_path / "checkpoint-6"
    state.set_aside(tmp_path, state.ResumePoint(tmp_path / "checkpoint-6", 6), RANKS)
    assert (next(tmp_path.glob("previous-*")) / "checkpoint-9").is_dir()  # nothing is lost, and nothing in the way
    write_checkpoint(tmp_path, 8)
    commit.keep_newest(tmp_path, 1)
    assert verification.newest_whole(tmp_path)[0] == tmp_path / "checkpoint-8"


def test_whatever_is_exchanged_is_found(tmp_path):
    """Files of equal size within a checkpoint and between two, manifests, and whole folders."""
    older, newer = write_checkpoint(tmp_path, 1, b"0123456789"), write_checkpoint(tmp_path, 2, b"9876543210")
    (newer / "engine" / "other.pt").write_bytes(b"abcdefghij")
    shutil.copytree(newer, again := tmp_path / "checkpoint-3.tmp", ignore=lambda *_: [commit.MANIFEST])
    newest = commit.commit(again, {}, None, RANKS)

    def exchange(one: Path, other: Path) -> None:
        aside = tmp_path / "aside"
        one.rename(aside), other.rename(one), aside.rename(other)

    weights = "engine/weights.pt"
    pairs = [
        (newest / weights, newest / "engine" / "other.pt"),
        (newest / weights, older / weights),
        (newest / commit.MANIFEST, older / commit.MANIFEST),
        (newest, older),
    ]
    for one, other in pairs:
        assert verification.newest_whole(tmp_path)[0] == newest
        exchange(one, other)
        assert verification.problem_with(newest) is not None
        if newest not in other.parents:
            assert verification.problem_with(older) is not None
            assert verification.newest_whole(tmp_path)[0] == newer
        exchange(one, other)


def test_a_thousand_flipped_bits_and_a_hundred_cut_or_missing_files_are_found(tmp_path):
    """In any file, the manifest too: the previous checkpoint is used, and the reason names the one that is not."""
    older, newer = write_checkpoint(tmp_path, 1), write_checkpoint(tmp_path, 2, bytes(range(256)))
    files = sorted(path for path in newer.rglob("*") if path.is_file())
    random = Random(0)

    def check() -> None:
        found, lines = verification.newest_whole(tmp_path)
        assert found == older and len(lines) == 1 and lines[0].startswith("checkpoint-2 is not used: ")

    for trial in range(1100):
        path = random.choice(files)
        content = path.read_bytes()
        if trial < 1000:
            damaged = bytearray(content)
            damaged[random.randrange(len(content))] ^= 1 << random.randrange(8)
            path.write_bytes(damaged)
        elif trial % 2:
            path.write_bytes(content[: random.randrange(len(content))])
        else:
            path.unlink()
        check()
        path.write_bytes(content)
    assert verification.newest_whole(tmp_path)[0] == newer


def test_a_file_that_the_disk_does_not_give_back_is_no_reason_to_stop_looking(tmp_path, monkeypatch):
    older, newer = write_checkpoint(tmp_path, 1), write_checkpoint(tmp_path, 2)

    genuine = files.sha256

    def sha256(path: Path) -> str:
        if path.is_relative_to(newer):
            raise OSError(errno.EIO, "Input/output error")
        return genuine(path)

    monkeypatch.setattr(files, "sha256", sha256)
    found, lines = verification.newest_whole(tmp_path)
    assert found == older and lines == [
        "checkpoint-2 is not used: engine/weights.pt can't be read (Input/output error)"
    ]
