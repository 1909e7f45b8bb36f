"""Where the curves go beside the run's own files: each point once, and no failure of theirs is the run's."""

import sqlite3
from types import SimpleNamespace

import pytest

from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments, TrainingArguments
from llava_ds.constants import ConfigError
from llava_ds.files.jsonl import MetricsLog
from llava_ds.runtime.ranks import Ranks
from llava_ds.tracking import trackers
from llava_ds.tracking.trackers import MOST_POINTS, Logged, Tracker, Trackers, called, open_trackers, scalars

ALONE = Ranks(0, 0, 1, None)


def args(folder, **training) -> Arguments:
    chosen = TrainingArguments(output_dir=str(folder), **training)
    return Arguments(ModelArguments(), DataArguments(), chosen, frozenset())


def row(step: int, **more) -> dict:
    return {
        "step": step, "epoch": step / 10, "loss": 1 / step, "lr": [1e-3, 1e-3, 2e-4], "grad_norm": None,
        "tokens_per_s": 5.0, "mfu": 0.4, "step_time_s": 1.0, "data_wait_s": 0.1, "peak_memory_bytes": 2e9,
        "skipped_steps": 0, "broken_samples": 0, **more,
    }  # fmt: skip


class Kept:
    def __init__(self, fails_at: int | None = None) -> None:
        self.steps, self.fails_at, self.closed = [], fails_at, False

    def write(self, values, step):
        if step == self.fails_at:
            raise OSError(28, "No space left on device")
        self.steps.append(step)

    def close(self):
        self.closed = True


def test_a_tracker_that_fails_is_named_once_and_the_others_go_on(capsys):
    good, bad = Kept(), Kept(fails_at=2)
    both = Trackers({"tensorboard": bad, "wandb": good}, 5)
    both.write([row(step) for step in range(1, 6)])
    both.close()
    assert good.steps == [1, 2, 3, 4, 5] and bad.steps == [1] and good.closed
    said = capsys.readouterr().out
    assert said.count("WARNING") == 1 and "tensorboard failed" in said and "No space left" in said


def test_long_runs_give_them_a_part_of_the_steps_and_the_last():
    kept = Kept()
    Trackers({"wandb": kept}, 3 * MOST_POINTS + 1).write([row(step) for step in range(1, 3 * MOST_POINTS + 2)])
    assert kept.steps[:2] == [4, 8] and kept.steps[-1] == 3 * MOST_POINTS + 1 and len(kept.steps) <= MOST_POINTS


def test_names_are_the_trainers_and_a_group_of_its_own_rate_has_a_curve():
    values = scalars(row(2, skipped_steps=1))
    assert values["train/loss"] == 0.5 and values["train/learning_rate"] == 1e-3
    assert values["train/learning_rate_2"] == 2e-4 and "train/learning_rate_1" not in values
    assert values["train/skipped_steps"] == 1 and "train/grad_norm" not in values


def test_an_objectives_numbers_have_curves():
    values = scalars(row(2, samples=4, **{"reward": 0.5, "objective/kl": 0.0, "micro_batch_losses": [1.0]}))
    assert values["train/reward"] == 0.5 and values["train/objective/kl"] == 0
    assert not {"train/step", "train/samples", "train/micro_batch_losses"} & values.keys()


def test_tensorboard_has_every_step_once_after_a_kill_and_a_resume(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for resume_step, steps in ((0, range(1, 9)), (5, range(6, 11))):
        opened = open_trackers(args(tmp_path), tmp_path, resume_step, 10, ALONE)
        opened.write([row(step) for step in steps])  # and no close: it was killed
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, pytest.approx(e.value)) for e in events.Scalars("train/loss")] == [
        (n, 1 / n) for n in range(1, 11)
    ]


def test_without_tensorboard_a_line_says_so_unless_it_was_not_wanted(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(trackers, "is_installed", lambda name: False)
    assert open_trackers(args(tmp_path), tmp_path, 0, 10, ALONE).opened == {}
    assert "pip install 'llava_ds[tensorboard]'" in capsys.readouterr().out
    assert open_trackers(args(tmp_path, report_to=""), tmp_path, 0, 10, ALONE).opened == {}
    assert capsys.readouterr().out == ""


def test_one_that_cant_be_opened_is_the_users_to_mend(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise RuntimeError("no key")

    monkeypatch.setitem(trackers.OPEN, "wandb", refuse)
    with pytest.raises(
        ConfigError, match=r"--report_to wandb can't be opened \(RuntimeError: no key\).*WANDB_MODE=offline"
    ):
        open_trackers(args(tmp_path, report_to="wandb"), tmp_path, 0, 10, ALONE)


def test_tensorboard_that_nobody_asked_for_ends_no_run(tmp_path, capsys):
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    assert open_trackers(args(tmp_path), tmp_path, 0, 10, ALONE).opened == {}
    assert "WARNING: no TensorBoard curves (" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--report_to tensorboard can't be opened"):
        open_trackers(args(tmp_path, report_to="tensorboard"), tmp_path, 0, 10, ALONE)


def test_a_run_is_called_by_its_name_or_its_folder(tmp_path):
    assert called(args(tmp_path / "a")) == "a" and called(args(tmp_path / "a", run_name="b")) == "b"


def test_wandb_offline_has_the_run_and_no_secret(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("SOME_TOKEN", "planted-4f1c2e77")
    opened = open_trackers(args(tmp_path, report_to="wandb", run_name="planted-4f1c2e77"), tmp_path, 0, 10, ALONE)
    opened.write([row(1), row(2)])
    opened.close()
    left = [path for path in (tmp_path / "wandb").rglob("*") if path.is_file() and not path.is_symlink()]
    assert any(path.suffix == ".wandb" for path in left)
    assert not [path for path in left if b"planted-4f1c2e77" in path.read_bytes()]


def start(folder, resume_step: int, steps: range, tracker: str, **training) -> Tracker:
    """A start of a run from a checkpoint that takes so many steps; it ends without a word to the log."""
    flags = args(folder, report_to=tracker, **training)
    opened = open_trackers(flags, folder, resume_step, 10, ALONE)
    one = opened.opened[tracker]
    log = MetricsLog(folder / "metrics.jsonl", resume_step)
    for step in steps:
        log.write([row(step)])
        opened.write([row(step)])
    opened.close()
    return one


def test_a_resumed_run_sends_no_step_twice(tmp_path, monkeypatch):
    sent = []
    run = SimpleNamespace(log=lambda values, step: sent.append(step), finish=lambda: None)
    monkeypatch.setitem(
        trackers.OPEN, "wandb", lambda args, folder, resume: Logged(run, trackers._last_step(folder, resume))
    )
    for resume_step, steps in ((0, range(1, 9)), (5, range(6, 11))):
        start(tmp_path, resume_step, steps, "wandb")
    assert sent == list(range(1, 11))
    sent.clear()
    start(tmp_path, 0, range(1, 3), "wandb")  # a new run
    assert sent == [1, 2]


def test_wandb_goes_on_in_the_same_run_with_the_flags_that_it_has_now(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    first = start(tmp_path, 0, range(1, 4), "wandb", learning_rate=1e-3).run
    second = start(tmp_path, 2, range(3, 5), "wandb", learning_rate=5e-4).run
    assert first.id == second.id and first.config["learning_rate"] == 1e-3
    assert second.config["learning_rate"] == 5e-4
    assert start(tmp_path, 0, range(1, 2), "wandb").run.id != first.id  # a run that begins anew


def test_trackio_takes_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    (folder := tmp_path / "run").mkdir()
    start(folder, 0, range(1, 5), "trackio")
    start(folder, 2, range(3, 7), "trackio", learning_rate=5e-4)
    [database] = (tmp_path / "trackio").rglob("*.db")
    with sqlite3.connect(database) as connection:
        steps = connection.execute("SELECT step FROM metrics ORDER BY step").fetchall()
    assert [step for (step,) in steps] == [1, 2, 3, 4, 5, 6]
