"""Files of images and videos that the rows of a data set were made from, to find those that have changed.

The preflight records a stamp and a hash of the contents of each (llava_ds.files.reading). The hashes are part of the
data set's fingerprint. When rows come from the cache, the stamps tell which files have to be read again.
"""

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet

from llava_ds.constants import DataError
from llava_ds.data.images.decode import used_files
from llava_ds.data.sample import FileRef, Media
from llava_ds.files.object_store import is_remote
from llava_ds.files.reading import Stamp, blocks_digest, stamp_of, why_not_regular
from llava_ds.files.writing import write_whole
from llava_ds.geometry import ImageOptions

FILE = "data_files.parquet"  # in a run's folder: the files that it was trained on
# Names of files are bytes: they need not be UTF-8.
COLUMNS = [("files", pa.list_(pa.binary())), ("stamps", pa.list_(pa.int64())), ("contents", pa.list_(pa.string()))]
# Files up to this size are hashed as a whole, which is faster than decoding them; larger ones are videos.
WHOLE_BYTES = 32 << 20
THREADS = 8  # for stamps and blocks: a network disk is slow to answer
STORE_THREADS = 64  # an object store is slower, and answers any number at once
NUM_SAMPLED = 256  # files to read again at every start, whatever their stamps
MOST_NAMED = 5


@dataclass(frozen=True)
class SeenFile:
    """A file that a row was made from: its stamp, and a hash of the file or of the slice that was used."""

    path: str
    stamp: Stamp
    contents: str


def stamps_of(media: Media, options: ImageOptions) -> list[Stamp]:
    """Stamps of the files used of an image or video, in order. To be taken before the files are read."""
    return [stamp_of(ref.path) for ref in used_files(media, options)]


def seen_files(media: Media, options: ImageOptions, stamps: list[Stamp]) -> list[SeenFile]:
    """The same files with hashes of their contents. Raises OSError, and DataError for irregular files."""
    return [SeenFile(ref.path, stamp, _digest(ref)) for ref, stamp in zip(used_files(media, options), stamps)]


def _digest(ref: FileRef) -> str:
    return blocks_digest(ref.path, ref.offset, ref.num_bytes, WHOLE_BYTES)


def as_columns(seen: list[list[SeenFile]]) -> dict[str, pa.Array]:
    """Arrow columns as COLUMNS has them, one row per list."""
    values = (
        [[os.fsencode(file.path) for file in row] for row in seen],
        [[number for file in row for number in file.stamp] for row in seen],
        [[file.contents for file in row] for row in seen],
    )
    return {name: pa.array(column, kind) for (name, kind), column in zip(COLUMNS, values)}


def contents_digest(table: datasets.Dataset) -> str:
    """A hash of the contents of all files in the rows' order, whatever their paths."""
    digest = hashlib.sha256()
    for chunk in _flat(table, "contents").chunks:  # all at once take several times their size
        digest.update("".join(chunk.to_pylist()).encode())
    return digest.hexdigest()


def changed_files(table: datasets.Dataset, options: ImageOptions, refs_of) -> list[str]:
    """The files whose contents differ from those that the rows were made from, or that can't be read any more.

    Reads the files whose stamps differ, and NUM_SAMPLED others. refs_of: from the text of a row's media to its Media.
    """
    paths = _paths(table)
    if not paths:
        return []
    distinct = list(dict.fromkeys(paths))
    now = dict(zip(distinct, _in_threads(_stamp_or_none, distinct)))
    noted = _flat(table, "stamps").to_numpy().reshape(-1, len(Stamp._fields))
    found = np.array([now[path] or (-1,) * len(Stamp._fields) for path in paths], np.int64)
    again = (found != noted).any(1)
    again[np.random.default_rng(0).integers(len(paths), size=NUM_SAMPLED)] = True
    entries = np.flatnonzero(again)
    expected = _flat(table, "contents").take(pa.array(entries)).to_pylist()
    digests = _in_threads(_digest_or_none, _refs(table, entries, options, refs_of))
    return list(dict.fromkeys(paths[i] for i, was, now in zip(entries, expected, digests) if was != now))


def _refs(table: datasets.Dataset, entries: np.ndarray, options: ImageOptions, refs_of) -> list[FileRef]:
    """References to the bytes of some entries of the flat columns."""
    ends = np.cumsum(pa.compute.list_value_length(table.data.column("files")).to_numpy())
    rows = np.searchsorted(ends, entries, "right")
    texts = table.data.column("media").take(pa.array(rows)).to_pylist()
    firsts = np.concatenate([[0], ends])[rows]
    found = []
    for entry, first, text in zip(entries, firsts, texts):
        refs = [ref for media in refs_of(text) for ref in used_files(media, options)]
        found.append(refs[entry - first])
    return found


def _in_threads(act, items: list) -> list:
    """Results of act for every item. In slices, as starting a task takes longer than a stamp."""
    threads = STORE_THREADS if any(is_remote(getattr(item, "path", item)) for item in items) else THREADS
    size = max(1, -(-len(items) // (4 * threads)))
    slices = [items[start : start + size] for start in range(0, len(items), size)]
    with ThreadPoolExecutor(threads) as pool:
        return [each for part in pool.map(lambda part: [act(item) for item in part], slices) for each in part]


def _stamp_or_none(path: str) -> Stamp | None:
    try:
        return stamp_of(path)
    except OSError:
        return None


def _digest_or_none(ref: FileRef) -> str | None:
    try:
        return _digest(ref)
    except (OSError, DataError):
        return None


def _flat(table: datasets.Dataset, name: str) -> pa.ChunkedArray:
    column = table.data.column(name)
    return pa.chunked_array([chunk.flatten() for chunk in column.chunks], column.type.value_type)


def _paths(table: datasets.Dataset) -> list[str]:
    return [os.fsdecode(path) for path in _flat(table, "files").to_pylist()]


def _printable_paths(table: datasets.Dataset) -> list[str]:
    return [os.fsencode(path).decode("utf-8", "backslashreplace") for path in _paths(table)]


def write_data_files(output_dir: Path, table: datasets.Dataset) -> None:
    """List the files of the data set in a run's folder, so that a later start can name those that changed.

    Raises OSError, with the old list as it was.
    """
    stamps = _flat(table, "stamps").to_numpy().reshape(-1, len(Stamp._fields))
    columns = {
        "path": pa.array(_printable_paths(table), pa.string()),
        "num_bytes": stamps[:, 0],
        "mtime_ns": stamps[:, 1],
    }
    listed = pa.table({**columns, "contents": _flat(table, "contents")})

    def write(path: Path) -> None:
        with open(path, "wb") as file:  # an error of pyarrow's own open names no file
            pa.parquet.write_table(listed, file, compression="zstd")

    write_whole(output_dir / FILE, write)


def changes_since(table: datasets.Dataset, run_dir: Path) -> str:
    """A clause on how the files differ from those of the run in a folder; "" if there is no list of them."""
    path = run_dir / FILE
    if not path.is_file() or why_not_regular(path) is not None:
        return ""
    try:
        before = pa.parquet.read_table(path, columns=["path", "contents"])
        paths, contents = (before.column(name).to_pylist() for name in ("path", "contents"))
    except (OSError, pa.ArrowException, KeyError, ValueError):
        return ""
    now, found = _printable_paths(table), _flat(table, "contents").to_pylist()
    if len(now) != len(paths):
        known = set(paths)
        others = (("new", set(now) - known), ("gone", known.difference(now)))
        named = "".join(f"; {what}: {_some(those)}" for what, those in others if those)
        return f"{len(now):,} image files were read, {len(paths):,} before{named}"
    changed = dict.fromkeys(path for path, was, is_now in zip(now, contents, found) if was != is_now)
    if not changed:
        return "every image file holds what it held: the records, the tokenizer or how they are encoded changed"
    return f"{len(changed):,} of {len(set(now)):,} image files hold something else: {_some(changed)}"


def _some(paths: Iterable[str]) -> str:
    """The first of some paths, and the number of others."""
    paths = sorted(paths)
    more = f" and {len(paths) - MOST_NAMED:,} more" if len(paths) > MOST_NAMED else ""
    return ", ".join(paths[:MOST_NAMED]) + more
