"""On-disk cache of encoded rows. Published rows never change or move while a run may read them.

A folder holds generations 1, 2, …: each is a folder of Arrow files, published by a rename. Readers use the newest
complete generation. Processes write the next generation together (llava_ds.data.shards), in the folder NUMBER.work.
"""

import contextlib
import os
import shutil
import tempfile
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from typing_extensions import TypedDict

from llava_ds.constants import DataError
from llava_ds.files.reading import read_json

DONE = "files.json"  # ordered list of a generation's files, written last
STALE = "stale"  # marks a generation in which an image has changed
NUM_KEPT = 2  # generations kept: earlier runs may still read the previous one
NUM_OPEN = 512  # row files that a process keeps open: each takes some 20 kB of its memory
SCRATCH_AGE_S = 24 * 3600  # delete a scratch folder without writes for this long: a killed process left it


class Listed(TypedDict):
    """Sizes in bytes of a generation's files, and of files elsewhere that its rows refer to."""

    files: dict[str, int]
    elsewhere: dict[str, int]


class RowTable:
    """Memory-mapped rows in Arrow files. Can be pickled.

    Up to NUM_OPEN files are opened at the start and stay readable even if their folder is deleted. Other files are
    opened on access (0.3 ms each; 100 M records have 24,000 files). Every file but the last has the same number of
    rows, as shards do (llava_ds.data.shards), so two files are enough to locate a row. Raises DataError for damaged
    files.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = list(paths)
        self._open: OrderedDict[int, pa.Table] = OrderedDict()
        first, last = (_map_whole(self.paths[i]) for i in (0, -1))
        self.column_names = first.column_names
        self._rows_per_file, self._rows_of_last = len(first), len(last)
        for number in range(len(self.paths)) if len(self.paths) <= NUM_OPEN else ():
            self.file(number)

    def __reduce__(self) -> tuple:
        return RowTable, (self.paths,)

    def __len__(self) -> int:
        return (len(self.paths) - 1) * self._rows_per_file + self._rows_of_last

    def file(self, number: int) -> pa.Table:
        """Return the rows of one file, kept open in an LRU cache of NUM_OPEN files."""
        found = self._open.pop(number, None)
        if found is None:
            found = self._checked(number)
        self._open[number] = found  # most recently used
        if len(self._open) > NUM_OPEN:
            self._open.popitem(last=False)
        return found

    def files(self, names: Sequence[str], numbers: Sequence[int] | None = None) -> Iterator[pa.Table]:
        """Yield the named columns of the given files (default: all), one file at a time."""
        for number in range(len(self.paths)) if numbers is None else numbers:
            yield self._checked(number, names)

    def files_of(self, rows: np.ndarray) -> list[int]:
        """Sorted unique indices of the files that hold these rows."""
        return np.unique(rows // self._rows_per_file).tolist()

    def record(self, number: int) -> pa.Table:
        """Return one row as a table."""
        file, place = divmod(number, self._rows_per_file)
        return self.file(file).slice(place, 1)

    def column(self, name: str) -> pa.ChunkedArray:
        """Return one column of all rows."""
        return pa.chunked_array([chunk for rows in self.files([name]) for chunk in rows.column(name).chunks])

    def take(self, names: list[str], rows: np.ndarray) -> pa.Table:
        """Return the named columns of the given rows: at least one, in ascending order."""
        files, places = np.divmod(rows, self._rows_per_file)
        numbers, firsts = np.unique(files, return_index=True)
        parts = zip(self.files(names, numbers.tolist()), np.split(places, firsts[1:]))
        return pa.concat_tables([part.take(pa.array(places)) for part, places in parts])

    def _checked(self, number: int, names: Sequence[str] | None = None) -> pa.Table:
        fields = None if names is None else [self.column_names.index(name) for name in names]
        rows, is_last = _map_whole(self.paths[number], fields), number == len(self.paths) - 1
        expected = self._rows_of_last if is_last else self._rows_per_file
        if len(rows) != expected:
            raise _damaged(self.paths[number], f"it has {len(rows):,} rows, expected {expected:,}")
        return rows


def map_rows(path: str, fields: list[int] | None = None) -> pa.Table:
    """Map a file of rows. fields: indices of the columns to map (default: all). Raises OSError and ArrowException."""
    with pa.memory_map(path) as file:
        options = pa.ipc.IpcReadOptions(included_fields=fields or [], use_threads=False)
        return pa.ipc.open_stream(file, options=options).read_all()


def _map_whole(path: str, fields: list[int] | None = None) -> pa.Table:
    try:
        return map_rows(path, fields)
    except (OSError, pa.ArrowException) as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: str, why: str) -> DataError:
    return DataError(f"{path} can't be read: {why}: remove its folder, so that the next start encodes the data again")


@dataclass(frozen=True)
class CachedRows:
    """Memory-mapped rows and the folder of their generation."""

    table: RowTable
    folder: Path

    @property
    def identity(self) -> tuple[int, int]:
        """Inode and mtime (ns) of the file list: unique per generation, also across machines with separate caches."""
        found = os.stat(self.folder / DONE)
        return found.st_ino, found.st_mtime_ns

    @property
    def is_stale(self) -> bool:
        """True if a reader found a file that changed after these rows were written."""
        return (self.folder / STALE).exists()


def note_stale(folder: Path) -> None:
    """Mark the rows as stale, so that the next start encodes them again (no effect if the folder is read-only)."""
    with contextlib.suppress(OSError):
        (folder / STALE).touch()


def open_newest(folder: Path) -> CachedRows | None:
    """Open the newest complete generation, or return None."""
    for number in sorted(_numbers(folder), reverse=True):
        if (rows := open_generation(folder / str(number))) is not None:
            return rows
    return None


def open_generation(generation: Path) -> CachedRows | None:
    """Open a generation; None if it is incomplete."""
    table = _open_rows(generation)
    return None if table is None else CachedRows(table, generation)


def next_number(folder: Path) -> int:
    """Return the number of the next generation."""
    return max(_numbers(folder), default=0) + 1


def remove_older(generation: Path) -> None:
    """Delete old generations, keeping this one and the one before it."""
    newest = int(generation.name)
    for path in generation.parent.iterdir():
        number, _, kind = path.name.partition(".")
        if number.isdecimal() and int(number) <= newest - (0 if kind == "work" else NUM_KEPT):
            shutil.rmtree(path, ignore_errors=True)


def put_in_place(scratch: Path, final: Path) -> bool:
    """Rename scratch to final. Returns False, and changes nothing, if another process was first."""
    try:
        scratch.rename(final)
    except OSError:
        if not final.exists():
            raise
        return False
    return True


@contextlib.contextmanager
def cache_scratch(folder: Path) -> Iterator[Path]:
    """Create a scratch folder for this process, deleted on exit unless it was renamed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(folder.parent)
    outer = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".tmp", dir=folder.parent))
    try:
        inner = outer / folder.name
        inner.mkdir()  # mkdtemp's own folder is readable by its owner only
        yield inner
    finally:
        shutil.rmtree(outer, ignore_errors=True)


def _remove_abandoned(parent: Path) -> None:
    """Delete scratch folders left by killed processes."""
    for scratch in parent.glob("*.tmp"):
        with contextlib.suppress(OSError):  # its owner may be deleting it now
            written = max(path.stat().st_mtime for path in (scratch, *scratch.rglob("*")))
            if time.time() - written > SCRATCH_AGE_S:
                shutil.rmtree(scratch, ignore_errors=True)


def _numbers(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir() if path.name.isdecimal()] if folder.is_dir() else []


def _open_rows(generation: Path) -> RowTable | None:
    """Open a generation's rows; None if files, or files that they refer to, are missing or have another size."""
    try:
        listed = read_json(generation / DONE, Listed)
        files = {str(generation / name): num_bytes for name, num_bytes in listed["files"].items()}
        # An Arrow stream truncated between two batches reads without error: only its size reveals the damage.
        if any(os.stat(path).st_size != num_bytes for path, num_bytes in {**files, **listed["elsewhere"]}.items()):
            return None
        return RowTable(list(files)) if files else None
    except (OSError, ValueError):  # includes DataError
        return None
