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

    A file that can't be written to, on a full disk, does not end the run: the rows wait for the next time.
    """

    def __init__(self, path: Path, kept: Iterable[dict]) -> None:
        """kept: the rows to begin with, in the place of what is there; without any, no file is begun."""
        self.path, self.waiting, kept = path, [], list(kept)
        if kept or path.exists():
            replace_rows(path, kept)

    def write(self, rows: list[dict]) -> None:
        """Append rows, in one write, so that a killed run leaves whole lines."""
        told = bool(self.waiting)
        self.waiting += rows
        if not self.waiting:
            return
        try:
            append(self.path, "".join(map(as_line, self.waiting)))
        except OSError as error:
            if not told:
                print(f"WARNING: {self.path} can't be written ({error.strerror}): its rows wait in memory", flush=True)
        else:
            self.waiting = []

    def close(self) -> None:
        """Raise DataError when there are rows that could never be written."""
        self.write([])
        if self.waiting:
            raise DataError(f"{self.path} lacks the last {len(self.waiting)} rows: it could not be written to")


class MetricsLog(RowLog):
    """metrics.jsonl. Steps behind the one a run resumes from are dropped, for they will come again; those before it
    that are not there are said."""

    def __init__(self, path: Path, resume_step: int) -> None:
        path.touch()
        kept = [row for row in read_metrics(path) if row["step"] <= resume_step]
        super().__init__(path, kept)
        if lacking := sorted(set(range(1, resume_step + 1)) - {row["step"] for row in kept}):
            print(
                f"WARNING: {path} lacks {len(lacking):,} of the {resume_step:,} steps up to the checkpoint "
                f"({lacking[0]} to {lacking[-1]}): it was cut or lost; the run goes on, its curves and sums lack them",
                flush=True,
            )


def rows_of(path: Path) -> list[dict]:
    """As read_metrics; none where there is no such file."""
    return read_metrics(path) if path.exists() else []


def replace_rows(path: Path, rows: Iterable[dict]) -> None:
    """Write a JSONL file anew, in one rename, so that a killed run leaves the old or the new one."""
    write_whole(path, "".join(map(as_line, rows)))


def append(path: Path, text: str) -> None:
    """Add whole lines to a file, in one write. Raises OSError, where the disk is full for one, with the file as it was.

    Nothing stays open: on a network's disk closing is what brings the lines to the server.
    """
    data, before = text.encode(), None
    try:
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            before = os.fstat(handle).st_size
            if os.write(handle, data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # it took a part of them
        finally:
            os.close(handle)
    except OSError:
        if before is not None:
            os.truncate(path, before)  # no half line
        raise


def as_line(row: dict) -> str:
    """A row as it stands in the file, without the blanks that 100,000 rows would have 3 MB of."""
    return _JSON.encode(row) + "\n"


def read_metrics(path: Path) -> list[dict]:
    """All whole rows of a JSONL file of this package; lines that hold none, and a last one that a kill cut short, are
    passed over. Raises FileNotFoundError, and DataError for what is no such file."""
    try:
        return read_rows(path)[0]
    except DataError as error:
        raise DataError(f"{path} can't be read: {error}") from error
