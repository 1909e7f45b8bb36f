"""Record the image and video files that a data set's rows were made from, to detect changes.

The preflight records a stamp and a content hash per file (llava_ds.files.reading). The hashes are part of the data
set's fingerprint. When rows come from the cache, the stamps show which files must be read again.
"""

import hashlib
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from llava_ds.constants import DataError
from llava_ds.data.cache import RowTable
from llava_ds.data.images.decode import used_files
from llava_ds.data.sample import FileRef, Media
from llava_ds.files.reading import Stamp, blocks_digest, stamp_of, why_not_regular
from llava_ds.files.urls import is_remote
from llava_ds.files.writing import write_whole
from llava_ds.geometry import ImageOptions

FILE = "data_files.parquet"  # in a run's folder: the files that it was trained on
# Names of files are bytes: they need not be UTF-8.
COLUMNS = [("files", pa.list_(pa.binary())), ("stamps", pa.list_(pa.int64())), ("contents", pa.list_(pa.string()))]
LISTED = pa.schema({"path": pa.string(), "num_bytes": pa.int64(), "mtime_ns": pa.int64(), "contents": pa.string()})
# Files up to this size are hashed completely, faster than decoding them; larger files are videos.
WHOLE_BYTES = 32 << 20
THREADS = 8  # threads that read stamps and blocks: network disks answer slowly
STORE_THREADS = 64  # object stores are slower, and serve many requests at once
NUM_SAMPLED = 256  # number of files to read again at every start, even if their stamps match
FILES_PER_PROCESS = 16  # minimum row files per process: 65,000 records, checked by one process in 0.2 s
NUM_REMEMBERED = 1 << 18  # stamps in memory (300 bytes each), for images that many records share
MOST_NAMED = 5


class SeenFile(NamedTuple):
    """A file that a row was made from: its stamp, and a hash of the file or of the slice that was used."""

    path: str
    stamp: Stamp
    contents: str


def stamps_of(media: Media, options: ImageOptions) -> list[Stamp]:
    """Stamps of the files of an image or video, in order. Take them before reading the files."""
    return [stamp_of(ref.path) for ref in used_files(media, options)]


def seen_files(media: Media, options: ImageOptions, stamps: list[Stamp]) -> list[SeenFile]:
    """Hash an image's or video's files. stamps: from stamps_of. Raises OSError, and DataError for irregular files."""
    return [SeenFile(ref.path, stamp, _digest(ref)) for ref, stamp in zip(used_files(media, options), stamps)]


def _digest(ref: FileRef) -> str:
    return blocks_digest(ref.path, ref.offset, ref.num_bytes, WHOLE_BYTES)


def as_columns(seen: list[list[SeenFile]]) -> dict[str, pa.Array]:
    """Build the Arrow columns of COLUMNS, one row per list."""
    values = (
        [[os.fsencode(file.path) for file in row] for row in seen],
        [[number for file in row for number in file.stamp] for row in seen],
        [[file.contents for file in row] for row in seen],
    )
    return {name: pa.array(column, kind) for (name, kind), column in zip(COLUMNS, values)}


def contents_digest(table: RowTable) -> str:
    """Hash the contents of all files in the rows' order, independent of their paths."""
    digest = hashlib.sha256()
    for rows in table.files(["contents"]):  # reading all at once takes several times their size in memory
        digest.update("".join(_flat(rows, "contents").to_pylist()).encode())
    return digest.hexdigest()


def changed_files(
    table: RowTable,
    options: ImageOptions,
    refs_of: Callable[[str], list[Media]],
    numbers: Sequence[int] | None = None,
    most_processes: int = 1,
) -> list[str]:
    """Find files that changed since the rows were made from them, or can no longer be read.

    Checks the stamps of all files. Reads the files with new stamps, and NUM_SAMPLED other files. refs_of: parses a
    row's media text to Media; numbers: indices of the table's files to check (default: all). Many files are divided
    among up to most_processes processes, because each check takes 3 us of a core.
    """
    numbers = range(len(table.paths)) if numbers is None else numbers
    num_parts = max(1, min(most_processes, len(numbers) // FILES_PER_PROCESS))
    parts = np.array_split(np.asarray(numbers, np.int64), num_parts)
    look = partial(_changed_in, table, options, refs_of)
    if num_parts == 1:
        found = [look(parts[0])]
    else:
        from llava_ds.runtime.children import in_processes

        found = in_processes(look, parts)
    return list(dict.fromkeys(itertools.chain(*found)))


def _changed_in(table: RowTable, options: ImageOptions, refs_of, numbers: np.ndarray) -> list[str]:
    """Do changed_files in this process."""
    rng = np.random.default_rng(0)
    num_sampled = math.ceil(NUM_SAMPLED * len(numbers) / len(table.paths))
    sampled = np.bincount(rng.integers(max(1, len(numbers)), size=num_sampled), minlength=len(numbers))
    stamps: dict[bytes, tuple[int, ...]] = {}
    changed: dict[str, None] = {}
    with ThreadPoolExecutor(STORE_THREADS) as pool:
        for rows, num_sampled in zip(table.files(["media", "files", "stamps", "contents"], numbers.tolist()), sampled):
            paths = _flat(rows, "files")
            if not len(paths):
                continue
            again = _differ(rows, paths, stamps, pool)
            again[rng.integers(len(paths), size=num_sampled)] = True
            entries = np.flatnonzero(again)
            expected = _flat(rows, "contents").take(pa.array(entries)).to_pylist()
            digests = _in_threads(_digest_or_none, _refs(rows, entries, options, refs_of), pool)
            named = paths.take(pa.array(entries)).to_pylist()
            changed |= {os.fsdecode(path): None for path, was, now in zip(named, expected, digests) if was != now}
    return list(changed)


def _differ(
    rows: pa.Table, paths: pa.Array, stamps: dict[bytes, tuple[int, ...]], pool: ThreadPoolExecutor
) -> np.ndarray:
    """Return (entries,) bool: True if a file's stamp differs from its row's. stamps: cached stamps by path."""
    coded = paths.dictionary_encode()
    distinct = coded.dictionary.to_pylist()
    if len(stamps) > NUM_REMEMBERED:
        stamps.clear()
    new = [path for path in distinct if path not in stamps]
    stamps.update(zip(new, _in_threads(_stamp_or_nothing, new, pool)))
    found = np.array([stamps[path] for path in distinct], np.int64)[coded.indices.to_numpy()]
    return (found != _flat(rows, "stamps").to_numpy().reshape(found.shape)).any(1)


def _refs(rows: pa.Table, entries: np.ndarray, options: ImageOptions, refs_of) -> list[FileRef]:
    """Return a FileRef for each entry. entries: indices into the flattened file columns."""
    ends = np.cumsum(pa.compute.list_value_length(rows.column("files")).to_numpy())
    numbers = np.searchsorted(ends, entries, "right")
    texts = rows.column("media").take(pa.array(numbers)).to_pylist()
    firsts = np.concatenate([[0], ends])[numbers]
    found = []
    for entry, first, text in zip(entries, firsts, texts):
        refs = [ref for media in refs_of(text) for ref in used_files(media, options)]
        found.append(refs[entry - first])
    return found


def _in_threads(act, items: list, pool: ThreadPoolExecutor) -> list:
    """Apply act to every item. Each thread gets a slice: starting a task takes longer than reading a stamp."""
    in_store = any(is_remote(os.fsdecode(getattr(item, "path", item))) for item in items[:1])
    size = max(1, -(-len(items) // (STORE_THREADS if in_store else THREADS)))
    slices = [items[start : start + size] for start in range(0, len(items), size)]
    return [each for part in pool.map(lambda part: [act(item) for item in part], slices) for each in part]


def _stamp_or_nothing(path: bytes) -> tuple[int, ...]:
    try:
        return stamp_of(os.fsdecode(path))
    except OSError:
        return (-1,) * len(Stamp._fields)


def _digest_or_none(ref: FileRef) -> str | None:
    try:
        return _digest(ref)
    except (OSError, DataError):
        return None


def _flat(rows: pa.Table, name: str) -> pa.Array:
    return rows.column(name).combine_chunks().flatten()


def _listed(table: RowTable) -> Iterator[pa.Table]:
    """Yield tables of FILE's rows: path, size, time and contents of every file in the data set."""
    for rows in table.files(["files", "stamps", "contents"]):
        stamps = _flat(rows, "stamps").to_numpy().reshape(-1, len(Stamp._fields))
        columns = {"path": _printable(_flat(rows, "files")), "num_bytes": stamps[:, 0], "mtime_ns": stamps[:, 1]}
        yield pa.table({**columns, "contents": _flat(rows, "contents")})


def _printable(paths: pa.Array) -> pa.Array:
    try:
        return paths.cast(pa.string())
    except pa.ArrowInvalid:  # names that are not UTF-8
        return pa.array([path.decode("utf-8", "backslashreplace") for path in paths.to_pylist()], pa.string())


def write_data_files(output_dir: Path, table: RowTable) -> None:
    """Save the list of the data set's files in a run's folder, so that a later start can name changed files.

    Raises OSError, and leaves the old list intact.
    """

    def write(path: Path) -> None:
        # Errors of pyarrow's own open don't name the file.
        with open(path, "wb") as file, pa.parquet.ParquetWriter(file, LISTED, compression="zstd") as writer:
            for part in _listed(table):
                writer.write_table(part)

    write_whole(output_dir / FILE, write)


def changes_since(table: RowTable, run_dir: Path) -> str:
    """Describe how the files differ from an earlier run's; "" if that run has no list."""
    path = run_dir / FILE
    if not path.is_file() or why_not_regular(path) is not None:
        return ""
    try:
        before = pa.parquet.read_table(path, columns=["path", "contents"])
        paths, contents = (before.column(name).to_pylist() for name in ("path", "contents"))
    except (OSError, pa.ArrowException, KeyError, ValueError):
        return ""
    now, found = [], []
    for part in _listed(table):
        now += part.column("path").to_pylist()
        found += part.column("contents").to_pylist()
    if len(now) != len(paths):
        known = set(paths)
        others = (("new", set(now) - known), ("gone", known.difference(now)))
        named = "".join(f"; {what}: {_some(those)}" for what, those in others if those)
        return f"{len(now):,} image files were read, {len(paths):,} before{named}"
    changed = dict.fromkeys(path for path, was, is_now in zip(now, contents, found) if was != is_now)
    if not changed:
        return "no image file has changed: the records, the tokenizer or the encoding changed"
    return f"{len(changed):,} of {len(set(now)):,} image files have other contents: {_some(changed)}"


def _some(paths: Iterable[str]) -> str:
    """Format the first few paths and the number of remaining paths."""
    paths = sorted(paths)
    more = f" and {len(paths) - MOST_NAMED:,} more" if len(paths) > MOST_NAMED else ""
    return ", ".join(paths[:MOST_NAMED]) + more
