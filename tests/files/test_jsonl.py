"""metrics.jsonl and loss.png: what a killed or resumed run finds there."""

import itertools
import json
import math
import os
import resource
import threading

import pytest
from PIL import Image

from llava_ds.constants import DataError
from llava_ds.files.jsonl import MetricsLog, read_metrics
from llava_ds.tracking.metric_copies import MetricsTable
from llava_ds.tracking.plots import LossPlot, plot_loss
from llava_ds.tracking.series import running_mean, thinned


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


def test_steps_that_a_cut_log_has_lost_are_said(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    MetricsLog(path, 0).write([row(step) for step in range(1, 7)])
    MetricsLog(path, 4)
    assert capsys.readouterr().out == ""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2 + 5])
    log = MetricsLog(path, 4)
    assert f"WARNING: {path} lacks 2 of the 4 steps up to the checkpoint (3 to 4)" in capsys.readouterr().out
    log.write([row(5)])
    MetricsLog(path, 5)
    assert "lacks 2 of the 5 steps up to the checkpoint (3 to 4)" in capsys.readouterr().out


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
    plot_loss(list(range(1, len(losses) + 1)), losses, [1e-3] * len(losses), path, "a run: 3 steps")
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


COLUMNS = (
    "step", "epoch", "loss", "lr", "grad_norm", "samples", "tokens", "supervised_tokens", "step_time_s", "data_wait_s",
    "tokens_per_s", "mfu", "peak_memory_bytes", "skipped_steps", "broken_samples",
)  # fmt: skip


def full(step: int, **more: object) -> dict:
    return {**dict.fromkeys(COLUMNS, 0), "step": step, "loss": 1 / 3, "lr": [1e-3, 2e-3], "grad_norm": None, **more}


def test_the_table_has_a_line_per_row_however_often_a_run_is_killed_and_goes_on(tmp_path):
    log, path = tmp_path / "metrics.jsonl", tmp_path / "metrics.csv"
    for resume_step, steps in ((0, range(1, 8)), (4, range(5, 7)), (6, range(7, 10))):
        metrics, table = MetricsLog(log, resume_step), MetricsTable(path, log)
        for step in steps:
            metrics.write([full(step)])
            table.write([full(step)])
        with path.open("a") as file:
            file.write("7,0.12")  # a kill cut this short
    metrics, table = MetricsLog(log, 9), MetricsTable(path, log)
    metrics.write([full(10, tokens=12)])
    table.write([full(10, tokens=12)])
    head, *lines = path.read_text().splitlines()
    assert head.split(",") == list(COLUMNS)
    cells = [dict(zip(COLUMNS, line.split(","), strict=True)) for line in lines]
    assert [cell["step"] for cell in cells] == [str(step) for step in range(1, 11)]
    assert (cells[-1]["loss"], cells[-1]["lr"], cells[-1]["grad_norm"], cells[-1]["tokens"]) == (
        "0.333333", "0.002", "", "12",
    )  # fmt: skip


def test_a_new_number_of_the_log_is_a_column_from_the_next_start_on(tmp_path):
    log, path = tmp_path / "metrics.jsonl", tmp_path / "metrics.csv"
    MetricsLog(log, 0).write([full(1)])
    row = full(2, accuracy=0.25, source_losses={"a": 1.0}, micro_batch_losses=[[1.0]])
    MetricsLog(log, 1).write([row])
    MetricsTable(path, log).write([row])
    head, first, second = (line.split(",") for line in path.read_text().splitlines())
    assert head == [*COLUMNS, "accuracy"]
    assert (first[-1], second[-1]) == ("", "0.25")


def test_the_table_follows_again_when_a_full_disk_has_room(tmp_path):
    log, path = tmp_path / "metrics.jsonl", tmp_path / "metrics.csv"
    metrics, table = MetricsLog(log, 0), MetricsTable(path, log)
    metrics.write([full(1)])
    table.write([full(1)])
    metrics.write([full(2)])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, before[1]))
    try:
        table.write([full(2)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    metrics.write([full(3)])
    table.write([full(3)])
    assert [line.split(",")[0] for line in path.read_text().splitlines()] == ["step", "1", "2", "3"]


def test_few_points_keep_a_curves_extremes_and_ends():
    values = [math.sin(step / 500) for step in range(20_000)]
    values[777], values[13_333], values[5] = 9.0, -9.0, math.nan
    steps, kept = thinned(range(20_000), values, most=200)
    assert len(steps) <= 200 and steps == sorted(steps) and {0, 777, 13_333, 19_999} <= set(steps)
    assert max(kept) == 9.0 and min(kept) == -9.0 and not any(map(math.isnan, kept))
    assert thinned([1, 2], [3.0, 4.0]) == ([1, 2], [3.0, 4.0])


def test_the_plot_is_drawn_while_it_trains_and_by_no_step(tmp_path, monkeypatch):
    monkeypatch.setattr("llava_ds.tracking.plots.EVERY_S", 0.0)
    drawn = []
    monkeypatch.setattr(
        "llava_ds.tracking.plots.plot_loss",
        lambda steps, *others: drawn.append((len(steps), threading.current_thread() is threading.main_thread())),
    )
    plot = LossPlot(tmp_path / "loss.png", "a run", [row(1), row(2)])
    plot.write([row(3)])
    plot.thread.join()
    plot.write([row(4)])
    plot.close()
    assert drawn[0] == (3, False) and drawn[-1] == (4, True)


def test_a_plot_that_cant_be_drawn_is_said_once_and_costs_nothing_else(tmp_path, capsys):
    plot = LossPlot(tmp_path / "there_is_no_folder" / "loss.png", "a run", [row(1)])
    plot.close()
    assert capsys.readouterr().out.count("loss.png could not be drawn: FileNotFoundError") == 1
