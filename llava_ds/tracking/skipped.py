"""Write skipped.jsonl (every record left out of training, with the reason) and skipped_steps.jsonl (every step whose
loss or gradients were not finite, with its samples)."""

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path

from llava_ds.data.dataset import sample_ids
from llava_ds.data.step_plan import StepPlan
from llava_ds.files.jsonl import RowLog, rows_of
from llava_ds.runtime.ranks import Ranks, broadcast_from_first, gather, print_first

STEPS_FILE = "skipped_steps.jsonl"
MOST_NAMED = 8  # maximum samples in printed messages


class SkippedSamples:
    """Logs the records left out before training, and samples whose images could not be read during training.

    A resumed run drops the rows after its checkpoint, because it will reach these samples again.
    """

    def __init__(
        self, path: Path, rejections: Iterable[dict], num_allowed: float, resume_step: int, ranks: Ranks
    ) -> None:
        """rejections: records left out before training; num_allowed: maximum left-out records, these included."""
        self.path, self.num_allowed, self.ranks = path, num_allowed, ranks
        rejections = list(rejections)
        self.num_rejected = len(rejections)
        before = broadcast_from_first(ranks, lambda: rows_of(path))
        earlier = [row for row in before if 0 < row.get("step", 0) <= resume_step]
        self.broken = {(row["file"], row["index"]) for row in earlier}
        self.log = RowLog(path, [*rejections, *earlier]) if ranks.is_first else None

    def add(self, results: list) -> None:
        """Log the broken samples of some steps. results: StepResults read from the device. Collective."""
        if all(result.num_planned == result.counts.samples for result in results):
            return  # true on all ranks, because the counts are sums over ranks
        mine = [{**dataclasses.asdict(broken), "step": result.step} for result in results for broken in result.broken]
        rows = [row for part in gather(mine, self.ranks) for row in part]
        rows.sort(key=lambda row: (row["step"], row["file"], row["index"]))
        self.broken |= {(row["file"], row["index"]) for row in rows}
        if self.ranks.is_first:
            self.log.write(rows)
        print_first(*(f"step {row['step']}: left out {row['id']}: {row['reason']}" for row in rows))

    @property
    def problem(self) -> str | None:
        """The reason to end the run, the same on every rank, or None."""
        if not self.broken or self.num_rejected + len(self.broken) <= self.num_allowed:
            return None
        return (
            f"{len(self.broken)} samples broke while training, and {self.num_rejected} records were left out "
            f"before: more than --on_bad_sample and --max_bad_fraction allow ({int(self.num_allowed)}). {self.path} "
            "lists them: repair them or raise the limit, and start again to resume from the last checkpoint"
        )


class SkippedSteps:
    """Logs the steps whose update was skipped, and counts consecutive ones.

    If losses were not finite, the samples of these ranks are logged; otherwise the samples of all ranks, because only
    the summed gradients are checked. A resumed run drops the rows after its checkpoint.
    """

    def __init__(
        self,
        output_dir: Path,
        plan: StepPlan,
        most: int,
        before: tuple[int, int],
        ranks: Ranks,
    ) -> None:
        """most: --max_skipped_steps; before: number of steps before this start, number of skipped ones among them."""
        self.path, self.most, self.ranks = output_dir / STEPS_FILE, most, ranks
        resume_step, self._num_skipped = before
        self._plan = plan
        noted = broadcast_from_first(ranks, lambda: rows_of(self.path))
        earlier = [row for row in noted if row["step"] <= resume_step]
        self.log = RowLog(self.path, earlier) if ranks.is_first else None
        steps = {row["step"] for row in earlier}
        self.in_a_row = 0  # consecutive skipped steps up to now, the same on every rank
        while resume_step - self.in_a_row in steps:
            self.in_a_row += 1
        self.problem: str | None = None  # the reason to end the run, the same on every rank

    def add(self, results: list) -> None:
        """Log the skipped steps among the results. results: StepResults read from the device. Collective."""
        for result in results:
            skipped, self._num_skipped = result.skipped_steps > self._num_skipped, result.skipped_steps
            self.in_a_row = self.in_a_row + 1 if skipped else 0
            if skipped:  # true on all ranks, because their engines count alike
                self._note(result.step, result.own_loss)
            if self.in_a_row >= self.most:
                self.problem = self._too_many(result.step)

    def _too_many(self, step: int) -> str:
        return (
            f"{self.in_a_row} steps in a row ({step - self.in_a_row + 1:,} to {step:,}) had a "
            f"loss or gradients that are not finite, and changed nothing: --max_skipped_steps is {self.most}. "
            f"{self.path} has their samples. The checkpoints are not affected: repair the data, lower "
            "--learning_rate or set --max_grad_norm (both start a new run), or raise --max_skipped_steps"
        )

    def _note(self, step: int, loss: float) -> None:
        wrong = [rank for rank, finite in enumerate(gather(math.isfinite(loss), self.ranks)) if not finite]
        micro_batches = self._plan.of_ranks(step, wrong or None)
        ids = sample_ids(self._plan.dataset, [sample for micro_batch in micro_batches for sample in micro_batch])
        what = "loss" if wrong else "gradients"
        if self.ranks.is_first:
            self.log.write([{"step": step, "not_finite": what, "ranks": wrong, "samples": ids}])
        more = f" and {len(ids) - MOST_NAMED:,} more" if len(ids) > MOST_NAMED else ""
        named = ", ".join(ids[:MOST_NAMED]) + more
        print_first(
            f"step {step:,} is skipped, because its {what} {'is' if wrong else 'are'} not finite: samples {named}"
        )
