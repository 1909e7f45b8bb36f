"""skipped.jsonl: every record that is not trained on, with where it stands and why."""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

from llava_ds.constants import DataError
from llava_ds.distributed import Ranks, gather, print_first


class SkippedLog:
    """The records left out before training, and those whose pictures broke on the way, with the step.

    A resumed run meets the broken pictures behind its checkpoint again: their lines are dropped, as in metrics.jsonl.
    """

    def __init__(
        self,
        path: Path,
        rejections: Iterable[dict],
        num_samples: int,
        max_fraction: float,
        resume_step: int,
        ranks: Ranks,
    ) -> None:
        """rejections: of the preflight; num_samples, max_fraction: more of them broken than this part ends the run."""
        self.path, self.ranks = path, ranks
        self.num_samples, self.max_fraction = num_samples, max_fraction
        self.broken: set[tuple[str, int]] = set()
        if ranks.is_first:
            earlier = [row for row in _read(path) if 0 < row.get("step", 0) <= resume_step]
            with path.open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in (*rejections, *earlier))

    def add(self, results: list) -> None:
        """Note the broken samples of some steps (StepResults, which have to be the same steps on every rank).

        Raises DataError, on every rank, when too many different samples broke.
        """
        if all(result.window.num_planned == int(result.counts[0]) for result in results):
            return  # so it is on all ranks, for the counts are theirs together
        mine = [
            {**dataclasses.asdict(broken), "step": result.step} for result in results for broken in result.window.broken
        ]
        rows = [row for part in gather(mine, self.ranks) for row in part]
        rows.sort(key=lambda row: (row["step"], row["file"], row["index"]))
        self.broken |= {(row["file"], row["index"]) for row in rows}
        if self.ranks.is_first:
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(row) + "\n" for row in rows))
        print_first(*(f"step {row['step']}: left out {row['id']}: {row['reason']}" for row in rows))
        if len(self.broken) > self.max_fraction * self.num_samples:
            raise DataError(
                f"{len(self.broken)} of {self.num_samples} samples broke while training, --max_bad_fraction allows "
                f"{self.max_fraction:.2%}: {self.path} lists them; mend them and start again, or raise the limit"
            )


def _read(path: Path) -> list[dict]:
    """All whole lines; a last one that a kill cut short is passed over."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows
