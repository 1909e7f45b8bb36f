"""A resumed run reads frozen weights from where the run began with them: they have to be the same."""

import json
import os
import shutil
from pathlib import Path

import llavas
import pytest
import toys

from llava_ds.checkpoint import sources
from llava_ds.constants import ConfigError


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
    (checkpoint / "trainer.json").write_text(json.dumps({"weights": hashes}))
    shutil.copytree(tmp_path / "base", tmp_path / "moved")
    moved = {name: str(tmp_path / "moved" / Path(path).name) for name, path in base.items()}
    assert sources.weight_hashes(llavas.arguments(moved), tmp_path / "out", checkpoint) == hashes

    tower = tmp_path / "moved" / "clip" / "model.safetensors"
    content = bytearray(tower.read_bytes())
    content[-1] ^= 1
    tower.write_bytes(content)
    with pytest.raises(ConfigError, match=r"--vision_tower: model\.safetensors has changed\nbring the old files back"):
        sources.weight_hashes(llavas.arguments(moved), tmp_path / "out", checkpoint)


def test_what_was_hashed_is_not_read_again_while_it_stays(tmp_path, monkeypatch):
    base = toys.write_base(tmp_path / "base")
    read, genuine = [], sources.sha256
    monkeypatch.setattr(sources, "sha256", lambda path: read.append(path) or genuine(path))
    args, out = llavas.arguments(base), tmp_path / "out"
    assert sources.weight_hashes(args.replaced(dry_run=True), out, None) == {} and not out.exists()
    first = sources.weight_hashes(args, out, None)
    assert sources.weight_hashes(args, out, None) == first and len(read) == 2
    (out / sources.REMEMBERED).write_text("{")  # cut short
    assert sources.weight_hashes(args, out, None) == first and len(read) == 4
    tower = Path(base["vision_tower"]) / "model.safetensors"
    os.utime(tower, ns=(0, 1))
    assert sources.weight_hashes(args, out, None) == first and len(read) == 5
