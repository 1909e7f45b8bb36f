"""Format the scores of an evaluation as JSON and as a printed table."""

from dataclasses import asdict

from llava_ds.extensions.benchmarks.bootstrap import OVERALL, estimates, units_of
from llava_ds.extensions.benchmarks.scores import Scored
from llava_ds.runtime.ranks import printable
from llava_ds.tracking.result import CONDITIONS

FEW_QUESTIONS = 20  # below this number a score says little
LONGEST_KIND = 32  # characters


def as_json(columns: dict[str, Scored], resamples: int, seed: int) -> dict[str, object]:
    """Return the scores as JSON values.

    scores: [sum, number of units] of the first metric by column and kind; metrics: every metric by column and kind,
    with its 95 % interval; resamples and seed: of the intervals.
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
    """Return a line per column with every metric over all questions and its interval."""
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
    """Explain the table's columns, and the context of later questions in a record."""
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
