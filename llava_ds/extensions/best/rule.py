"""Which evaluation of a run is the best, by rows of evals.jsonl.

Source: transformers' Trainer and its EarlyStoppingCallback.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from llava_ds.constants import DataError


@dataclass(frozen=True)
class BestRule:
    """What makes an evaluation the best. metric: a name in evals.jsonl; greater: larger is better; patience: the
    evaluations without a better one after which a run ends, None for never; threshold: by how much better is better
    for patience."""

    metric: str
    greater: bool
    patience: int | None
    threshold: float

    def has_value(self, row: dict) -> bool:
        """True if the metric is in a row of evals.jsonl. An earlier start may have measured others."""
        return self._name in self._numbers(row)

    def value(self, row: dict) -> float:
        """The metric in a row of evals.jsonl. Raises DataError where the row has none of that name."""
        found = self._numbers(row)
        if self._name not in found:
            raise DataError(
                f"--metric_for_best_model {self.metric} is not measured: the evaluation at step {row['step']} has "
                f"{', '.join(sorted(found))}. Name one of them, and start the same command again"
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
        """True if a value is better than the best so far, which is None before the first. A nan never is."""
        return value == value and (best is None or (value > best if self.greater else value < best))

    def best(self, rows: Iterable[dict]) -> dict | None:
        """The row with the best value, the first of equal ones; None where there is none that is a number."""
        chosen, best = None, None
        for row in filter(self.has_value, rows):
            if self.is_better(value := self.value(row), best):
                chosen, best = row, value
        return chosen

    def evaluations_without(self, rows: Iterable[dict]) -> int:
        """Count the evaluations of the metric since one was better than all before by more than the threshold."""
        best, count = None, 0
        for row in filter(self.has_value, rows):
            value = self.value(row)
            better = self.is_better(value, best)
            count = 0 if better and (best is None or abs(value - best) > self.threshold) else count + 1
            best = value if better else best
        return count


def best_rule(flags: Mapping[str, object]) -> BestRule | None:
    """The rule that a run's flags ask for, by their names; None where they ask for none."""
    metric, patience = flags.get("metric_for_best_model"), flags.get("early_stopping_patience")
    if not (flags.get("load_best_model_at_end") or metric or patience):
        return None
    metric, greater = str(metric or "eval_loss"), flags.get("greater_is_better")
    if greater is None:
        greater = not metric.endswith("loss") and not metric.removeprefix("eval_").startswith("loss/")
    return BestRule(metric, bool(greater), patience, flags.get("early_stopping_threshold") or 0.0)
