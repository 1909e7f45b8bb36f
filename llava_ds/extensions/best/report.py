"""The best evaluation in the report and the model card."""

from llava_ds.constants import DataError
from llava_ds.extensions.base import ReportPart
from llava_ds.extensions.best.rule import BestRule, best_rule
from llava_ds.tracking.blocks import Block, note
from llava_ds.tracking.run_files import RunFiles


class Report(ReportPart):
    """Reports the best evaluation, and if early stopping ended the run."""

    def __init__(self, run: RunFiles) -> None:
        self.rows, self.rule, self.row = run.evals, None, None
        try:
            self.rule: BestRule | None = best_rule(run.flags)
            self.row = None if self.rule is None else self.rule.best(self.rows)
        except (AttributeError, DataError, KeyError, TypeError):  # damaged files
            return

    @property
    def is_over(self) -> bool:
        """True if --early_stopping_patience ended the run."""
        ends = self.row is not None and self.rule.patience is not None
        return ends and self.rule.evaluations_without(self.rows) >= self.rule.patience

    def sections(self) -> dict[str, list[Block]]:
        """Return a sentence to show above the scores."""
        return {"Evaluation": [note(f"The best {line}.", "note") for line in self._lines(" is")]}

    def card(self) -> list[str]:
        """Return a line of the model card."""
        return [f"- best {line}" for line in self._lines(":")]

    def _lines(self, verb: str) -> list[str]:
        if self.row is None:
            return []
        return [f"{self.rule.metric}{verb} {self.rule.value(self.row):.4f}, at step {self.row['step']:,}"]
