"""Format the scores of an evaluation as JSON and as a printed table."""

from dataclasses import asdict, dataclass

import numpy as np

from llava_ds.extensions.benchmarks.scores import Scored
from llava_ds.runtime.ranks import printable
from llava_ds.tracking.result import CONDITIONS

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
    """Estimate each metric per question kind, and over all units as "overall", the last key. resamples: at least 1.

    For a share of correct answers, the interval is Wilson's (1927), because a bootstrap would give no uncertainty for
    20 correct of 20. For other metrics, it is a percentile bootstrap (Efron 1979) over units, deterministic by seed.
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
    """Return the 95 % interval of a share observed in `number` units (Wilson 1927)."""
    z2 = NORMAL**2 / number
    middle = share + z2 / 2
    half = NORMAL * (share * (1 - share) / number + z2 / (4 * number)) ** 0.5
    return max(0.0, (middle - half) / (1 + z2)), min(1.0, (middle + half) / (1 + z2))


def units_of(scored: Scored) -> dict[str, np.ndarray]:
    """Return the indices of each kind's units, sorted by kind, and of all units as "overall"."""
    kinds = sorted({kind for each in scored.kinds for kind in each} - {OVERALL})
    chosen = {kind: np.array([i for i, each in enumerate(scored.kinds) if kind in each]) for kind in kinds}
    return {**chosen, OVERALL: np.arange(len(scored.kinds))}


FEW_QUESTIONS = 20  # with fewer questions, a score is too uncertain
LONGEST_KIND = 32  # characters


def as_json(columns: dict[str, Scored], resamples: int, seed: int) -> dict[str, object]:
    """Return the scores as JSON values.

    scores: [sum, number of units] of the first metric, by column and kind; metrics: every metric with its 95 %
    interval, by column and kind; resamples and seed: settings of the bootstrap.
    """
    return {
        "metric": next(iter(next(iter(columns.values())).metrics)),
        "scores": {
            name: {kind: [float(scored.columns[i, 0].sum()), len(i)] for kind, i in units_of(scored).items()}
            for name, scored in columns.items()
        },
        "metrics": {
            name: {
                kind: {metric: asdict(estimate) for metric, estimate in metrics.items()}
                for kind, metrics in estimates(scored, resamples, seed).items()
            }
            for name, scored in columns.items()
        },
        "resamples": resamples,
        "seed": seed,
    }


def interval_lines(scores: dict) -> list[str]:
    """Return a line per column with the metrics over all questions, and their intervals."""
    lines = []
    for name, kinds in scores["metrics"].items():
        figures = (
            f"{metric} {each['value']:.3f} [{each['low']:.3f}, {each['high']:.3f}]"
            for metric, each in kinds[OVERALL].items()
        )
        asked = scores["scores"][name][OVERALL][1]
        few = f" (too few questions: {asked}; use {FEW_QUESTIONS} or more)" if asked < FEW_QUESTIONS else ""
        lines.append(f"  {name}: {', '.join(figures)}{few}")
    return lines


def legend(columns: list[str], rows: list[dict], turns: str) -> list[str]:
    """Return lines that explain the table's columns, and that later questions of a record include earlier answers."""
    lines = [f"  {name}: {CONDITIONS[name]}" for name in columns if name in CONDITIONS]
    later = sum(row.get("turn", 1) > 1 for row in rows)
    if later and turns == "together":
        lines.append(
            f"{later:,} of {len(rows):,} questions are later turns, asked after the true earlier answers, which may "
            "reveal theirs: --turns each asks every question separately"
        )
    return lines


def table(scores: dict) -> list[str]:
    """Return the table's lines: a row per kind, a column of the first metric per run, and the question count."""
    sums = scores["scores"]
    first = next(iter(sums.values()))
    width = max(len(_shortened(kind)) for kind in first) + 2
    lines = [f"{'kind':{width}}{'questions':>10}" + "".join(f"{name:>18}" for name in sums)]
    for kind, (_, asked) in first.items():
        cells = "".join(f"{each[kind][0] / each[kind][1]:>18.3f}" for each in sums.values())
        lines.append(f"{_shortened(kind):{width}}{asked:>10,}{cells}")
    return lines


def _shortened(kind: str) -> str:
    """Shorten a kind's name in the middle if it would make the table too wide."""
    half = LONGEST_KIND // 2
    return printable(kind if len(kind) <= LONGEST_KIND else f"{kind[:half]}…{kind[1 - half :]}")
