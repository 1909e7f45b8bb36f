"""The rule that finds the best evaluation of a run, from rows of evals.jsonl.

Source: transformers' Trainer and its EarlyStoppingCallback.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from llava_ds.constants import DataError


@dataclass(frozen=True)
class BestRule:
    """The rule for the best evaluation.

    metric: a name in evals.jsonl; greater: True if larger is better; patience: end the run after this many evaluations
    without improvement, None for never; threshold: minimum improvement that counts for patience.
    """

    metric: str
    greater: bool
    patience: int | None
    threshold: float

    def has_value(self, row: dict) -> bool:
        """Return True if a row of evals.jsonl has the metric. Rows from before a resume may have other metrics."""
        return self._name in self._numbers(row)

    def value(self, row: dict) -> float:
        """Return the metric in a row of evals.jsonl. Raises DataError if it is missing."""
        found = self._numbers(row)
        if self._name not in found:
            raise DataError(
                f"--metric_for_best_model {self.metric} is not measured: the evaluation at step {row['step']} has "
                f"{', '.join(sorted(found))}. Give one of these names, and start the same command again"
            )
        return found[self._name]

    @property
    def _name(self) -> str:
        return self.metric.removeprefix("eval_")

    def _numbers(self, row: dict) -> dict[str, float]:
        found = {name: value for name, value in row.items() if isinstance(value, float)}
        found |= {f"loss/{name}": value for name, value in row.get("source_losses", {}).items()}
        found.pop("seconds", None)
        return found

    def is_better(self, value: float, best: float | None) -> bool:
        """Return True if a value is better than the best so far (None before the first value). NaN is never better."""
        return value == value and (best is None or (value > best if self.greater else value < best))

    def best(self, rows: Iterable[dict]) -> dict | None:
        """Return the first row with the best value; None if no row has a number."""
        chosen, best = None, None
        for row in filter(self.has_value, rows):
            if self.is_better(value := self.value(row), best):
                chosen, best = row, value
        return chosen

    def evaluations_without(self, rows: Iterable[dict]) -> int:
        """Count the evaluations with the metric since the last improvement by more than the threshold."""
        best, count = None, 0
        for row in filter(self.has_value, rows):
            value = self.value(row)
            better = self.is_better(value, best)
            count = 0 if better and (best is None or abs(value - best) > self.threshold) else count + 1
            best = value if better else best
        return count


def best_rule(flags: Mapping[str, object]) -> BestRule | None:
    """Return the rule that a run's flags request; None if they request none."""
    metric, patience = flags.get("metric_for_best_model"), flags.get("early_stopping_patience")
    if not (flags.get("load_best_model_at_end") or metric or patience):
        return None
    metric, greater = str(metric or "eval_loss"), flags.get("greater_is_better")
    if greater is None:
        greater = not metric.endswith("loss") and not metric.removeprefix("eval_").startswith("loss/")
    return BestRule(metric, bool(greater), patience, flags.get("early_stopping_threshold") or 0.0)
