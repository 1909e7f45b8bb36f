"""What a run does when a checkpoint can't be saved, and when one is written behind its back."""

import json
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from llava_ds.checkpoint import commit, verification
from llava_ds.checkpoint.resume import ResumePlan, ResumePoint, find_resume_point
from llava_ds.checkpoint.run_identity import RunIdentity
from llava_ds.checkpoint.saver import ModelWriter, Saver
from llava_ds.checkpoint.trainer_file import checkpoint_problem, is_training_checkpoint
from llava_ds.constants import ConfigError
from llava_ds.engine.shards import checkpoint_writer as writer
from llava_ds.runtime.ranks import Ranks

RANKS = Ranks(0, 0, 1, torch.device("cpu"))
IDENTITY = RunIdentity({}, "data", 1, 2, {})


class Engine:
    """As much of DeepSpeed's as a save sees."""

    _config = SimpleNamespace(checkpoint_config={"checkpoint_serialization": True})

    def __init__(self) -> None:
        self.checkpoint_engine = "DeepSpeed's own"
        self.module = torch.nn.Module()
        self.weights = self.module.weights = torch.nn.Parameter(torch.ones(4), requires_grad=False)
        self.optimizer = self.basic_optimizer = torch.optim.SGD([self.weights], lr=0.1)
        self.param_names = {self.weights: "weights"}

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        return torch.float32, torch.float32

    def save_checkpoint(self, folder: str, tag: str, **options) -> None:
        self.checkpoint_engine.makedirs(f"{folder}/{tag}", exist_ok=True)
        self.checkpoint_engine.save({"weights": self.weights}, f"{folder}/{tag}/states.pt")


def saver_of(output_dir: Path, background: bool = False, limit: int | None = None) -> Saver:
    training = SimpleNamespace(output_dir=str(output_dir), async_save=background, save_total_limit=limit)
    return Saver(Engine(), training, ResumePlan(ResumePoint(), IDENTITY, {"model": {}}), RANKS)


def test_a_checkpoint_is_there_when_the_step_is_over(tmp_path):
    saver = saver_of(tmp_path)
    assert saver.after_step(1, saves=False) is None and list(tmp_path.iterdir()) == []
    assert saver.after_step(2, saves=True) is None
    assert verification.newest_whole(tmp_path) == (tmp_path / "checkpoint-2", [])
    assert saver.engine.checkpoint_engine == "DeepSpeed's own"
    trainer = json.loads((tmp_path / "checkpoint-2" / "trainer.json").read_text())
    assert trainer["step"] == 2 and trainer["identity"]["zero_stage"] == 2 and trainer["weights"] == {"model": {}}


def test_the_run_goes_on_after_a_failed_save_and_ends_after_three_in_a_row(tmp_path, capsys, monkeypatch):
    saver = saver_of(tmp_path)
    assert saver.after_step(1, saves=True) is None
    genuine = writer.write_file

    def fail(path: Path, write) -> dict:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(writer, "write_file", fail)
    assert saver.after_step(2, saves=True) is None
    said = capsys.readouterr().out
    assert "WARNING: checkpoint-2 could not be saved" in said and "rank 0 on " in said
    assert "engine/states.pt: No space left on device (ENOSPC); free space there" in said
    assert f"The last good checkpoint is {tmp_path / 'checkpoint-1'}" in said
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]  # what was half written takes no space
    assert saver.after_step(3, saves=True) is None

    monkeypatch.setattr(writer, "write_file", genuine)
    assert saver.after_step(4, saves=True) is None  # and it counts anew
    monkeypatch.setattr(writer, "write_file", fail)
    assert [saver.after_step(step, saves=True) for step in (5, 6)] == [None, None]
    problem = saver.after_step(7, saves=True)
    assert problem.startswith("3 saves in a row failed. checkpoint-7 could not be saved")
    assert f"The last good checkpoint is {tmp_path / 'checkpoint-4'}" in problem
    assert verification.newest_whole(tmp_path) == (tmp_path / "checkpoint-4", [])


def test_the_last_save_has_to_succeed(tmp_path):
    (tmp_path / "out").write_text("no folder")
    problem = saver_of(tmp_path / "out").after_step(9, saves=True, last=True)
    assert problem.startswith("checkpoint-9 could not be saved") and "No checkpoint exists yet" in problem


@pytest.fixture
def slow_disk(monkeypatch):
    """No file is written before this event is set."""
    may_write, genuine = threading.Event(), writer.write_file

    def write_file(*arguments):
        assert may_write.wait(60)
        return genuine(*arguments)

    monkeypatch.setattr(writer, "write_file", write_file)
    yield may_write
    may_write.set()


def test_in_the_background_a_checkpoint_appears_at_a_later_step_with_this_ones_state(tmp_path, slow_disk):
    saver = saver_of(tmp_path, background=True)
    assert saver.after_step(1, saves=True) is None
    saver.engine.weights.mul_(5)
    assert saver.after_step(2, saves=False) is None
    assert commit.checkpoints(tmp_path) == []
    slow_disk.set()
    saver._save.writer.finish()
    assert commit.checkpoints(tmp_path) == []  # all is written, but it is none until a step ends
    assert saver.after_step(3, saves=False) is None
    assert verification.newest_whole(tmp_path) == (tmp_path / "checkpoint-1", [])
    saved = torch.load(tmp_path / "checkpoint-1" / "engine" / "states.pt")
    assert saved["weights"].tolist() == [1, 1, 1, 1]


def test_in_the_background_one_is_waited_for_by_the_next_and_by_the_end(tmp_path, slow_disk):
    saver = saver_of(tmp_path, background=True, limit=1)
    saver.after_step(1, saves=True)
    threading.Timer(0.05, slow_disk.set).start()
    saver.after_step(2, saves=True)
    assert [path.name for path in commit.checkpoints(tmp_path)] == ["checkpoint-1"]
    assert saver.after_step(3, saves=False, last=True) is None
    assert [path.name for path in commit.checkpoints(tmp_path)] == ["checkpoint-2"]  # 1 went when 2 was read back


def test_in_the_background_a_failure_is_told_when_it_is_known(tmp_path, capsys, monkeypatch):
    def fail(path: Path, write) -> dict:
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(writer, "write_file", fail)
    saver = saver_of(tmp_path, background=True)
    assert saver.after_step(1, saves=True) is None and "WARNING" not in capsys.readouterr().out
    problem = saver.after_step(2, saves=False, last=True)
    assert "engine/states.pt: Input/output error (EIO); the disk reports errors" in problem
    assert list(tmp_path.iterdir()) == []


def test_the_model_alone_is_a_whole_checkpoint_from_which_no_run_is_resumed(tmp_path, capsys):
    saver = saver_of(tmp_path, limit=1)
    saver.model_writer = ModelWriter("hf", lambda folder: (folder / "model.safetensors").write_bytes(b"1"))
    for step in (1, 2):
        assert saver.after_step(step, saves=True) is None
    path = tmp_path / "checkpoint-2"
    assert commit.checkpoints(tmp_path) == [path] and checkpoint_problem(path) is None
    assert {file.name for file in path.iterdir()} == {"model.safetensors", "manifest.json", "trainer.json"}
    assert not is_training_checkpoint(path) and "(only the model): training waited" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"--resume .* can't be used: it holds only the model"):
        find_resume_point(str(path), tmp_path, IDENTITY)
    with pytest.raises(ConfigError, match="no checkpoint that a run can be resumed from"):
        find_resume_point("auto", tmp_path, IDENTITY)
    assert find_resume_point("never", tmp_path, IDENTITY)[0].path is None


def test_a_disk_that_takes_no_model_ends_no_run(tmp_path, capsys):
    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device", str(folder / "model.safetensors"))

    saver = saver_of(tmp_path)
    saver.model_writer = ModelWriter("hf", full)
    assert saver.after_step(1, saves=True) is None and list(tmp_path.iterdir()) == []
    assert "model.safetensors: No space left on device (ENOSPC); free space" in capsys.readouterr().out
    assert "3 saves in a row failed" in [saver.after_step(step, saves=True) for step in (2, 3)][-1]
