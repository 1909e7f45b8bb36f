"""evals.jsonl: the loss on eval samples during training."""

from pathlib import Path
from typing import NamedTuple

from llava_ds.files.jsonl import RowLog, rows_of
from llava_ds.runtime.ranks import Ranks, print_first
from llava_ds.tracking.trackers import Trackers

FILE = "evals.jsonl"


class EvalLoss(NamedTuple):
    """The result of an evaluation.

    loss: mean over supervised tokens (or pairs of answers). tokens, samples: number of supervised tokens, of samples.
    by_source: mean loss per data source, if there are several. metrics: means of the objective's metrics.
    """

    loss: float
    tokens: int
    samples: int
    by_source: dict[str, float]
    metrics: dict[str, float]


class Evals:
    """Writes evals.jsonl and prints eval results, on rank 0. A resumed run drops the rows after its checkpoint.

    losses: rows of evals.jsonl on rank 0, empty on other ranks.
    """

    def __init__(self, output_dir: Path, resume_step: int, ranks: Ranks, trackers: Trackers) -> None:
        self.trackers, self.is_first = trackers, ranks.is_first
        self.losses: list[dict] = []
        if self.is_first:
            path = output_dir / FILE
            self.losses += [row for row in rows_of(path) if row["step"] <= resume_step]
            self.evals = RowLog(path, self.losses)
            self._steps = {row["step"] for row in self.losses}

    def has(self, step: int) -> bool:
        """Return True if the run evaluated after this step before it was resumed. Call it on rank 0 only."""
        return step in self._steps

    def add(
        self,
        step: int,
        found: EvalLoss | None,
        scores: dict[str, float],
        *,
        broken: int,
        seconds: tuple[float, float],
    ) -> None:
        """Record an evaluation.

        found: the eval loss, None without eval samples; scores: metrics besides the loss; broken: number of samples
        left out of the loss because their images could not be read; seconds: time for the loss, time for the scores.
        """
        if not self.is_first:
            return
        row, curves = {"step": step}, {}
        if found is not None:
            loss, tokens, samples, by_source, metrics = found
            row |= {"loss": loss, "supervised_tokens": tokens, "samples": samples, "broken_samples": broken, **metrics}
            row |= {"source_losses": by_source} if by_source else {}
            curves = {"loss": loss, **{f"loss/{name}": mean for name, mean in by_source.items()}, **metrics}
            without = f" ({broken:,} left out as broken)" if broken else ""
            print_first(
                f"step {step:,}: the loss on {samples:,} eval samples{without} is {loss:.4f} ({seconds[0]:.1f} s)"
            )
        if scores:
            shown = ", ".join(f"{name} {score:.3f}" for name, score in scores.items())
            print_first(f"step {step:,}: {shown} ({seconds[1]:.1f} s)")
        self.losses.append({**row, **scores, "seconds": round(sum(seconds), 3)})
        self.evals.write(self.losses[-1:])
        self.trackers.log({f"eval/{name}": value for name, value in (curves | scores).items()}, step)
