"""A resumed run reads frozen weights from where the run began with them: they have to be the same."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import llavas
import pytest
import toys

from llava_ds.checkpoint import base_weights as sources
from llava_ds.checkpoint.run_identity import RunIdentity
from llava_ds.constants import ConfigError
from llava_ds.files import reading as file_contents


def trainer(hashes: dict) -> dict:
    """trainer.json of a run that began with these weights."""
    return {"step": 1, "identity": dataclasses.asdict(RunIdentity({}, "data", 1, 0, {})), "weights": hashes}


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    folder = tmp_path / "out" / "checkpoint-1"
    folder.mkdir(parents=True)
    return folder


def test_changed_weights_of_the_same_size_are_refused_and_moved_ones_are_not(tmp_path, checkpoint):
    base = toys.write_base(tmp_path / "base")
    hashes = sources.weight_hashes(llavas.arguments(base), tmp_path / "out", None)
    assert {name: list(files) for name, files in hashes.items()} == {
        "model_name_or_path": ["model.safetensors"],
        "vision_tower": ["model.safetensors"],
    }
    (checkpoint / "trainer.json").write_text(json.dumps(trainer(hashes)))
    shutil.copytree(tmp_path / "base", tmp_path / "moved")
    moved = {name: str(tmp_path / "moved" / Path(path).name) for name, path in base.items()}
    assert sources.weight_hashes(llavas.arguments(moved), tmp_path / "out", checkpoint) == hashes

    tower = tmp_path / "moved" / "clip" / "model.safetensors"
    flip_last_byte(tower)
    with pytest.raises(ConfigError, match=r"--vision_tower: model\.safetensors has changed\nrestore the old files"):
        sources.weight_hashes(llavas.arguments(moved), tmp_path / "out", checkpoint)


def test_what_was_hashed_is_not_read_again_while_it_stays(tmp_path, monkeypatch):
    base = toys.write_base(tmp_path / "base")
    read, genuine = [], sources.sha256
    monkeypatch.setattr(sources, "sha256", lambda path: read.append(path) or genuine(path))
    args, out = llavas.arguments(base), tmp_path / "out"
    assert sources.weight_hashes(args.replaced(dry_run=True), out, None) == {} and not out.exists()
    first = sources.weight_hashes(args, out, None)
    assert sources.weight_hashes(args, out, None) == first and len(read) == 2
    (out / "run" / sources.HASHES_FILE).write_text("{")  # cut short
    assert sources.weight_hashes(args, out, None) == first and len(read) == 4
    tower = Path(base["vision_tower"]) / "model.safetensors"
    os.utime(tower, ns=(0, 1))
    assert sources.weight_hashes(args, out, None) == first and len(read) == 5


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_weights_changed_with_their_time_restored_are_seen(tmp_path, checkpoint):
    base = toys.write_base(tmp_path / "base")
    args, out = llavas.arguments(base), tmp_path / "out"
    hashes = sources.weight_hashes(args, out, None)
    (checkpoint / "trainer.json").write_text(json.dumps(trainer(hashes)))
    tower = Path(base["vision_tower"]) / "model.safetensors"
    before = tower.stat()
    flip_last_byte(tower)
    os.utime(tower, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (tower.stat().st_size, tower.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    with pytest.raises(ConfigError, match=r"--vision_tower: model\.safetensors has changed"):
        sources.weight_hashes(args, out, checkpoint)


def test_blocks_are_compared_where_a_file_system_knows_no_times(tmp_path, monkeypatch):
    base = toys.write_base(tmp_path / "base")
    args, out = llavas.arguments(base), tmp_path / "out"
    monkeypatch.setattr(file_contents, "stamp_of", lambda path: (path.stat().st_size, 0, 0, 0))
    before = sources.weight_hashes(args, out, None)
    flip_last_byte(Path(base["vision_tower"]) / "model.safetensors")
    assert sources.weight_hashes(args, out, None) != before


@pytest.mark.parametrize("damage", ["null", "[]", "folder", "pipe", "zero", "\udcff"])
def test_a_note_that_is_damaged_is_made_anew_and_kept_beside(tmp_path, damage, capsys):
    base = toys.write_base(tmp_path / "base")
    args, out = llavas.arguments(base), tmp_path / "out"
    first = sources.weight_hashes(args, out, None)
    note = out / "run" / sources.HASHES_FILE
    note.unlink()
    if damage == "folder":
        note.mkdir()
    elif damage == "pipe":
        os.mkfifo(note)
    elif damage == "zero":
        note.symlink_to("/dev/zero")
    else:
        note.write_bytes(damage.encode("utf-8", "surrogateescape"))
    assert sources.weight_hashes(args, out, None) == first and note.is_file()
    assert ("can't be used" in capsys.readouterr().out) == (damage in ("folder", "pipe", "zero"))
