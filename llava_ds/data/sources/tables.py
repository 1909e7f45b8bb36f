"""Read tables (parquet files, saved `datasets` folders and CSV) in small batches."""

import contextlib
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
from llava_ds.data.sources.options import (
    GOOD_ANSWER_KEYS,
    RECORD_WEIGHT_KEYS,
    REJECTED_IMAGES,
    TEMPLATE_KWARGS,
    TOOLS,
    Columns,
)
from llava_ds.extensions.active import record_fields
from llava_ds.files.places import open_data
from llava_ds.files.urls import is_remote

if TYPE_CHECKING:
    import datasets

BATCH_ROWS = 32  # a few MB, if each row holds an image of about 100 kB
READ_BYTES = 1 << 20
MAX_HEADER_CHARS = 1 << 20  # longest line of a CSV's column names

_TOO_MANY_CELLS = "has {} cells, but the header has {}: put texts that contain the separator in quotes"


def parquet_schema(path: str) -> pyarrow.Schema:
    """Names and types of the columns of a parquet file. Raises DataError if it is not parquet."""
    return _open_parquet(path).schema_arrow


def byte_columns(schema: pyarrow.Schema) -> list[str]:
    """Columns of a table that hold files as bytes: images, sounds or videos, one or a list in each cell."""
    return [field.name for field in schema if _holds_bytes(field.type)]


def first_names(folder_or_file: str, columns: Columns) -> list[dict]:
    """Read the first rows of a table's unread columns that hold texts or integers, or lists of these.

    Raises DataError if they can't be read.
    """
    saved = None if folder_or_file.endswith(".parquet") else open_saved(folder_or_file)
    schema = parquet_schema(folder_or_file) if saved is None else saved.data.schema
    read = read_columns(schema.names, columns)
    names = [field.name for field in schema if field.name not in read and _holds_names(field.type)]
    if not names:
        return []
    try:
        if saved is not None:
            return saved.select_columns(names).with_format("arrow")[:BATCH_ROWS].to_pylist()
        batch = next(_open_parquet(folder_or_file).iter_batches(BATCH_ROWS, columns=names), None)
        return [] if batch is None else batch.to_pylist()
    except Exception as error:  # damaged data can raise anything in Arrow and Python
        raise DataError(f"{folder_or_file}: its first rows can't be read: {error}") from error


def _holds_names(kind: pyarrow.DataType) -> bool:
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        kind = kind.value_type
    return pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind) or pyarrow.types.is_integer(kind)


def _holds_bytes(kind: pyarrow.DataType) -> bool:
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        return _holds_bytes(kind.value_type)
    if pyarrow.types.is_struct(kind):
        return any(field.name == "bytes" and _holds_bytes(field.type) for field in kind)
    return pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind)


def num_parquet_rows(path: str) -> int:
    return _open_parquet(path).metadata.num_rows


def read_parquet(files: tuple[str, ...], columns: Columns, store: ImageStore, others: bool = False) -> Iterator[Row]:
    """Yield the rows of parquet files as records. Images go to the store.

    others: also read unknown columns, except files as bytes.
    """
    for number, path in enumerate(files):
        table = _open_parquet(path)
        names = columns_to_read(table.schema_arrow, columns, others)
        line = 0
        try:
            for batch in table.iter_batches(BATCH_ROWS, columns=names):
                for record in batch.to_pylist():
                    line += 1
                    yield number, line, _as_text(record, columns, store)
        except ConfigError:  # raised by the store
            raise
        except Exception as error:  # damaged data can raise anything in Arrow and Python
            raise DataError(f"{path}: can't be read after row {line}: {error}") from error


def open_saved(folder: str) -> "datasets.Dataset":
    """Open a folder written by `save_to_disk`, or its split "train" if it has splits. Raises DataError, ConfigError."""
    import datasets  # imported here, because importing pandas takes half a second

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


def saved_splits(folder: str) -> list[str]:
    """List the splits of a folder written by `save_to_disk`; empty for a folder without splits."""
    path = os.path.join(folder, "dataset_dict.json")
    if not os.path.isfile(path):
        return []
    try:
        with open(path, encoding="utf-8") as file:
            return [str(name) for name in json.load(file)["splits"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} can't be read: {error}") from error


def read_saved(folder: str, columns: Columns, store: ImageStore, others: bool = False) -> Iterator[Row]:
    """Yield the rows of a saved `datasets` folder as records. Images go to the store, undecoded. others: as in
    read_parquet."""
    saved = open_saved(folder)
    saved = saved.select_columns(columns_to_read(saved.data.schema, columns, others)).with_format("arrow")
    line = 0
    try:
        for table in saved.iter(batch_size=BATCH_ROWS):
            table.validate(full=True)  # damaged offsets would point outside the table
            for record in table.to_pylist():
                line += 1
                yield 0, line, _as_text(record, columns, store)
    except ConfigError:
        raise
    except Exception as error:  # damaged data can raise anything in Arrow and Python
        raise DataError(f"{folder}: can't be read after row {line}: {error}") from error


def read_csv(path: str, columns: Columns) -> Iterator[tuple[int, str]]:
    """Yield line and text of every row of a CSV or TSV file with a header line. Empty cells are omitted.

    An image cell may hold a JSON list. A row with more cells than the header is rejected: a text lacks its quotes.
    """
    limit = csv.field_size_limit(MAX_RECORD_CHARS)
    line = 1
    try:
        with _open_csv(path) as (names, reader):
            for cells in reader:
                line = 1 + reader.line_num
                if len(cells) > len(names):
                    yield line, rejected(_TOO_MANY_CELLS.format(len(cells), len(names)))
                elif cells:
                    record: dict[str, object] = {name: cell for name, cell in zip(names, cells) if cell}
                    for name in (*columns.image, *columns.video):
                        if name in record:
                            record[name] = _listed(record[name])
                    yield line, json.dumps(record)
    except csv.Error as error:
        raise DataError(f"{path}, after line {line}: can't be read as CSV: {error}") from error
    finally:
        csv.field_size_limit(limit)


def csv_columns(path: str) -> list[str]:
    """Column names of a CSV or TSV file. Raises DataError for no names or repeated names."""
    with _open_csv(path) as (names, _):
        return names


@contextlib.contextmanager
def _open_csv(path: str) -> Iterator[tuple[list[str], Iterator[list[str]]]]:
    """Yield the names in the header line, and a reader of the other lines.

    The separator is a comma. If the header has none, it is a tab or semicolon. In a .tsv file, it is always a tab.
    """
    with io.TextIOWrapper(open_data(path), encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        header = file.readline(MAX_HEADER_CHARS)
        separator = next((each for each in (",", "\t", ";") if each in header), ",")
        if path.lower().endswith(".tsv"):
            separator = "\t"
        names = [name.strip() for name in next(csv.reader([header], delimiter=separator), [])]
        if not any(names):
            raise DataError(f"{path} is empty, expected a line with the names of columns")
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise DataError(f"{path} has the column {twice[0]!r} twice: give every column a different name")
        yield names, csv.reader(file, delimiter=separator)


def _listed(cell: str) -> object:
    """Parse a JSON list of paths in a cell; other cells are returned unchanged."""
    if not cell.startswith("["):
        return cell
    try:
        found = json.loads(cell)
    except (ValueError, RecursionError):
        return cell
    return found if isinstance(found, list) else cell


def _open_parquet(path: str) -> pyarrow.parquet.ParquetFile:
    try:
        file = open_data(path) if is_remote(path) else path
        # A buffer streams the file. Without it, whole column chunks would be in memory.
        return pyarrow.parquet.ParquetFile(file, buffer_size=READ_BYTES, pre_buffer=False)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path} can't be read as parquet: {error}") from error


def read_columns(names: Sequence[str], columns: Columns) -> list[str]:
    """Return those column names that are read from a table. names: all columns of the table."""
    refused = (*GOOD_ANSWER_KEYS, REJECTED_IMAGES, *Columns().chosen)
    known = {*columns.all(), *RECORD_WEIGHT_KEYS, "kind", OBJECTS, TEMPLATE_KWARGS, TOOLS, *refused}
    known |= {key for fields in record_fields().values() for key in (*fields.names, *fields.columns)}
    return [name for name in names if name in known]


def columns_to_read(schema: pyarrow.Schema, columns: Columns, others: bool) -> list[str]:
    """Return the columns to read from a table. others: as in read_parquet."""
    read = read_columns(schema.names, columns)
    if not others:
        return read
    skipped = set(byte_columns(schema)).difference(read)
    return [name for name in schema.names if name not in skipped]


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
    """Remove null values from objects: rows of a table have every key of a struct, even if it is missing."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _plain(value: object) -> str:
    if isinstance(value, (datetime.date, datetime.datetime)):
        return value.isoformat()
    return f"<{type(value).__name__}>"  # binary values outside image fields, and decimals, are not learned
