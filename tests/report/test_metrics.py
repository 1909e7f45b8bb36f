"""metrics.jsonl and loss.png: what a killed or resumed run finds there."""

import itertools
import json
import math
import os
import resource

import pytest
from PIL import Image

from llava_ds.constants import DataError
from llava_ds.report.metrics import MetricsLog, read_metrics
from llava_ds.report.plots import plot_loss, running_mean


def row(step: int, loss: float = 1.5) -> dict:
    return {"step": step, "loss": loss, "lr": [1e-3, 2e-4]}


def test_rows_come_back_as_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, resume_step=0)
    rows = [row(1), row(2, 0.1 + 0.2), row(3, 1e-300)]
    log.write(rows[:2])
    log.write(rows[2:])
    assert read_metrics(path) == rows
    assert len(path.read_text().splitlines()) == 3


def test_a_resumed_run_drops_the_rows_that_come_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    MetricsLog(path, 0).write([row(step) for step in range(1, 8)])
    MetricsLog(path, 4).write([row(5, 9.0)])
    assert read_metrics(path) == [*(row(step) for step in range(1, 5)), row(5, 9.0)]
    MetricsLog(path, 0)
    assert read_metrics(path) == []


def test_a_line_that_a_kill_cut_short_is_passed_over_and_then_replaced(tmp_path):
    path = tmp_path / "metrics.jsonl"
    whole = "".join(json.dumps(row(step)) + "\n" for step in range(1, 4))
    last = len(json.dumps(row(3))) + 1
    for cut in range(2, last):
        path.write_text(whole[:-cut])
        assert read_metrics(path) == [row(1), row(2)]
    MetricsLog(path, 2).write([row(3, 7.0)])
    assert read_metrics(path) == [row(1), row(2), row(3, 7.0)]


def test_a_loss_that_is_not_a_number_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    MetricsLog(path, 0).write([row(1, math.nan), row(2, math.inf)])
    MetricsLog(path, 2)
    losses = [one["loss"] for one in read_metrics(path)]
    assert math.isnan(losses[0]) and losses[1] == math.inf


@pytest.mark.parametrize("losses", [[2.0], [3.0, 2.0, 1.0], [math.nan, 1.0], [math.nan], [math.inf, 1.0]])
def test_the_plot_is_written(tmp_path, losses):
    path = tmp_path / "loss.png"
    plot_loss([row(i + 1, loss) for i, loss in enumerate(losses)], path, "a run: 3 steps")
    with Image.open(path) as image:
        assert image.width > image.height > 300
        assert len(image.convert("L").getcolors()) > 10  # something is drawn


def test_the_running_mean_of_a_constant_is_the_constant():
    assert running_mean([2.5] * 400) == pytest.approx([2.5] * 400, rel=1e-12)


def test_the_running_mean_starts_at_the_first_value_and_follows():
    means = running_mean([4.0] + [1.0] * 300)
    assert means[0] == pytest.approx(4.0)
    assert all(a > b for a, b in itertools.pairwise(means[:200]))
    assert means[-1] == pytest.approx(1.0, abs=1e-4)
    assert running_mean([]) == []


def test_rows_wait_while_the_disk_is_full_and_no_line_is_cut(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, 0)
    log.write([{"step": 1}])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, before[1]))  # takes a part of the next line
    try:
        log.write([{"step": 2}])
        log.write([{"step": 3}])
        assert read_metrics(path) == [{"step": 1}] and path.read_text().endswith("\n")
        with pytest.raises(DataError, match=r"metrics\.jsonl lacks the last 2 rows"):
            log.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert capsys.readouterr().out.count("can't be written") == 1
    log.write([{"step": 4}])
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 4]
    log.close()


def test_a_log_is_never_half_rewritten(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    MetricsLog(path, 0).write([{"step": 1}, {"step": 2}])

    def killed(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        MetricsLog(path, 1)
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
