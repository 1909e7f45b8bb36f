# U scored units, C columns
"""Confidence intervals of scores."""

from dataclasses import dataclass

import numpy as np

from llava_ds.extensions.benchmarks.scores import Scored

OVERALL = "overall"
NORMAL = 1.96  # standard deviations on each side that contain 95 % of a normal distribution
COVERED = (2.5, 97.5)  # percentiles of the resampled scores: a 95 % interval


@dataclass(frozen=True)
class Estimate:
    """A score and its 95 % interval."""

    value: float
    low: float
    high: float


def estimates(scored: Scored, resamples: int, seed: int) -> dict[str, dict[str, Estimate]]:
    """Estimate each metric per question kind, and over all units as "overall", the last key. resamples: 1 or more.

    A share of right answers has Wilson's interval (1927), because 20 right of 20 don't mean certainty. Other metrics
    have a percentile bootstrap (Efron 1979) over units, deterministic for a seed.
    """
    result, first = {}, next(iter(scored.metrics))
    for kind, chosen in units_of(scored).items():
        columns = scored.columns[chosen]
        rng = np.random.default_rng(seed)
        means = np.empty((resamples, columns.shape[1]))
        for i in range(resamples):
            means[i] = columns[rng.integers(len(columns), size=len(columns))].mean(axis=0)
        result[kind] = {}
        for name, figure in scored.metrics.items():
            value = float(figure(columns.mean(axis=0)))
            is_share = name == first and np.isin(columns[:, 0], (0, 1)).all()
            low, high = wilson(value, len(columns)) if is_share else np.percentile(figure(means), COVERED)
            result[kind][name] = Estimate(value, float(low), float(high))
    return result


def wilson(share: float, number: int) -> tuple[float, float]:
    """The 95 % interval of a share among a number of units (Wilson 1927)."""
    z2 = NORMAL**2 / number
    middle = share + z2 / 2
    half = NORMAL * (share * (1 - share) / number + z2 / (4 * number)) ** 0.5
    return max(0.0, (middle - half) / (1 + z2)), min(1.0, (middle + half) / (1 + z2))


def units_of(scored: Scored) -> dict[str, np.ndarray]:
    """Return the unit numbers of each kind, in the kinds' order, and of all units as "overall"."""
    kinds = sorted({kind for each in scored.kinds for kind in each} - {OVERALL})
    chosen = {kind: np.array([i for i, each in enumerate(scored.kinds) if kind in each]) for kind in kinds}
    return {**chosen, OVERALL: np.arange(len(scored.kinds))}
