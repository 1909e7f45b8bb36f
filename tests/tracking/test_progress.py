"""What is read of the device together is written as one number per step, and rates are of the steps read together."""

import contextlib
import dataclasses
import fcntl
import os
import pty
import re
import struct
import termios
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from extension_there import needs_extension

from llava_ds.data.sample_order import SampleOrder
from llava_ds.data.step_plan import Packing, StepPlan
from llava_ds.files.jsonl import read_metrics
from llava_ds.runtime.mesh import Mesh
from llava_ds.runtime.ranks import Ranks, print_first, progress_bar
from llava_ds.tracking.flops import ModelFlops
from llava_ds.tracking.progress import NumbersFromDevice, Progress, RunFacts, update_bar
from llava_ds.tracking.trackers import Trackers
from llava_ds.train.state import StepResult


def result(step: int, time_s: float, grad_norm: object = 1.5, **more: object) -> StepResult:
    counts = torch.tensor([4, 100 * step, 10, 2, 5000, 3], dtype=torch.float64)
    values = {
        "loss": torch.tensor(step / 2),
        "by_source": torch.ones(2, 1),
        "counts": counts,
        "skipped_steps": 0,
        **more,
    }
    return StepResult(
        step=step,
        grad_norm=grad_norm,
        lr=[1e-3],
        num_planned=4,
        broken=[],
        data_wait_s=0.0,
        step_time_s=time_s,
        **values,
    )


def make_progress(folder: Path, sources: tuple[str, ...] = ("one",)) -> Progress:
    """logging_steps 2, and 5 steps of 4 samples."""
    dataset = SimpleNamespace(sources=list(sources), lengths=[9] * 20, wait_for=lambda samples: None)
    plan = StepPlan(dataset, SampleOrder(20, 4, seed=0), Packing(1, 4, 1, None), 5)
    flops = ModelFlops(per_token=1e6, per_pair=1e3, per_tile=1e7, per_target=1e5)
    ranks, trackers = Ranks(0, 0, 1, torch.device("cpu")), Trackers({}, 5)
    return Progress(
        RunFacts("a run", "run", folder, 2, 0, flops, 1e9, lambda counts: counts.targets),
        plan,
        trackers,
        ranks,
        Mesh.of(ranks),
    )


@pytest.fixture
def progress(tmp_path, monkeypatch) -> Progress:
    monkeypatch.setattr("llava_ds.tracking.progress.sum_over", lambda group, values: values)
    monkeypatch.setattr("llava_ds.tracking.progress.time.perf_counter", lambda: 0.0)
    return make_progress(tmp_path)


@needs_extension("rl")
def test_the_bar_says_what_an_objective_is_about(progress, monkeypatch):
    shown = []
    monkeypatch.setattr(
        "llava_ds.tracking.progress.update_bar", lambda bar, num, everything, least: shown.append((everything, least))
    )
    ten = {"reward": torch.tensor(5.0), "kl": torch.tensor(0.2), "rewards/exact/mean": torch.tensor(5.0)}
    for step in (1, 2):
        progress.after_step(result(step, 0.1, metrics=ten))
    ((everything, least),) = shown
    assert everything[1:3] == ["reward 0.500", "KL 0.02"] and least[1] == "reward 0.500" and "KL 0.02" not in least


def test_rates_are_of_useful_work_over_the_steps_that_are_read_together(progress, tmp_path):
    progress.after_step(result(1, 0.1))
    assert read_metrics(tmp_path / "metrics.jsonl") == []
    progress.after_step(result(2, 0.9, torch.tensor(2.5), means=torch.tensor([1.0, 3.0])))
    first, second = read_metrics(tmp_path / "metrics.jsonl")
    assert (first["loss"], second["loss"], first["grad_norm"], second["grad_norm"]) == (0.5, 1.0, 1.5, 2.5)
    assert (first["tokens"], second["tokens"], second["supervised_tokens"]) == (100, 200, 10)
    assert first["tokens_per_s"] == second["tokens_per_s"] == 300.0
    flops = 300 * 1e6 + 2 * (5000 * 1e3 + 3 * 1e7 + 10 * 1e5)
    assert first["mfu"] == second["mfu"] == pytest.approx(flops / 1e9, rel=1e-5)
    assert second["micro_batch_losses"] == [[1.0, 3.0]] and "micro_batch_losses" not in first


def test_a_mixture_has_a_loss_for_each_data_source_that_a_step_met(progress, tmp_path):
    progress.sources = ["captions", "questions", "text"]
    of_each = torch.tensor([[3.0, 1.0, 0.0], [2.0, 3.0, 0.0]])
    for step in (1, 2, 3, 4, 5):
        progress.after_step(result(step, 0.1, by_source=of_each * step))
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["source_losses"] for row in rows] == [{"captions": 1.5, "questions": 0.33333}] * 5


def test_a_long_run_of_a_mixture_has_them_at_every_nth_step(progress, tmp_path):
    progress.sources, progress.trackers.every = ["captions", "questions"], 2
    for step in (1, 2, 3, 4, 5):
        progress.after_step(result(step, 0.1, by_source=torch.ones(2, 2)))
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl") if "source_losses" in row] == [2, 4, 5]


def test_what_the_device_still_had_to_do_counts_once(progress, tmp_path, monkeypatch):
    """The wait at the first reading is in the second's first step, as the loop measures."""
    times = iter([0.0, 3.0, 10.0, 14.0])
    monkeypatch.setattr("llava_ds.tracking.progress.time.perf_counter", lambda: next(times))
    for step, time_s in ((1, 0.5), (2, 0.5), (3, 3.5), (4, 0.5)):
        progress.after_step(result(step, time_s))
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["tokens_per_s"] for row in rows] == [75.0, 75.0, 140.0, 140.0]  # 4 s, and 4 - 3 + 4 s


def test_skipped_steps_and_a_missing_norm_are_written_as_they_are(progress, tmp_path):
    progress.after_step(dataclasses.replace(result(1, 1.0, None), skipped_steps=torch.tensor(1)), flush=True)
    row = read_metrics(tmp_path / "metrics.jsonl")[0]
    assert row["grad_norm"] is None and row["skipped_steps"] == 1 and row["mfu"] > 0


def test_the_bar_says_how_it_goes_and_what_went_wrong(progress):
    progress.after_step(result(1, 1.0), flush=True)
    shown = progress.bar.postfix
    for part in ("loss 0.5000", "lr 1.00e-03", "100 tokens/s", "MFU 13.6%", "waiting for data 0.0%", " GB"):
        assert part in shown, shown
    assert "skipped" not in shown and "broken" not in shown
    worse = dataclasses.replace(result(2, 1.0), skipped_steps=1, num_planned=6, data_wait_s=0.25)
    progress.after_step(worse, flush=True)
    assert "1 steps skipped, 2 samples broken" in progress.bar.postfix
    assert "waiting for data 25.0%" in progress.bar.postfix and "loss 0.7632" in progress.bar.postfix  # of 0.5 and 1.0


def test_the_objectives_metrics_are_means_per_supervised_token(progress, tmp_path):
    read, rows = progress.after_step(result(1, 1.0, metrics={"margin": torch.tensor(5.0)}), flush=True)
    assert read_metrics(tmp_path / "metrics.jsonl")[0]["margin"] == rows[0]["margin"] == 0.5  # of 10 tokens
    assert (read[0].loss, read[0].own_loss, read[0].counts.targets) == (0.5, 0.5, 10)


def test_a_run_that_ends_leaves_its_files(progress, tmp_path):
    for step in range(1, 6):
        progress.after_step(result(step, 1.0))
    progress.close()
    assert {"metrics.jsonl", "metrics.csv", "loss.png"} <= {path.name for path in tmp_path.iterdir()}


def on_a_terminal(columns: int, name: str, total: int, bad: list[str]) -> str:
    """The last line of the bar on a terminal of so many columns."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with os.fdopen(slave, "w") as terminal:
        bar = progress_bar(total=total, desc=name, unit="step", file=terminal, mininterval=0, position=0)
        least = ["loss 0.1562", "106,270 tokens/s", "waiting 12.4%", *bad]
        everything = [least[0], "lr 3.67e-07", least[1], "MFU 44.2%", "waiting for data 12.4%", "71.5 GB", *bad]
        for _ in range(2):
            update_bar(bar, (total - 1) // 2, everything, least)
        bar.disable = True  # it has nowhere to write any more
    shown = b""
    with contextlib.suppress(OSError):  # Linux's way to say that the other side is closed
        while part := os.read(master, 1 << 16):
            shown += part
    os.close(master)
    shown = shown.decode()
    return [line for line in re.split(r"[\r\n]+", shown) if line.strip()][-1]


@pytest.mark.parametrize(
    ("columns", "name", "total", "bad", "also"),
    [
        (200, "tiny-finetune", 225, [], ("tiny-finetune", "224/225", "lr 3.67e-07", "MFU", "for data 12.4%", "GB")),
        (80, "run", 225, [], ("224/225",)),
        (80, "llava-v1.5-7b-finetune-with-a-long-name", 5197, [], ("5196/5197",)),
        (80, "llava-v1.5-7b-finetune", 5197, ["12 steps skipped"], ("12 steps skipped",)),
        (60, "tiny-finetune", 225, [], ()),
    ],
)
def test_the_bar_keeps_loss_speed_and_waiting_on_a_narrow_terminal(columns, name, total, bad, also):
    line = on_a_terminal(columns, name, total, bad)
    for part in ("loss 0.1562", "106,270 tokens/s", "waiting", "12.4%", *also):
        assert part in line, line
    assert len(line) <= columns


def rows_without_times(folder: Path) -> list[dict]:
    times = ("tokens_per_s", "mfu", "peak_memory_bytes")
    return [
        {name: value for name, value in row.items() if name not in times}
        for row in read_metrics(folder / "metrics.jsonl")
    ]


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("saves", [(), (2,), (3, 4), (1, 2, 3, 4, 5)])
def test_a_log_that_is_read_late_has_the_same_rows(tmp_path, monkeypatch, every, saves):
    monkeypatch.setattr("llava_ds.tracking.progress.sum_over", lambda group, values: values)
    found = []
    for late in (False, True):
        (tmp_path / str(late)).mkdir()
        progress = make_progress(tmp_path / str(late), ("captions", "questions"))
        progress.run = dataclasses.replace(progress.run, logging_steps=every, reads_late=late)
        read = []
        for step in range(1, 6):
            means = torch.tensor([1.0, float(step)], dtype=torch.float64)
            of_each = torch.tensor([[3.0, 1.0], [2.0, step]])
            more = {"metrics": {"margin": torch.tensor(float(step))}, "means": means, "by_source": of_each}
            read += progress.after_step(result(step, 0.1, torch.tensor(2.5), **more), flush=step in saves)[0]
            if step in saves:
                assert [row["step"] for row in read_metrics(tmp_path / str(late) / "metrics.jsonl")][-1] == step
        assert [each.step for each in read] == [1, 2, 3, 4, 5]
        progress.close()
        found.append(rows_without_times(tmp_path / str(late)))
    assert found[0] == found[1] and len(found[0]) == 5


def test_a_step_is_read_when_the_next_one_is_queued(tmp_path, monkeypatch):
    monkeypatch.setattr("llava_ds.tracking.progress.sum_over", lambda group, values: values)
    done: list[str] = []

    class Copy(NumbersFromDevice):
        def __init__(self, steps, device):
            self.name = len([word for word in done if word.startswith("copy")]) + 1
            done.append(f"copy {self.name}")
            super().__init__(steps, device)

        def read(self):
            done.append(f"read {self.name}")
            return super().read()

    monkeypatch.setattr("llava_ds.tracking.progress.NumbersFromDevice", Copy)
    progress = make_progress(tmp_path)
    progress.run = dataclasses.replace(progress.run, logging_steps=1, reads_late=True)
    for step in range(1, 6):
        done.append(f"step {step}")
        progress.after_step(result(step, 0.1), flush=step == 3)
    assert done == [
        *("step 1", "copy 1"),
        *("step 2", "copy 2", "read 1"),
        *("step 3", "copy 3", "read 2", "read 3"),  # it saves
        *("step 4", "copy 4"),
        *("step 5", "copy 5", "read 4", "read 5"),  # the last
    ]


def test_on_a_gpu_the_copy_waits_for_its_own_step_alone(monkeypatch):
    """On a machine without one its parts are stood for."""
    done: list[str] = []

    class Event:
        def __init__(self, blocking: bool) -> None:
            assert blocking  # a host that spins would look busy

        def record(self) -> None:
            done.append("record")

        def synchronize(self) -> None:
            done.append("synchronize")

    own = torch.Tensor.to
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(
        torch.Tensor, "to", lambda self, *args, **more: done.append(f"copy {args} {more}") or own(self, *args, **more)
    )
    steps = [{"loss": torch.tensor(0.5), "norm": 2.0}, {"loss": torch.tensor([1.0, 2.0]), "norm": None}]
    monkeypatch.setattr(NumbersFromDevice, "_is_copied", lambda self, value: isinstance(value, torch.Tensor))
    numbers = NumbersFromDevice(steps, torch.device("cuda"))
    assert done == ["copy ('cpu',) {'non_blocking': True}", "record"]
    assert numbers.read() == [{"loss": 0.5, "norm": 2.0}, {"loss": [1.0, 2.0], "norm": None}]
    assert done[2:] == ["synchronize"]


@pytest.mark.full
def test_a_bar_without_a_terminal_is_lines_between_other_lines(capfd):
    bar = progress_bar(total=2, desc="mine", mininterval=0)
    for step in (1, 2):
        bar.update()
        print_first(f"step {step} is done")
    bar.close()
    out, err = capfd.readouterr()
    assert out.splitlines() == ["step 1 is done", "step 2 is done"] and "\r" not in err
    shown = dict.fromkeys(line.split("|")[0] for line in err.splitlines())
    assert list(shown) == ["mine:   0%", "mine:  50%", "mine: 100%"]
