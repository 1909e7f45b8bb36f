"""What logging costs per step, and what it leaves on disk: python run/dev/measure_logging_cost.py

CPU time of the process, all threads, so that a busy machine disturbs it less: rounds of steps that are logged every one
(metrics.jsonl, metrics.csv, TensorBoard, loss.png, the bar, the watch for bad steps) alternate with rounds of the same
steps that are not.
"""

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch

from llava_ds.config.arguments import TrainingArguments
from llava_ds.files.jsonl import MetricsLog
from llava_ds.model.flops import ModelFlops
from llava_ds.runtime.ranks import Ranks
from llava_ds.tracking import progress as module
from llava_ds.tracking.metrics_csv import MetricsTable
from llava_ds.tracking.progress import Progress
from llava_ds.tracking.trackers import TensorBoard, Trackers
from llava_ds.train.loop import StepResult
from llava_ds.train.loss_spikes import LossSpikes
from llava_ds.train.skipped_samples import SkippedLog
from llava_ds.train.skipped_steps import SkippedSteps

drawn = random.Random(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=100, help="of a round (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=100_000, help="whose size is taken (default: %(default)s)")
    args = parser.parse_args()
    module.all_sum = lambda values: values  # there is one rank
    with tempfile.TemporaryDirectory() as folder:
        each = seconds_per_step(Path(folder), args.rounds, args.steps)
    spread = f"{1e3 * each[0]:.2f} to {1e3 * each[-1]:.2f}"
    print(f"CPU per step: {1e3 * statistics.median(each):.2f} ms (median of {args.rounds} rounds, {spread})")
    with tempfile.TemporaryDirectory() as folder:
        sizes = sizes_of(Path(folder), args.rows)
    print(f"{args.rows:,} rows: {', '.join(f'{name} {size / 1e6:.1f} MB' for name, size in sizes.items())}")


def seconds_per_step(folder: Path, rounds: int, steps: int) -> list[float]:
    progress = logging_to(folder, num_steps=10**9)
    count, each = 0, []
    for _ in range(rounds + 1):
        times = []
        for logged in (False, True):
            started = time.process_time()
            for _ in range(steps):
                count += 1
                result = result_of(count)
                if logged:
                    progress.after_step(result)
            times.append(time.process_time() - started)
        each.append((times[1] - times[0]) / steps)
    progress.bar.close()
    progress.trackers.close()
    return sorted(each[1:])  # the first was warm-up


def sizes_of(folder: Path, rows: int) -> dict[str, int]:
    """Bytes of each file."""
    log, trackers = MetricsLog(folder / "metrics.jsonl", 0), tensorboard(folder, rows)
    table = MetricsTable(folder / "metrics.csv", folder / "metrics.jsonl")
    progress = logging_to(folder / "rows", rows)
    for start in range(1, rows + 1, 1000):
        some = [row_of(progress, step) for step in range(start, min(start + 1000, rows + 1))]
        for writer in (log, table, trackers):
            writer.write(some)
    trackers.close()
    progress.bar.close()
    files = [folder / "metrics.jsonl", folder / "metrics.csv", *(folder / "tensorboard").iterdir()]
    return {file.name: file.stat().st_size for file in files}


def logging_to(folder: Path, num_steps: int) -> Progress:
    folder.mkdir(exist_ok=True)
    ranks, training = Ranks(0, 0, 1, torch.device("cpu")), TrainingArguments()
    return Progress(
        folder,
        "a run",
        resume_step=0,
        max_steps=num_steps,
        steps_per_epoch=5_197,
        batch_size=128,
        logging_steps=1,
        sources=["data"],
        flops=ModelFlops(per_token=1.4e10, per_pair=1e3, per_tile=3.6e11, per_target=1e8),
        peak_flops=8e15,
        # Which look at the dataset only where something went wrong.
        skipped=SkippedLog(folder / "skipped.jsonl", [], 1, 0, ranks),
        skipped_steps=SkippedSteps(folder, None, None, None, 3, (0, 0), ranks),
        spikes=LossSpikes(folder, None, None, None, training, 0, ranks),
        ranks=ranks,
        monitor=SimpleNamespace(enabled=False),
        trackers=tensorboard(folder, min(num_steps, 5_000)),
    )


def tensorboard(folder: Path, num_steps: int) -> Trackers:
    return Trackers({"tensorboard": TensorBoard(None, folder, 0)}, num_steps)


def result_of(step: int) -> StepResult:
    """Numbers with as many digits as real ones have, of four parameter groups."""
    rate, vary = 2e-5 * drawn.random(), drawn.random()
    counts = torch.tensor([128, 108_416 + int(9_000 * vary), 17_000 + int(2_000 * vary), 16, 5e7, 300])
    rates = [rate, rate, rate / 7, rate / 7]
    return StepResult(
        step=step,
        loss=torch.tensor(0.7 + vary / 10),
        by_source=None,
        counts=counts.double(),
        grad_norm=1 + vary,
        skipped_steps=0,
        lr=rates,
        num_planned=128,
        broken=[],
        data_wait_s=vary / 100,
        step_time_s=3.2 + vary / 10,
    )


def row_of(progress: Progress, step: int) -> dict:
    result = result_of(step)
    counts = module.Counts(*map(int, result.counts.tolist()))
    read = module._on_host(result, result.loss.item(), result.grad_norm, 0, counts, None, None)
    rates = {"tokens_per_s": round(33_000 + 3_000 * drawn.random(), 1), "mfu": round(0.4 + drawn.random() / 10, 6)}
    return {**progress._row(read, rates), "peak_memory_bytes": 62_913_536_000 + step}


if __name__ == "__main__":
    main()
