"""skipped_steps.jsonl names what a step was made of that changed nothing, and too many in a row are a problem."""

from pathlib import Path
from types import SimpleNamespace

import torch

from llava_ds.files.jsonl import read_metrics
from llava_ds.runtime.ranks import Ranks
from llava_ds.tracking.skipped import SkippedSteps

NAN = float("nan")
ROWS = [3, 1, 2, 0]  # of the records, those that are trained on
DATASET = SimpleNamespace(
    lengths=[9] * 4, rows=ROWS, row=lambda index: {"id": f"id{index}"}, wait_for=lambda samples: None
)
PLANS = [[[0]], [[1]]], [[[2]], [[3]]]  # of odd steps and of even ones, for two ranks
PLAN = SimpleNamespace(
    dataset=DATASET,
    of_ranks=lambda step, ranks: [micro for rank in ranks or range(2) for micro in PLANS[(step - 1) % 2][rank]],
)


def log_in(folder: Path, monkeypatch, finite: list[bool], most: int = 3, before: tuple[int, int] = (0, 0)):
    """finite: whether each rank's loss is, when asked."""
    monkeypatch.setattr("llava_ds.tracking.skipped.gather", lambda value, ranks: finite)
    return SkippedSteps(folder, PLAN, most, before, Ranks(0, 0, 1, torch.device("cpu")))


def results(*counts: int, first: int = 1, loss: float = 1.0) -> list:
    """Steps with the number of those skipped so far."""
    return [SimpleNamespace(step=first + i, skipped_steps=count, own_loss=loss) for i, count in enumerate(counts)]


def test_the_samples_are_those_of_the_ranks_whose_loss_was_not_finite(tmp_path, monkeypatch, capsys):
    log_in(tmp_path, monkeypatch, [True, False]).add(results(0, 1, 1))
    assert read_metrics(tmp_path / "skipped_steps.jsonl") == [
        {"step": 2, "not_finite": "loss", "ranks": [1], "samples": ["id0"]}
    ]
    assert "step 2 is skipped" in capsys.readouterr().out


def test_of_gradients_all_ranks_samples_are_named(tmp_path, monkeypatch):
    log_in(tmp_path, monkeypatch, [True, True]).add(results(1))
    assert read_metrics(tmp_path / "skipped_steps.jsonl") == [
        {"step": 1, "not_finite": "gradients", "ranks": [], "samples": ["id3", "id1"]}
    ]


def test_too_many_in_a_row_are_a_problem_and_one_good_step_between_them_is_none(tmp_path, monkeypatch):
    log = log_in(tmp_path, monkeypatch, [False, False])
    log.add(results(1, 2, 2, 3, 4, loss=NAN))
    assert log.in_a_row == 2 and log.problem is None
    log.add(results(5, first=6, loss=NAN))
    assert "3 steps in a row (4 to 6)" in log.problem


def test_a_resumed_run_goes_on_counting_and_drops_what_lies_behind_its_checkpoint(tmp_path, monkeypatch):
    log_in(tmp_path, monkeypatch, [False, False], most=9).add(results(0, 1, 2, 3, loss=NAN))
    log = log_in(tmp_path, monkeypatch, [False, False], before=(3, 2))
    assert log.in_a_row == 2 and [row["step"] for row in read_metrics(log.path)] == [2, 3]
    log.add(results(3, first=4, loss=NAN))
    assert "3 steps in a row (2 to 4)" in log.problem
