"""skipped.jsonl: every record that is left out of training, with its place and the reason."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from llava_ds.files.jsonl import RowLog, rows_of
from llava_ds.runtime.ranks import Ranks, broadcast_from_first, gather, print_first


class SkippedSamples:
    """The records left out before training, and images that broke during training, with the step.

    A resumed run meets the images that broke after its checkpoint again: their lines are dropped, as in metrics.jsonl.
    """

    def __init__(
        self, path: Path, rejections: Iterable[dict], num_allowed: float, resume_step: int, ranks: Ranks
    ) -> None:
        """rejections: from the preflight; num_allowed: records that may be left out, including these."""
        self.path, self.num_allowed, self.ranks = path, num_allowed, ranks
        rejections = list(rejections)
        self.num_rejected = len(rejections)
        before = broadcast_from_first(ranks, lambda: rows_of(path))
        earlier = [row for row in before if 0 < row.get("step", 0) <= resume_step]
        self.broken = {(row["file"], row["index"]) for row in earlier}
        self.log = RowLog(path, [*rejections, *earlier]) if ranks.is_first else None

    def add(self, results: list) -> None:
        """Record the broken samples of some steps. results: StepResults with numbers, the same steps on every rank."""
        if all(result.num_planned == result.counts.samples for result in results):
            return  # true on all ranks: the counts are sums over ranks
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
