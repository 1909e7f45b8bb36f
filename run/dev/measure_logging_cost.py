"""Measure the cost of logging per step, and the size of its files: python run/dev/measure_logging_cost.py

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

from llava_ds.data.sample_order import SampleOrder
from llava_ds.data.step_plan import Packing, StepPlan
from llava_ds.model.flops import ModelFlops
from llava_ds.runtime.mesh import Mesh
from llava_ds.runtime.ranks import Ranks
from llava_ds.tracking import progress as module
from llava_ds.tracking.progress import Progress, RunFacts
from llava_ds.tracking.trackers import TensorBoard, Trackers
from llava_ds.train.skipped_samples import SkippedSamples
from llava_ds.train.skipped_steps import SkippedSteps
from llava_ds.train.state import StepResult

drawn = random.Random(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=100, help="of a round (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=100_000, help="whose size is taken (default: %(default)s)")
    args = parser.parse_args()
    module.sum_over = lambda group, values: values  # there is one rank
    with tempfile.TemporaryDirectory() as folder:
        each = seconds_per_step(Path(folder), args.rounds, args.steps)
    spread = f"{1e3 * each[0]:.2f} to {1e3 * each[-1]:.2f}"
    print(f"CPU per step: {1e3 * statistics.median(each):.2f} ms (median of {args.rounds} rounds, {spread})")
    with tempfile.TemporaryDirectory() as folder:
        sizes = sizes_of(Path(folder), args.rows)
    print(f"{args.rows:,} rows: {', '.join(f'{name} {size / 1e6:.1f} MB' for name, size in sizes.items())}")


def seconds_per_step(folder: Path, rounds: int, steps: int) -> list[float]:
    logging = Logging(folder, num_steps=10**9)
    count, each = 0, []
    for _ in range(rounds + 1):
        times = []
        for logged in (False, True):
            started = time.process_time()
            for _ in range(steps):
                count += 1
                result = result_of(count)
                if logged:
                    logging.after_step(result)
            times.append(time.process_time() - started)
        each.append((times[1] - times[0]) / steps)
    logging.close()
    return sorted(each[1:])  # the first was warm-up


def sizes_of(folder: Path, rows: int) -> dict[str, int]:
    """Bytes of each file."""
    logging = Logging(folder, rows)
    for step in range(1, rows + 1):
        logging.after_step(result_of(step))
    logging.close()
    files = [folder / "metrics.jsonl", folder / "metrics.csv", *(folder / "tensorboard").iterdir()]
    return {file.name: file.stat().st_size for file in files}


class Logging:
    """The log and the watches, as the hooks of a run drive them."""

    def __init__(self, folder: Path, num_steps: int) -> None:
        folder.mkdir(exist_ok=True)
        dataset = SimpleNamespace(sources=["data"])  # looked at only where something went wrong
        plan = StepPlan(dataset, SampleOrder(665_000, 128, seed=0), Packing(1, 128, 1, None), num_steps)
        flops = ModelFlops(per_token=1.4e10, per_pair=1e3, per_tile=3.6e11, per_target=1e8)
        alone = Ranks(0, 0, 1, torch.device("cpu"))
        trackers = Trackers({"tensorboard": TensorBoard(None, folder, 0)}, min(num_steps, 5_000))
        self.progress = Progress(
            RunFacts("a run", folder, 1, 0, flops, 8e15, lambda counts: counts.targets),
            plan,
            trackers,
            alone,
            Mesh.of(alone),
        )
        self.watches = (
            SkippedSamples(folder / "skipped.jsonl", [], 1, 0, alone),
            SkippedSteps(folder, plan, 3, (0, 0), alone),
        )

    def after_step(self, result: StepResult) -> None:
        read, _ = self.progress.after_step(result)
        for watch in self.watches:
            watch.add(read)

    def close(self) -> None:
        self.progress.bar.close()
        self.progress.trackers.close()


def result_of(step: int) -> StepResult:
    """Numbers with as many digits as real ones have, of four parameter groups."""
    rate, vary = 2e-5 * drawn.random(), drawn.random()
    counts = torch.tensor([128, 108_416 + int(9_000 * vary), 17_000 + int(2_000 * vary), 16, 5e7, 300])
    return StepResult(
        step=step,
        loss=torch.tensor(0.7 + vary / 10),
        by_source=torch.ones(2, 1),
        counts=counts.double(),
        grad_norm=1 + vary,
        skipped_steps=0,
        lr=[rate, rate, rate / 7, rate / 7],
        num_planned=128,
        broken=[],
        data_wait_s=vary / 100,
        step_time_s=3.2 + vary / 10,
    )


if __name__ == "__main__":
    main()
