# U scored units, C columns
"""Bootstrap intervals of scores."""

from dataclasses import dataclass

import numpy as np

from llava_ds.extensions.benchmarks.scores import Scored

OVERALL = "overall"
COVERED = (2.5, 97.5)  # percentiles of the resampled scores: a 95 % interval


@dataclass(frozen=True)
class Estimate:
    """A score and its 95 % interval."""

    value: float
    low: float
    high: float


def estimates(scored: Scored, resamples: int, seed: int) -> dict[str, dict[str, Estimate]]:
    """Estimate each metric per question kind, and over all units as "overall", the last key. resamples: 1 or more.

    Percentile bootstrap (Efron 1979) over units, deterministic for a seed.
    """
    result = {}
    for kind, chosen in units_of(scored).items():
        columns = scored.columns[chosen]
        rng = np.random.default_rng(seed)
        means = np.empty((resamples, columns.shape[1]))
        for i in range(resamples):
            means[i] = columns[rng.integers(len(columns), size=len(columns))].mean(axis=0)
        result[kind] = {}
        for name, figure in scored.metrics.items():
            low, high = np.percentile(figure(means), COVERED)
            result[kind][name] = Estimate(float(figure(columns.mean(axis=0))), float(low), float(high))
    return result


def units_of(scored: Scored) -> dict[str, np.ndarray]:
    """Return the unit numbers of each kind, in the kinds' order, and of all units as "overall"."""
    kinds = sorted({kind for each in scored.kinds for kind in each} - {OVERALL})
    chosen = {kind: np.array([i for i, each in enumerate(scored.kinds) if kind in each]) for kind in kinds}
    return {**chosen, OVERALL: np.arange(len(scored.kinds))}
