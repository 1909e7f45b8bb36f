"""Read and write a run's JSONL files, with one object per line; metrics.jsonl has one per optimizer step."""

import errno
import json
import os
from collections.abc import Iterable
from pathlib import Path

from llava_ds.constants import DataError
from llava_ds.files.reading import read_rows
from llava_ds.files.writing import write_whole

_JSON = json.JSONEncoder(separators=(",", ":"))


class RowLog:
    """Appends rows to a JSONL file.

    If a write fails, for example because the disk is full, the run continues, and the next write includes the failed
    rows.
    """

    def __init__(self, path: Path, first: Iterable[dict]) -> None:
        """first: rows that replace the file's content. Without rows, a missing file is not created."""
        self.path, self.waiting, first = path, [], list(first)
        if first or path.exists():
            replace_rows(path, first)

    def write(self, rows: list[dict]) -> None:
        """Append the rows, and the rows of failed writes, in one write, so that a killed run leaves no half line."""
        was_reported = bool(self.waiting)
        self.waiting += rows
        if not self.waiting:
            return
        try:
            append(self.path, "".join(map(as_line, self.waiting)))
        except OSError as error:
            if not was_reported:
                print(f"WARNING: {self.path} can't be written ({error.strerror}): its rows wait in memory", flush=True)
        else:
            self.waiting = []

    def close(self) -> None:
        """Write the rows of failed writes. Raises DataError if that fails again."""
        self.write([])
        if self.waiting:
            raise DataError(f"{self.path} lacks the last {len(self.waiting)} rows: it could not be written to")


class MetricsLog(RowLog):
    """The log metrics.jsonl. Drops rows after resume_step, because these steps are repeated, and warns if earlier
    steps are missing."""

    def __init__(self, path: Path, resume_step: int) -> None:
        path.touch()
        rows = [row for row in read_metrics(path) if row["step"] <= resume_step]
        super().__init__(path, rows)
        if lacking := sorted(set(range(1, resume_step + 1)) - {row["step"] for row in rows}):
            print(
                f"WARNING: {path} lacks {len(lacking):,} of the {resume_step:,} steps up to the checkpoint "
                f"({lacking[0]} to {lacking[-1]}): it was truncated or lost; the run continues, but its curves and "
                "sums lack these steps",
                flush=True,
            )


def rows_of(path: Path) -> list[dict]:
    """Return the rows of a JSONL file like read_metrics, or [] if it does not exist."""
    return read_metrics(path) if path.exists() else []


def replace_rows(path: Path, rows: Iterable[dict]) -> None:
    """Replace a JSONL file in one rename, so that a killed run leaves either the old or the new file."""
    write_whole(path, "".join(map(as_line, rows)))


def append(path: Path, text: str) -> None:
    """Append whole lines to a file in one write, and close it: this sends them to the server of a network disk.

    Raises OSError, for example if the disk is full, and leaves the file unchanged.
    """
    data, before = text.encode(), None
    try:
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            before = os.fstat(handle).st_size
            if os.write(handle, data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # a partial write
        finally:
            os.close(handle)
    except OSError:
        if before is not None:
            os.truncate(path, before)  # remove the partial line
        raise


def as_line(row: dict) -> str:
    """Format a row as JSON without spaces: they would add 3 MB to 100,000 rows."""
    return _JSON.encode(row) + "\n"


def read_metrics(path: Path) -> list[dict]:
    """Read the rows of a JSONL file, without damaged lines and a truncated last line.

    Raises FileNotFoundError if it is missing, and DataError if it can't be read.
    """
    try:
        return read_rows(path)[0]
    except DataError as error:
        raise DataError(f"{path} can't be read: {error}") from error
