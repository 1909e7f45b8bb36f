"""Keep and export the checkpoint with the best evaluation of a run, and stop the run early.

All decisions depend only on evals.jsonl and the existing checkpoints, so a resumed run decides like an uninterrupted
run.
"""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from llava_ds.checkpoint import commit
from llava_ds.checkpoint.trainer_file import checkpoint_problem
from llava_ds.checkpoint.training_state import rewind
from llava_ds.constants import ConfigError, DataError
from llava_ds.data.step_plan import steps_between
from llava_ds.extensions.base import Extension, Hook, Measure, Phase
from llava_ds.extensions.best.rule import BestRule, best_rule
from llava_ds.files.writing import write_whole
from llava_ds.runtime.ranks import Ranks, broadcast_from_first, print_first
from llava_ds.tracking.metric_copies import TRAINER_STATE
from llava_ds.train.evaluating.evals import numbers_of
from llava_ds.train.plan import Plan
from llava_ds.train.session import Session


class BestCheckpoint(NamedTuple):
    """The checkpoint with the best evaluation, and its value of the metric."""

    path: Path
    step: int
    value: float


@dataclass(frozen=True)
class Best(Measure):
    """The rule, and the run's evaluations so far, on rank 0. rows: rows of evals.jsonl, appended to as the run goes."""

    rule: BestRule
    output_dir: Path
    rows: list[dict]

    def checkpoint(self) -> BestCheckpoint | None:
        """Return the existing checkpoint with the best evaluation, or None."""
        saved = {commit.step_of(path): path for path in commit.checkpoints(self.output_dir)}
        row = self.rule.best(row for row in self.rows if row["step"] in saved)
        return None if row is None else BestCheckpoint(saved[row["step"]], row["step"], self.rule.value(row))

    def path(self) -> Path | None:
        """Return the folder of the best checkpoint, or None."""
        found = self.checkpoint()
        return None if found is None else found.path

    def why_over(self) -> str | None:
        """Return the reason to end the run now, or None. Raises DataError if the last evaluation lacks the metric."""
        if self.rows:
            self.rule.value(self.rows[-1])
        count = self.rule.evaluations_without(self.rows)
        if self.rule.patience is None or count < self.rule.patience:
            return None
        row = self.rule.best(self.rows)
        best = "nan (in every one so far)" if row is None else f"{self.rule.value(row):.4f} at step {row['step']:,}"
        return (
            f"{count} evaluations without a better {self.rule.metric} than {best}: training ends here "
            f"(--early_stopping_patience {self.rule.patience})"
        )


class KeepBest(Hook):
    """Judges evaluations, protects the best checkpoint, and exports its model if requested."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        plan, evaluation = session.plan, session.evaluation
        self.own, self.found = plan.args.own["best"], None
        self.best = Best(best_rule(vars(self.own)), plan.output_dir, evaluation.log.losses)
        evaluation.measures.append(self.best)
        session.saver.protected_checkpoint = self.best.path

    def before_export(self) -> int | None:
        """Load the best checkpoint into the model if requested; returns its step. Raises DataError if it is damaged."""
        session, ranks, metric = self.session, self.session.ranks, self.best.rule.metric
        found = self.found = broadcast_from_first(ranks, self.best.checkpoint)
        if found is None or not self.own.load_best_model_at_end:
            return None
        if found.step != session.state.step:
            problem = broadcast_from_first(ranks, partial(checkpoint_problem, found.path))
            if problem is not None:
                raise DataError(
                    f"{found.path}, the checkpoint with the best {metric}, can't be used: {problem}. Without "
                    f"--load_best_model_at_end the same command exports the model of step {session.state.step:,}"
                )
            rewind(session.engine, found.path, ranks)
        print_first(f"{found.path.name} has the best {metric}, {found.value:.4f}: its model is exported")
        return found.step

    def after_export(self) -> None:
        if self.found is not None and self.session.ranks.is_first:
            path = self.session.plan.output_dir / TRAINER_STATE
            best = {"best_metric": self.found.value, "best_model_checkpoint": str(self.found.path)}
            write_whole(path, json.dumps(json.loads(path.read_text(encoding="utf-8")) | best, indent=2) + "\n")


def complete(plan: Plan, ranks: Ranks) -> None:
    """Raise ConfigError unless every checkpoint has an evaluation with the metric."""
    training, own = plan.args.training, plan.args.own["best"]
    eval_steps = steps_between(training.eval_steps, plan.steps.num_steps)
    metric = best_rule(vars(own)).metric
    if eval_steps is None:
        raise ConfigError(
            "--load_best_model_at_end, --metric_for_best_model and --early_stopping_patience compare evaluations, but "
            "this run has only one, at the end: give --eval_steps or --eval_strategy"
        )
    if own.load_best_model_at_end and training.save_steps % eval_steps:
        multiple = -(-training.save_steps // eval_steps) * eval_steps
        raise ConfigError(
            f"--load_best_model_at_end True needs an evaluation at every checkpoint, but the {training.save_steps} "
            f"steps between checkpoints are not a multiple of the {eval_steps} between evaluations: give "
            f"{'--eval_strategy epoch' if training.save_strategy == 'epoch' else f'--save_steps {multiple}'}"
        )
    if metric.removeprefix("eval_") not in (numbers := numbers_of(plan)):
        raise ConfigError(
            f"--metric_for_best_model {metric} is not measured by this run: give one of {', '.join(numbers)}"
        )


extension = Extension(complete=complete, hooks=((Phase.EVALUATE, KeepBest),))
