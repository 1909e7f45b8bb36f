"""Compare the times of ways of training that ran in turns, and refuse runs that trained differently."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llava_ds.constants import ConfigError
from llava_ds.files.jsonl import read_metrics
from llava_ds.files.writing import run_folder

OURS = "llava_ds"
PADDED = "Trainer, padded"
RECOMPUTED = "Trainer, padded, recomputing"
SIDES = (OURS, PADDED, RECOMPUTED)

LARGEST_DIFFERENCE = 1e-3  # relative difference of loss and gradient norm between the sides, in fp32


@dataclass(frozen=True)
class Run:
    """Measurements of one run of one side: a value per optimizer step."""

    side: str
    round: int
    step_time_s: list[float]
    loss: list[float]
    grad_norm: list[float]
    gemm_flops_per_rank: float
    peak_memory_bytes: int
    cpu_time_s: list[float]

    def seconds(self, warm_up: int, of_cpu: bool = False) -> float:
        """Return the seconds of all steps after the warm-up. of_cpu: True for processor time, summed over ranks."""
        return sum((self.cpu_time_s if of_cpu else self.step_time_s)[warm_up:])


def turns(sides: tuple[str, ...], rounds: int) -> list[tuple[int, str]]:
    """Return (round, side) in running order: every side once per round, starting with a different one each time.

    Changes in the machine's speed then affect all sides alike.
    """
    return [(r, sides[(r + i) % len(sides)]) for r in range(rounds) for i in range(len(sides))]


def read_run(side: str, number: int, written: Path, peak_file: Path) -> Run:
    """Read a run from run/train.py's output folder or hf_trainer.py's file."""
    if side == OURS:
        rows = read_metrics(run_folder(written) / "metrics.jsonl")
        values = {name: [row[name] for row in rows] for name in ("step_time_s", "loss", "grad_norm")}
        values["peak_memory_bytes"] = max(row["peak_memory_bytes"] for row in rows)
    else:
        values = json.loads(written.read_text())
    ranks = [json.loads(file.read_text()) for file in sorted(peak_file.parent.glob("cpu-*.json"))]
    values["cpu_time_s"] = [sum(steps) for steps in zip(*ranks, strict=True)]
    return Run(side, number, **values, **json.loads(peak_file.read_text()))


def refuse_different(runs: list[Run], what: str) -> dict[str, float]:
    """Return the largest relative differences of loss and gradient norm from the first run.

    what: the comparison's name. Raises ConfigError if the runs trained differently: their times can't be compared.
    """
    lengths = {len(values) for run in runs for values in (run.step_time_s, run.loss, run.grad_norm)}
    if len(lengths) > 1:
        raise ConfigError(f"{what}: the runs differ in their number of steps ({sorted(lengths)}): check their logs")
    found = {}
    for name in ("loss", "grad_norm"):
        first, *others = (np.array(getattr(run, name)) for run in runs)
        difference = found[name] = float(np.max(np.abs(np.array(others) - first) / np.abs(first)))
        if not difference <= LARGEST_DIFFERENCE:  # also true for NaN
            raise ConfigError(
                f"{what}: {name} differs by {difference:.1e} between {', '.join(sorted({run.side for run in runs}))}; "
                f"rounding explains at most {LARGEST_DIFFERENCE:g}: they do not train the same, so their times can't "
                "be compared"
            )
    return found


def ratios(runs: list[Run], other: str, warm_up: int, of_cpu: bool = False) -> list[float]:
    """Return the other side's time divided by ours, per round."""
    seconds = {(run.round, run.side): run.seconds(warm_up, of_cpu) for run in runs}
    return [seconds[r, other] / seconds[r, OURS] for r in sorted({run.round for run in runs})]


def fractions_of_peak(
    runs: list[Run], side: str, useful_flops: list[float], num_ranks: int, warm_up: int
) -> list[float]:
    """Return a side's useful FLOP/s per round, as a fraction of the matrix-product speed. useful_flops: per step."""
    useful = sum(useful_flops[warm_up:])
    mine = [run for run in runs if run.side == side]
    return [useful / run.seconds(warm_up) / (num_ranks * run.gemm_flops_per_rank) for run in mine]
