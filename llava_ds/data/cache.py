"""Encoded rows on disk: written beside, put in place in one rename, and never changed or moved while they may be read.

A folder holds generations, 1, 2, …: whole folders of Arrow files. The newest that is whole counts. A new one takes the
next number; of several processes that write it at once, the first one's stays, and the others take that.
"""

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import datasets
import pyarrow as pa
from typing_extensions import TypedDict

from llava_ds.constants import DataError
from llava_ds.files.reading import read_json

DONE = "files.json"  # lists a generation's files in their order, and is written last
STALE = "stale"  # lies beside it once an image was found changed
NUM_KEPT = 2  # generations: a run that started before the newest was written reads the one before
SCRATCH_AGE_S = 24 * 3600  # a folder that nothing was written to for so long is left from a kill


class _Listed(TypedDict):
    """Of a generation, the bytes of its files and of those elsewhere that its rows point into."""

    files: dict[str, int]
    elsewhere: dict[str, int]


@dataclass(frozen=True)
class CachedRows:
    """Memory-mapped rows, and the folder of the generation that they lie in."""

    table: datasets.Dataset
    folder: Path

    @property
    def is_stale(self) -> bool:
        """Whether a reader of these rows noted that what they say of a file holds no longer."""
        return (self.folder / STALE).exists()


def note_stale(folder: Path) -> None:
    """Have the next opening write the rows anew, if a note can be left in the folder of their generation."""
    with contextlib.suppress(OSError):
        (folder / STALE).touch()


def open_newest(folder: Path) -> CachedRows | None:
    """The rows of the newest whole generation; None where there is none."""
    for number in sorted(_numbers(folder), reverse=True):
        table = _open_rows(folder / str(number))
        if table is not None:
            return CachedRows(table, folder / str(number))
    return None


def add_generation(folder: Path, write: Callable[[Path], tuple[list[str], list[str]]]) -> CachedRows:
    """Have a new generation written, unless another process is first, and open the newest.

    write gets a folder and returns the names of the Arrow files that it left there, in their order, and the paths of
    files elsewhere that the rows point into. Generations before the last two are deleted.
    """
    number = max(_numbers(folder), default=0) + 1
    with scratch_beside(folder) as scratch:
        names, elsewhere = write(scratch)
        listed = {
            "files": {name: _synced(scratch / name) for name in names},
            "elsewhere": {path: os.stat(path).st_size for path in elsewhere},
        }
        (scratch / DONE).write_text(json.dumps(listed), encoding="utf-8")
        _synced(scratch / DONE)
        folder.mkdir(exist_ok=True)
        put_in_place(scratch, folder / str(number))
    for old in sorted(_numbers(folder))[:-NUM_KEPT]:
        shutil.rmtree(folder / str(old), ignore_errors=True)
    rows = open_newest(folder)
    if rows is None:
        raise DataError(f"{folder}: the rows that were just written can't be read: is the disk of --cache_dir sound?")
    return rows


def put_in_place(scratch: Path, final: Path) -> bool:
    """Rename scratch to final; False, with nothing changed, where another process was first."""
    try:
        scratch.rename(final)
    except OSError:
        if not final.exists():
            raise
        return False
    return True


@contextlib.contextmanager
def scratch_beside(folder: Path) -> Iterator[Path]:
    """A folder to write in, no other process's, which is gone afterwards unless it was renamed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_left_over(folder.parent)
    outer = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".tmp", dir=folder.parent))
    try:
        inner = outer / folder.name
        inner.mkdir()  # what mkdtemp makes can be read by nobody else, wherever it is moved to
        yield inner
    finally:
        shutil.rmtree(outer, ignore_errors=True)


def _remove_left_over(parent: Path) -> None:
    """Delete scratch folders that a kill left behind."""
    for scratch in parent.glob("*.tmp"):
        with contextlib.suppress(OSError):  # its owner may just be done with it
            written = max(path.stat().st_mtime for path in (scratch, *scratch.rglob("*")))
            if time.time() - written > SCRATCH_AGE_S:
                shutil.rmtree(scratch, ignore_errors=True)


def _numbers(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir() if path.name.isdecimal()] if folder.is_dir() else []


def _open_rows(generation: Path) -> datasets.Dataset | None:
    """Its rows; None where its files, or those that its rows point into, are not there as they were written."""
    try:
        listed = read_json(generation / DONE, _Listed)
        files = {str(generation / name): num_bytes for name, num_bytes in listed["files"].items()}
        # A stream that was cut between two of its parts reads like a shorter one: only its size tells.
        if any(os.stat(path).st_size != num_bytes for path, num_bytes in {**files, **listed["elsewhere"]}.items()):
            return None
        return datasets.concatenate_datasets([datasets.Dataset.from_file(path) for path in files])
    except (OSError, ValueError, pa.ArrowException):  # DataError among them
        return None


def _synced(path: Path) -> int:
    """Flush a file to the disk, and return its size in bytes."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size
