"""What reaches the disk, what is remembered of it, and that nothing that fails leaves the writer."""

import resource
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch

from llava_ds.engine.shards import checkpoint_writer as writer_module
from llava_ds.engine.shards.checkpoint_writer import CheckpointWriter, snapshot
from llava_ds.files import writing as files

CONFIG = SimpleNamespace(checkpoint_config={"checkpoint_serialization": True})
STATE = {"weights": torch.arange(5000.0), "steps": [1, 2], "name": "x"}


@pytest.fixture
def small_files():
    """No file may grow beyond 8 KiB: what a full disk does, by the system itself."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("background", [False, True])
def test_what_was_written_is_remembered_with_its_hash(tmp_path, background):
    writer = CheckpointWriter(CONFIG, tmp_path, background, True)
    writer.makedirs(tmp_path / "engine")
    writer.save(STATE, tmp_path / "engine" / "states.pt")
    writer.save_text("{}", tmp_path / "trainer.json")
    writer.start()
    writer.finish()
    assert writer.problem is None and writer.is_done
    assert set(writer.written) == {"engine/states.pt", "trainer.json"}
    assert all(files.damage(tmp_path, name, entry) is None for name, entry in writer.written.items())
    loaded = torch.load(tmp_path / "engine" / "states.pt")
    assert torch.equal(loaded["weights"], STATE["weights"]) and loaded["steps"] == [1, 2]


@pytest.mark.parametrize("serialization", [True, False])
@pytest.mark.parametrize("background", [False, True])
def test_a_write_that_fails_is_kept_and_later_files_are_left_out(tmp_path, small_files, background, serialization):
    config = SimpleNamespace(checkpoint_config={"checkpoint_serialization": serialization})
    writer = CheckpointWriter(config, tmp_path, background, True)
    writer.save(STATE, tmp_path / "states.pt")
    writer.save_text("{}", tmp_path / "trainer.json")
    writer.start()
    writer.finish()
    assert writer.problem == "states.pt: File too large (EFBIG)"
    assert writer.written == {} and not (tmp_path / "trainer.json").exists()


@pytest.mark.parametrize("background", [False, True])
def test_what_the_disk_does_not_give_back_is_a_failed_save(tmp_path, background, monkeypatch):
    def not_cached(path):
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    monkeypatch.setattr(writer_module, "not_cached", not_cached)
    writer = CheckpointWriter(CONFIG, tmp_path, background, True)
    writer.save(STATE, tmp_path / "states.pt")
    writer.start()
    writer.finish()
    assert writer.problem == "states.pt has changed since it was saved"


def test_a_folder_that_vanished_is_named_with_what_to_do(tmp_path):
    writer = CheckpointWriter(CONFIG, tmp_path, False, False)
    writer.save(STATE, tmp_path / "engine" / "states.pt")
    assert writer.problem.startswith("engine/states.pt: No such file or directory (ENOENT); the folder has vanished")


def test_in_the_background_the_moment_of_the_save_counts(tmp_path):
    weights, groups = torch.ones(3), [{"lr": 0.1, "params": [0]}]
    writer = CheckpointWriter(CONFIG, tmp_path, True, False)
    writer.save({"weights": weights, "groups": groups}, tmp_path / "states.pt")
    weights.mul_(7)
    groups[0]["lr"] = 0.2
    groups[0]["params"].append(1)
    writer.start()
    writer.finish()
    loaded = torch.load(tmp_path / "states.pt")
    assert loaded["weights"].tolist() == [1, 1, 1] and loaded["groups"] == [{"lr": 0.1, "params": [0]}]


def test_a_snapshot_keeps_what_is_shared_and_leaves_the_rest_of_a_buffer(tmp_path):
    buffer = torch.arange(1000.0)
    view = buffer[3:6]
    state = OrderedDict(a=view, b=buffer[3:6], c=buffer[4:7], d=(view, None, torch.zeros(0)))
    copied = snapshot(state, {})
    assert type(copied) is OrderedDict and copied["a"] is copied["b"] is copied["d"][0]
    assert copied["c"].tolist() == [4, 5, 6] and copied["d"][1] is None and copied["d"][2].numel() == 0
    assert copied["a"].untyped_storage().nbytes() == 12
    buffer.zero_()
    assert copied["a"].tolist() == [3, 4, 5]
