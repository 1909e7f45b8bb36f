"""metrics.csv: the numbers of metrics.jsonl for spreadsheets, a line per optimizer step."""

from collections.abc import Iterable
from pathlib import Path

from llava_ds.files.jsonl import append, read_metrics
from llava_ds.files.writing import write_whole


class MetricsTable:
    """metrics.csv, kept in step with metrics.jsonl: appended to, and rewritten from it when in doubt.

    Its columns are the scalar numbers of the newest row when it is rewritten, so a new number in the log becomes a
    column. A killed run leaves no half line and no repeated line: the next start rewrites the file, in one rename.
    """

    def __init__(self, path: Path, log: Path) -> None:
        """log: metrics.jsonl; it has a row before this table does."""
        self.path, self.log = path, log
        self.follows = False  # True if the file has all rows written so far
        self.columns: list[str] = []

    def write(self, rows: list[dict]) -> None:
        """Add rows of metrics.jsonl. With a full disk the table is incomplete until there is room again."""
        try:
            if self.follows:
                append(self.path, as_csv(rows, self.columns))
                return
            stored = read_metrics(self.log)
            self.columns = columns_of((stored or rows)[-1])  # a full disk may have kept all rows out of the log
            write_whole(self.path, ",".join(self.columns) + "\n" + as_csv(stored, self.columns))
            self.follows = True
        except OSError:
            self.follows = False  # metrics.jsonl, on the same disk, has reported it


def columns_of(row: dict) -> list[str]:
    """Return the names of the scalar numbers in a row of metrics.jsonl, including those without a value, and lr."""
    return [name for name, value in row.items() if name == "lr" or not isinstance(value, (list, dict))]


def as_csv(rows: Iterable[dict], columns: list[str]) -> str:
    """Return lines of the table, with six digits; missing values are empty."""
    return "".join(",".join(_cell(row.get(name)) for name in columns) + "\n" for row in rows)


def _cell(value: object) -> str:
    kind = type(value)  # fast: called for each cell of every step
    if kind is int:
        return str(value)
    if kind is list:
        value, kind = max(value), float  # the highest rate of the parameter groups
    return f"{value:.6g}" if kind is float else "" if value is None else str(value)
