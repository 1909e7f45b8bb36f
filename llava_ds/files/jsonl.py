"""JSONL files of a run: one object a line, and metrics.jsonl, which has one per optimizer step."""

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

    A file that can't be written to, as on a full disk, does not end the run: the rows wait for the next write.
    """

    def __init__(self, path: Path, first: Iterable[dict]) -> None:
        """first: the rows to begin with, in place of the file's; without any, no file is created."""
        self.path, self.waiting, first = path, [], list(first)
        if first or path.exists():
            replace_rows(path, first)

    def write(self, rows: list[dict]) -> None:
        """Append rows, in one write, so that a killed run leaves whole lines."""
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
        """Raise DataError when there are rows that could never be written."""
        self.write([])
        if self.waiting:
            raise DataError(f"{self.path} lacks the last {len(self.waiting)} rows: it could not be written to")


class MetricsLog(RowLog):
    """metrics.jsonl. Drops the steps after the one that a run resumes from, which it will repeat, and warns of missing
    ones before it."""

    def __init__(self, path: Path, resume_step: int) -> None:
        path.touch()
        rows = [row for row in read_metrics(path) if row["step"] <= resume_step]
        super().__init__(path, rows)
        if lacking := sorted(set(range(1, resume_step + 1)) - {row["step"] for row in rows}):
            print(
                f"WARNING: {path} lacks {len(lacking):,} of the {resume_step:,} steps up to the checkpoint "
                f"({lacking[0]} to {lacking[-1]}): it was cut or lost; the run goes on, its curves and sums lack them",
                flush=True,
            )


def rows_of(path: Path) -> list[dict]:
    """As read_metrics; none without a file."""
    return read_metrics(path) if path.exists() else []


def replace_rows(path: Path, rows: Iterable[dict]) -> None:
    """Replace a JSONL file in one rename, so that a killed run leaves the old or the new one."""
    write_whole(path, "".join(map(as_line, rows)))


def append(path: Path, text: str) -> None:
    """Append whole lines to a file in one write. Raises OSError, as on a full disk, with the file unchanged.

    The file is closed, which sends the lines to the server of a network disk.
    """
    data, before = text.encode(), None
    try:
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            before = os.fstat(handle).st_size
            if os.write(handle, data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # it wrote a part of them
        finally:
            os.close(handle)
    except OSError:
        if before is not None:
            os.truncate(path, before)  # no half line
        raise


def as_line(row: dict) -> str:
    """A row as JSON without spaces, which would be 3 MB in 100,000 rows."""
    return _JSON.encode(row) + "\n"


def read_metrics(path: Path) -> list[dict]:
    """All whole rows of a JSONL file of this package, without damaged lines and a last one that a kill cut short.

    Raises FileNotFoundError, and DataError for what is no such file.
    """
    try:
        return read_rows(path)[0]
    except DataError as error:
        raise DataError(f"{path} can't be read: {error}") from error
