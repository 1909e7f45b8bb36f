"""Cache of encoded rows on disk, which never change or move while a run may read them.

A folder holds generations 1, 2, …, each a folder of Arrow files that appears in one rename. The newest complete one
counts. Any number of processes make the next one together (llava_ds.data.shards), in the folder NUMBER.work.
"""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import datasets
import pyarrow as pa
from datasets.table import MemoryMappedTable, concat_tables
from typing_extensions import TypedDict

from llava_ds.files.reading import read_json

DONE = "files.json"  # the list of a generation's files in order, written last
STALE = "stale"  # marks a generation of which an image has changed
NUM_KEPT = 2  # generations: earlier runs may still read the one before the newest
SCRATCH_AGE_S = 24 * 3600  # a scratch folder without writes for so long was left by a killed process


class Listed(TypedDict):
    """Sizes in bytes of a generation's files, and of the files elsewhere that its rows point into."""

    files: dict[str, int]
    elsewhere: dict[str, int]


@dataclass(frozen=True)
class CachedRows:
    """Memory-mapped rows, and the folder of their generation."""

    table: datasets.Dataset
    folder: Path

    @property
    def is_stale(self) -> bool:
        """True if a reader found a file changed since these rows were written."""
        return (self.folder / STALE).exists()


def note_stale(folder: Path) -> None:
    """Make the next opening write the rows again, if their folder can be written to."""
    with contextlib.suppress(OSError):
        (folder / STALE).touch()


def open_newest(folder: Path) -> CachedRows | None:
    """The rows of the newest complete generation, or None."""
    for number in sorted(_numbers(folder), reverse=True):
        if (rows := open_generation(folder / str(number))) is not None:
            return rows
    return None


def open_generation(generation: Path) -> CachedRows | None:
    """The rows of a generation; None if it is not whole."""
    table = _open_rows(generation)
    return None if table is None else CachedRows(table, generation)


def next_number(folder: Path) -> int:
    """The number of the generation that would be the next one."""
    return max(_numbers(folder), default=0) + 1


def remove_older(generation: Path) -> None:
    """Delete what came before a new generation, but for the one before it."""
    newest = int(generation.name)
    for path in generation.parent.iterdir():
        number, _, kind = path.name.partition(".")
        if number.isdecimal() and int(number) <= newest - (0 if kind == "work" else NUM_KEPT):
            shutil.rmtree(path, ignore_errors=True)


def put_in_place(scratch: Path, final: Path) -> bool:
    """Rename scratch to final. False, with nothing changed, if another process was first."""
    try:
        scratch.rename(final)
    except OSError:
        if not final.exists():
            raise
        return False
    return True


@contextlib.contextmanager
def scratch_beside(folder: Path) -> Iterator[Path]:
    """A folder of this process to write in, deleted afterwards unless it was renamed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(folder.parent)
    outer = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".tmp", dir=folder.parent))
    try:
        inner = outer / folder.name
        inner.mkdir()  # a folder of mkdtemp itself could be read by nobody else
        yield inner
    finally:
        shutil.rmtree(outer, ignore_errors=True)


def _remove_abandoned(parent: Path) -> None:
    """Delete scratch folders of killed processes."""
    for scratch in parent.glob("*.tmp"):
        with contextlib.suppress(OSError):  # its owner may delete it right now
            written = max(path.stat().st_mtime for path in (scratch, *scratch.rglob("*")))
            if time.time() - written > SCRATCH_AGE_S:
                shutil.rmtree(scratch, ignore_errors=True)


def _numbers(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir() if path.name.isdecimal()] if folder.is_dir() else []


def _open_rows(generation: Path) -> datasets.Dataset | None:
    """The rows of a generation; None if its files, or files that they point into, are missing or of another size."""
    try:
        listed = read_json(generation / DONE, Listed)
        files = {str(generation / name): num_bytes for name, num_bytes in listed["files"].items()}
        # An Arrow stream cut between two batches reads without error: only its size shows the damage.
        if any(os.stat(path).st_size != num_bytes for path, num_bytes in {**files, **listed["elsewhere"]}.items()):
            return None
        # Not Dataset.from_file: it takes 3 ms a file, of which 100 M records have 24,000.
        tables = [MemoryMappedTable.from_file(path) for path in files]
        return datasets.Dataset(concat_tables(tables), fingerprint=generation.parent.name)
    except (OSError, ValueError, pa.ArrowException):  # DataError among them
        return None
