"""Logged numbers of the steps: thin them out and smooth them for display, and find the ones of an objective.

Every metric of an objective is logged and sent to trackers. To show it in the progress bar and in a chart of the
report, add a Number of the same name to ExtensionFlags.numbers.
"""

import math
from collections.abc import Sequence

from llava_ds.extensions.active import flags_class
from llava_ds.extensions.base import Number
from llava_ds.extensions.table import EXTENSIONS

MOST_POINTS = 1000  # maximum points per drawn curve; more than it has pixels
# Names of numbers in metrics.jsonl that don't depend on the objective.
COLUMNS = frozenset(
    {
        "step", "epoch", "loss", "lr", "grad_norm", "samples", "tokens", "supervised_tokens", "step_time_s",
        "data_wait_s", "tokens_per_s", "mfu", "peak_memory_bytes", "skipped_steps", "broken_samples",
        "source_losses", "micro_batch_losses",
    }
)  # fmt: skip


class Smoothed:
    """An exponential running mean, corrected for the bias of its first steps. Non-finite values are ignored."""

    def __init__(self, weight: float = 0.9) -> None:
        self.weight, self.total, self.norm = weight, 0.0, 0.0

    def add(self, value: float) -> float:
        """Add a value, and return the mean; nan until a finite value was added."""
        if math.isfinite(value):
            self.total = self.weight * self.total + (1 - self.weight) * value
            self.norm = self.weight * self.norm + (1 - self.weight)
        return self.value

    @property
    def value(self) -> float:
        return self.total / self.norm if self.norm else math.nan


def running_mean(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Return the exponential running mean after each value, corrected for bias. Non-finite values are ignored."""
    smoothed = Smoothed(weight)
    return [smoothed.add(value) for value in values]


def thinned(steps: Sequence[int], values: Sequence[float], most: int = MOST_POINTS) -> tuple[list[int], list[float]]:
    """Return at most `most` points of a curve: the smallest and largest value of each of equally long parts.

    Non-finite points are left out, unless a part has no other.
    """
    if len(steps) <= most:
        return list(steps), list(values)
    kept: list[int] = [0, len(steps) - 1]
    stretch = len(steps) / (most // 2 - 1)
    for i in range(most // 2 - 1):
        indices = range(int(i * stretch), min(len(steps), int((i + 1) * stretch)))
        finite = [j for j in indices if math.isfinite(values[j])] or list(indices[:1])
        kept += [min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)]
    kept = sorted(set(kept))
    return [steps[i] for i in kept], [values[i] for i in kept]


def means_by_source(sources: list[str], sums: list[float], targets: list[float]) -> dict[str, float]:
    """Return the mean loss per supervised token of each data source that has any, to five significant digits."""
    means = {name: total / number for name, total, number in zip(sources, sums, targets) if number}
    return {name: float(f"{mean:.5g}") for name, mean in means.items()}


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def known_numbers() -> dict[str, Number]:
    """Return all extensions' ExtensionFlags.numbers, by name. They have a chart in the report."""
    return {name: number for flags in map(flags_class, EXTENSIONS) for name, number in flags.numbers.items()}


def objective_numbers(row: dict) -> dict[str, float]:
    """Return the numbers in a row of metrics.jsonl that are specific to the objective."""
    return {name: value for name, value in row.items() if name not in COLUMNS and is_number(value)}


def bar_parts(row: dict) -> list[str]:
    """Return the texts that the progress bar shows for the objective's numbers in a row of metrics.jsonl."""
    numbers = objective_numbers(row)
    known = known_numbers() if numbers else {}
    return [number.bar.format(numbers[name]) for name, number in known.items() if number.bar and name in numbers]
