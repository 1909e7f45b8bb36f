"""Read a benchmark's table: VLMEvalKit's TSV, parquet files, a saved `datasets` folder, JSON or JSONL.

Images inside a TSV or a parquet file are written to the cache once and read from there.
"""

import ast
import base64
import binascii
import csv
import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from llava_ds.constants import ConfigError, DataError
from llava_ds.data.sample import FileRef, Media
from llava_ds.data.sources.embedded import IMAGES, REFERENCE, REJECTED, ImageStore, Row, spooled
from llava_ds.data.sources.options import Columns, short
from llava_ds.data.sources.tables import open_saved, parquet_schema, read_parquet, read_saved
from llava_ds.extensions.benchmarks.benchmark_files import (
    ImageFolder,
    checked_records,
    read_json,
    read_records,
    records_in,
)
from llava_ds.files.reading import sha256

SPOOL_VERSION = 1  # increment if the same file would be spooled differently
IMAGE_COLUMNS = ("decoded_image", "image", *(f"image_{number}" for number in range(1, 8)))
LONGEST_INDEX = 64  # maximum characters of an image cell that refers to another row's image
SAVED = "state.json"  # save_to_disk writes it, or a dataset_dict.json


def is_table(path: str) -> bool:
    """True for a TSV, a parquet file, a folder of either, and a folder written by `save_to_disk`."""
    return path.endswith((".tsv", ".parquet")) or _is_saved(path) or any(Path(path).expanduser().rglob("*.parquet"))


def _is_saved(path: str) -> bool:
    folder = Path(path).expanduser()
    return (folder / SAVED).is_file() or (folder / "dataset_dict.json").is_file()


def read_table(path: str, what: str, keys: tuple[str, ...], splits: tuple[str, ...], cache_dir: str) -> list[dict]:
    """Read the records of a benchmark's file or folder. Images inside the table become Media.

    keys: required in the first record, alternatives separated by |; splits: the splits to read from a folder of parquet
    files, as in validation-00000-of-00001.parquet. Raises ConfigError or DataError for files that don't fit.
    """
    if not is_table(path):
        if path.endswith(".jsonl"):
            return read_records(path, what, keys)
        return records_in(path, what, read_json(path), keys)
    if path.endswith(".tsv"):
        files, rows = [Path(path).expanduser()], partial(_tsv_rows, path, what)
    elif _is_saved(path):
        folder = Path(path).expanduser()
        files = sorted(folder.rglob("*.arrow"))
        rows = partial(read_saved, str(folder), _columns(open_saved(str(folder)).column_names))
    else:
        files = _parquet_files(path, splits)
        names = {name: None for file in files for name in parquet_schema(str(file)).names}
        rows = partial(read_parquet, tuple(map(str, files)), _columns(list(names)))
    return checked_records(path, what, _spooled_records(files, rows, cache_dir), keys)


def _columns(names: list[str]) -> Columns:
    others = tuple(name for name in names if name not in IMAGE_COLUMNS)
    return replace(Columns().only(()), image=IMAGE_COLUMNS, text=others)


def _parquet_files(path: str, splits: tuple[str, ...]) -> list[Path]:
    """Return the file; for a folder, the files of the splits, or all files if no file name contains a split."""
    if path.endswith(".parquet"):
        return [Path(path).expanduser()]
    files = sorted(Path(path).expanduser().rglob("*.parquet"))
    named = [file for file in files if "-of-" in file.name]
    chosen = [file for file in named if file.name.split("-")[0] in splits] if named else files
    if not chosen:
        found = ", ".join(sorted({file.name.split("-")[0] for file in named}))
        raise ConfigError(f"{path} has no parquet file of {' or '.join(splits)}: its splits are {found}")
    return chosen


def _spooled_records(files: list[Path], rows: partial[Iterator[Row]], cache_dir: str) -> list[dict]:
    """Read the rows, and write their images to a folder in the cache.

    The folder's name is a hash of the files' names and complete content, because hashes of some blocks could miss a
    change in a large file.
    """
    try:
        digests = [(file.name, sha256(file)) for file in files]
    except OSError as error:
        raise ConfigError(f"{error.filename} can't be read: {error.strerror}") from None
    name = hashlib.sha256(repr((SPOOL_VERSION, digests)).encode()).hexdigest()[:32]
    folder = Path(cache_dir).expanduser().absolute() / "evaluation" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    spool, records = str(folder / IMAGES), []
    for number, line, text in spooled(str(folder), rows):
        record = json.loads(text)
        if REJECTED in record:
            raise DataError(f"{files[number]}: row {line} {record[REJECTED]}")
        for column in IMAGE_COLUMNS:
            if column in record:
                record[column] = _media(record[column], spool)
        records.append({**record, "file": files[number].stem})
    return records


def _media(cell: object, spool: str) -> object:
    """Replace references to the spool in an image cell by Media; return other values unchanged."""
    if isinstance(cell, list):
        return [_media(each, spool) for each in cell]
    if isinstance(cell, dict) and cell.get(REFERENCE) == spool:
        return Media("image", (FileRef(spool, cell["offset"], cell["num_bytes"]),))
    return cell


def _tsv_rows(path: str, what: str, store: ImageStore) -> Iterator[Row]:
    """Yield a TSV's rows with lower-case column names, except A to H, and without empty cells."""
    limit = csv.field_size_limit(sys.maxsize)  # an image is one field
    try:
        with Path(path).expanduser().open(encoding="utf-8-sig", newline="") as file:
            for number, cells in enumerate(csv.DictReader(file, delimiter="\t"), 1):
                row = {key if len(key) == 1 else key.lower(): cell for key, cell in cells.items() if key and cell}
                if "image" in row:
                    row["image"] = _stored(row["image"], store)
                yield 0, number, json.dumps(row)
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} is not {what}: {error}") from None
    finally:
        csv.field_size_limit(limit)


def _stored(cell: str, store: ImageStore) -> object:
    """Store a cell's base64 image, or list of images, and return references. Returns other text unchanged."""
    if cell.startswith("["):
        return [_stored(each, store) for each in listed(cell)]
    if len(cell) > LONGEST_INDEX:
        try:
            return store.add(base64.b64decode(cell, validate=True))
        except (binascii.Error, ValueError):
            pass
    return cell


def listed(value: object) -> list:
    """Convert a value to a list: parse a list in Python syntax, and put other values into a list of one element."""
    if isinstance(value, str) and value.strip().startswith("["):
        try:
            value = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return [value]
    return list(value) if isinstance(value, (list, tuple)) else [value]


class RecordImages:
    """Find a record's image: in its own row, in another row by index, or in a folder by name."""

    def __init__(self, records: list[dict], folder: str | None) -> None:
        self._by_index = {str(each["index"]): each.get("image") for each in records if "index" in each}
        self._folder = ImageFolder(folder)

    def __call__(self, cell: object) -> str | Media:
        """Return the image of a cell. Raises DataError if it is missing."""
        if isinstance(cell, str) and len(cell) <= LONGEST_INDEX:
            cell = self._by_index.get(cell, cell)
        if isinstance(cell, Media):
            return cell
        cell = cell.get("path") if isinstance(cell, dict) else cell
        names = cell if isinstance(cell, tuple) else (cell,)  # a tuple: the file has one of these names
        if not all(isinstance(name, str) and name for name in names):
            raise DataError(f"has {short(cell)} as its image, expected an image inside the table or a file name")
        return self._folder(*names)
