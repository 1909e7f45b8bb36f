"""Reading of tables (parquet files, saved `datasets` folders and CSV) in small batches."""

import csv
import datetime
import io
import json
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow
import pyarrow.parquet

from llava_ds.constants import ConfigError, DataError
from llava_ds.data.sources.embedded import ImageStore, Row, embed, rejected
from llava_ds.data.sources.json_files import MAX_RECORD_CHARS
from llava_ds.data.sources.objects import OBJECTS
from llava_ds.data.sources.options import TEMPLATE_KWARGS, TOOLS, WEIGHT_KEYS, Columns
from llava_ds.files.object_store import is_remote
from llava_ds.files.places import open_data

if TYPE_CHECKING:
    import datasets

BATCH_ROWS = 32  # of images of some 100 kB each: a few MB at a time
READ_BYTES = 1 << 20


def parquet_columns(path: str) -> list[str]:
    """The column names of a parquet file. Raises DataError if it is none."""
    return _open_parquet(path).schema_arrow.names


def num_parquet_rows(path: str) -> int:
    return _open_parquet(path).metadata.num_rows


def read_parquet(files: tuple[str, ...], columns: Columns, store: ImageStore) -> Iterator[Row]:
    """The rows of parquet files as records, with known columns only. Images go to the store."""
    for number, path in enumerate(files):
        table = _open_parquet(path)
        names = read_columns(table.schema_arrow.names, columns)
        line = 0
        try:
            for batch in table.iter_batches(BATCH_ROWS, columns=names):
                for record in batch.to_pylist():
                    line += 1
                    yield number, line, _as_text(record, columns, store)
        except ConfigError:  # of the store
            raise
        except Exception as error:  # damaged data can raise anything in Arrow and Python
            raise DataError(f"{path}: can't be read behind row {line}: {error}") from error


def open_saved(folder: str) -> "datasets.Dataset":
    """Open a folder that `save_to_disk` wrote; of several splits, "train". Raises DataError or ConfigError."""
    import datasets  # with pandas, half a second of every start: only for who has such a folder

    try:
        opened = datasets.load_from_disk(folder)
    except Exception as error:  # a damaged folder can raise anything in `datasets`
        raise DataError(f"{folder} can't be opened as a saved datasets folder: {error}") from error
    if isinstance(opened, datasets.DatasetDict):
        if "train" not in opened:
            names = ", ".join(opened)
            raise ConfigError(
                f"{folder} holds the splits {names} and no 'train': name one, like {folder}/{min(opened)}"
            )
        opened = opened["train"]
    return opened


def other_splits(folder: str) -> list[str]:
    """The splits besides "train" of a folder that `save_to_disk` wrote."""
    path = os.path.join(folder, "dataset_dict.json")
    if not os.path.isfile(path):
        return []
    with open(path, encoding="utf-8") as file:
        return [name for name in json.load(file)["splits"] if name != "train"]


def read_saved(folder: str, columns: Columns, store: ImageStore) -> Iterator[Row]:
    """The rows of a saved `datasets` folder as records. Images go to the store, undecoded."""
    saved = open_saved(folder)
    saved = saved.select_columns(read_columns(saved.column_names, columns)).with_format("arrow")
    line = 0
    try:
        for table in saved.iter(batch_size=BATCH_ROWS):
            table.validate(full=True)  # damaged offsets would lead outside of it
            for record in table.to_pylist():
                line += 1
                yield 0, line, _as_text(record, columns, store)
    except ConfigError:
        raise
    except Exception as error:  # as above
        raise DataError(f"{folder}: can't be read behind row {line}: {error}") from error


def read_csv(path: str) -> Iterator[tuple[int, str]]:
    """Line and text of every row of a CSV file with a header line."""
    with io.TextIOWrapper(open_data(path), encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.DictReader(file)
        try:
            for row in reader:
                row.pop(None, None)  # cells behind the last named column
                yield reader.line_num, json.dumps({name: cell for name, cell in row.items() if cell})
        except csv.Error as error:
            raise DataError(f"{path}, line {reader.line_num}: can't be read as CSV: {error}") from error


def _open_parquet(path: str) -> pyarrow.parquet.ParquetFile:
    try:
        file = open_data(path) if is_remote(path) else path
        # With a buffer the file is streamed; without one, whole column chunks are in memory.
        return pyarrow.parquet.ParquetFile(file, buffer_size=READ_BYTES, pre_buffer=False)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path} can't be read as parquet: {error}") from error


def read_columns(names: Sequence[str], columns: Columns) -> list[str]:
    """The columns of a table that its records have."""
    known = {*columns.all(), *WEIGHT_KEYS, "kind", OBJECTS, TEMPLATE_KWARGS, TOOLS}
    return [name for name in names if name in known]


def _as_text(record: dict, columns: Columns, store: ImageStore) -> str:
    try:
        text = json.dumps(_without_nulls(embed(record, columns, store.embed)), default=_plain)
        return (
            text
            if len(text) <= MAX_RECORD_CHARS
            else rejected(f"is longer than {MAX_RECORD_CHARS >> 20} million characters")
        )
    except (RecursionError, ValueError, TypeError) as error:
        return rejected(f"can't be written as JSON: {error}")


def _without_nulls(value: object) -> object:
    """The value without the keys of its objects whose value is null: a table gives every key of a struct."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _plain(value: object) -> str:
    if isinstance(value, (datetime.date, datetime.datetime)):
        return value.isoformat()
    return f"<{type(value).__name__}>"  # binary outside an image field, decimals: not used in training
