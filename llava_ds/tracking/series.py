"""Numbers along the steps, thinned and smoothed for display."""

import math
from collections.abc import Sequence

MOST_POINTS = 1000  # per drawn curve: more than its pixels


class Smoothed:
    """An exponential running mean without the bias of its start; non-finite values are ignored."""

    def __init__(self, weight: float = 0.9) -> None:
        self.weight, self.total, self.norm = weight, 0.0, 0.0

    def add(self, value: float) -> float:
        """Return the mean including one more value; nan before the first one."""
        if math.isfinite(value):
            self.total = self.weight * self.total + (1 - self.weight) * value
            self.norm = self.weight * self.norm + (1 - self.weight)
        return self.value

    @property
    def value(self) -> float:
        return self.total / self.norm if self.norm else math.nan


def running_mean(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Return the exponential running mean without the bias of its start; non-finite values don't change it."""
    smoothed = Smoothed(weight)
    return [smoothed.add(value) for value in values]


def thinned(steps: Sequence[int], values: Sequence[float], most: int = MOST_POINTS) -> tuple[list[int], list[float]]:
    """Return at most `most` points of a curve, including the smallest and the largest value of every stretch.

    Non-finite points are left out if their stretch has others.
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
    """Return the mean loss per supervised token of each data source that has any, to five digits."""
    means = {name: total / number for name, total, number in zip(sources, sums, targets) if number}
    return {name: float(f"{mean:.5g}") for name, mean in means.items()}


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
