"""metrics.csv: the numbers of metrics.jsonl for spreadsheets, a line per optimizer step."""

from collections.abc import Iterable
from pathlib import Path

from llava_ds.files.jsonl import append, read_metrics
from llava_ds.files.writing import write_whole

COLUMNS = (
    "step", "epoch", "loss", "lr", "grad_norm", "samples", "tokens", "supervised_tokens", "step_time_s", "data_wait_s",
    "tokens_per_s", "mfu", "peak_memory_bytes", "skipped_steps", "broken_samples",
)  # fmt: skip


class MetricsTable:
    """metrics.csv beside a metrics.jsonl, which it follows: appended to, and made anew from it whenever in doubt.

    So a killed run leaves no half line and no line twice: the next start writes the file again, in one rename.
    """

    def __init__(self, path: Path, log: Path) -> None:
        """log: metrics.jsonl, which has a row before this table is given it."""
        self.path, self.log = path, log
        self.follows = False  # whether the file has all rows that were written so far

    def write(self, rows: list[dict]) -> None:
        """Add rows of metrics.jsonl. A disk that is full leaves the table behind until there is room again."""
        try:
            if self.follows:
                append(self.path, as_csv(rows))
            else:
                write_whole(self.path, ",".join(COLUMNS) + "\n" + as_csv(read_metrics(self.log)))
            self.follows = True
        except OSError:
            self.follows = False  # metrics.jsonl, on the same disk, has said so


def as_csv(rows: Iterable[dict]) -> str:
    """Lines of the table, of six digits; what a row has no value for stays empty."""
    return "".join(",".join(_cell(row.get(name)) for name in COLUMNS) + "\n" for row in rows)


def _cell(value: object) -> str:
    kind = type(value)  # for each of fifteen cells of every step
    if kind is int:
        return str(value)
    if kind is list:
        value, kind = max(value), float  # of the parameter groups' rates
    return f"{value:.6g}" if kind is float else "" if value is None else str(value)
