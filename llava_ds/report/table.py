"""metrics.csv: the numbers of metrics.jsonl for spreadsheets, a line per optimizer step."""

import csv
import io
import os
from collections.abc import Iterable
from pathlib import Path

from llava_ds.report.metrics import read_metrics

LEFT_OUT = ("micro_batch_losses",)  # lists of lists


class MetricsTable:
    """metrics.csv beside a metrics.jsonl, which it follows: appended to, and made anew from it whenever in doubt.

    So a killed run leaves no half line and no line twice: the next start writes the file again, in one rename.
    """

    def __init__(self, path: Path, log: Path) -> None:
        """log: metrics.jsonl, which has a row before this table is given it."""
        self.path, self.log = path, log
        self.columns: list[str] | None = None  # of the file as it lies there; None: it is to be made anew

    def write(self, rows: list[dict]) -> None:
        """Add rows of metrics.jsonl. A disk that is full leaves the table behind until there is room again."""
        try:
            if self.columns is None:
                self._make_anew()
                return
            with self.path.open("ab", buffering=0) as file:
                text = as_csv(rows, self.columns).encode()
                if file.write(text) != len(text):
                    self.columns = None
        except OSError:
            self.columns = None  # metrics.jsonl, on the same disk, has said so

    def _make_anew(self) -> None:
        rows = read_metrics(self.log)
        if not rows:
            return
        columns = columns_of(rows)
        fresh = self.path.with_name(f".{self.path.name}.tmp")
        fresh.write_text(as_csv([], columns, header=True) + as_csv(rows, columns), encoding="utf-8")
        os.replace(fresh, self.path)
        self.columns = columns


def columns_of(rows: Iterable[dict]) -> list[str]:
    """The names of all columns: those of the rows, a rate for each parameter group."""
    names, rates = {}, 0
    for row in rows:
        rates = max(rates, len(row["lr"]))
        names |= dict.fromkeys(row)
    spread = [f"lr_{i}" for i in range(rates)]
    return [c for name in names if name not in LEFT_OUT for c in (spread if name == "lr" else [name])]


def as_csv(rows: Iterable[dict], columns: list[str], header: bool = False) -> str:
    """Lines of the table; what a row has no value for stays empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows({**row, **{f"lr_{i}": rate for i, rate in enumerate(row["lr"])}} for row in rows)
    return text.getvalue()
