"""Flags for choosing the best evaluation, and for early stopping."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from llava_ds.config.bounds import Count, Rate
from llava_ds.config.flags import flags_of
from llava_ds.extensions.base import ExtensionFlags

if TYPE_CHECKING:
    from llava_ds.config.arguments import Arguments

_, _best = flags_of("best")


@dataclass(frozen=True)
class Flags(ExtensionFlags):
    """Flags for choosing the best evaluation, and for early stopping."""

    zeros: ClassVar = {"early_stopping_patience": "leave it out to train to the end"}

    metric_for_best_model: str | None = _best(
        None,
        "Metric that finds the best evaluation: eval_loss, eval_loss/NAME of one data source, a benchmark by its name, "
        "or another number in evals.jsonl. --save_total_limit never deletes the best evaluation's checkpoint. Absent: "
        "eval_loss, if --load_best_model_at_end or --early_stopping_patience is given.",
    )
    greater_is_better: bool | None = _best(
        None, "True: larger values of the metric are better. Absent: True unless the metric is a loss."
    )
    load_best_model_at_end: bool = _best(
        False, "Export the model of the checkpoint with the best evaluation instead of the last step's."
    )
    early_stopping_patience: Count | None = _best(
        None, "End the run after this many evaluations in a row without a better one. Absent: never."
    )
    early_stopping_threshold: Rate = _best(
        0.0, "Smallest improvement over the best evaluation so far that counts for --early_stopping_patience."
    )

    def problems(self, args: "Arguments") -> Iterator[str]:
        """Yield a line for missing evaluations or checkpoints, and for flags without an effect."""
        training = args.training
        wanted = {
            "--load_best_model_at_end True": self.load_best_model_at_end,
            f"--early_stopping_patience {self.early_stopping_patience}": self.early_stopping_patience is not None,
            f"--metric_for_best_model {self.metric_for_best_model}": self.metric_for_best_model is not None,
        }
        given = [flag for flag, is_set in wanted.items() if is_set]
        if given and not args.evaluates:
            yield f"{given[0]} needs eval samples: give --eval_data_path, --eval_fraction or --eval_tasks"
        if self.load_best_model_at_end and (training.save_strategy == "no" or training.save_only_model):
            flag = "--save_only_model True" if training.save_only_model else "--save_strategy no"
            yield f"--load_best_model_at_end True loads a checkpoint, but {flag} saves none to load: leave one out"
        if self.greater_is_better is not None and not given:
            yield (
                "--greater_is_better has no effect without --load_best_model_at_end or --early_stopping_patience: "
                "leave it out"
            )
        if self.early_stopping_threshold and self.early_stopping_patience is None:
            yield (
                "--early_stopping_threshold has no effect without --early_stopping_patience: give that, or leave it out"
            )
