"""The best evaluation of a run: which checkpoint is kept and becomes the model, and when to stop for want of a better.

All of it follows from evals.jsonl and the checkpoints that are there, so that a run that was killed judges as one that
was not.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llava_ds.checkpoint import commit
from llava_ds.config.arguments import Arguments
from llava_ds.constants import ConfigError
from llava_ds.data.dataset import EncodedDataset
from llava_ds.tracking.best_rule import BestCheckpoint, BestRule, best_rule


@dataclass(frozen=True)
class Best:
    """The rule over a run's evaluations so far. rows: of evals.jsonl, a list that grows. For rank 0."""

    rule: BestRule
    output_dir: Path
    rows: list[dict]

    def checkpoint(self) -> BestCheckpoint | None:
        """The checkpoint with the best evaluation of those that are there; None without one."""
        saved = {commit.step_of(path): path for path in commit.checkpoints(self.output_dir)}
        row = self.rule.best(row for row in self.rows if row["step"] in saved)
        if row is None:
            return None
        return BestCheckpoint(saved[row["step"]], row["step"], self.rule.metric, self.rule.value(row))

    def why_over(self) -> str | None:
        """The reason to end the run now; None to go on. Raises DataError where the last evaluation lacks the metric."""
        if self.rows:
            self.rule.value(self.rows[-1])
        count = self.rule.evaluations_without(self.rows)
        if self.rule.patience is None or count < self.rule.patience:
            return None
        row = self.rule.best(self.rows)
        best = "no number among them" if row is None else f"{self.rule.value(row):.4f} at step {row['step']:,}"
        return (
            f"{count} evaluations without a better {self.rule.metric} than {best}: training ends here "
            f"(--early_stopping_patience {self.rule.patience})"
        )


def check_best(args: Arguments, eval_steps: int | None) -> None:
    """Raise ConfigError where a checkpoint would have no evaluation by which it could be the best.

    eval_steps: from one to the next; None: there is one at the end alone.
    """
    training = args.training
    if best_rule(args.as_dict()) is None:
        return
    if eval_steps is None:
        raise ConfigError(
            "the best evaluation is looked for (--load_best_model_at_end, --metric_for_best_model, "
            "--early_stopping_patience), and there is one alone, at the end: give --eval_steps or --eval_strategy"
        )
    if training.load_best_model_at_end and training.save_steps % eval_steps:
        remedy = f"--save_steps {-(-training.save_steps // eval_steps) * eval_steps}"
        raise ConfigError(
            "--load_best_model_at_end True needs an evaluation at every checkpoint, and the "
            f"{training.save_steps} steps between checkpoints are no multiple of the {eval_steps} between evaluations: "
            "give "
            f"{'--eval_strategy epoch' if training.save_strategy == 'epoch' else remedy}"
        )


def check_metric(args: Arguments, eval_set: EncodedDataset | None, tasks: tuple[str, ...]) -> None:
    """Raise ConfigError where no evaluation of the run has the number by which the best is found.

    tasks: names of --eval_tasks.
    """
    rule, known = best_rule(args.as_dict()), list(tasks)
    if rule is None:
        return
    if eval_set is not None:
        known += ["loss", *args.traits.metrics]
        known += [f"loss/{name}" for name in eval_set.sources] if len(eval_set.sources) > 1 else []
    if rule.metric.removeprefix("eval_") not in known:
        raise ConfigError(
            f"--metric_for_best_model {rule.metric} is no number of this run's evaluations: give one of "
            f"{', '.join(known)}"
        )


def protected_checkpoint(best: Best | None) -> Callable[[], Path | None]:
    """What names the checkpoint that may not be deleted."""

    def path() -> Path | None:
        found = None if best is None else best.checkpoint()
        return None if found is None else found.path

    return path
