"""Open the sources of --data_path: a single source, or the entries of a YAML mixture."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

import yaml

from llava_ds.boxes import BBOX_TYPES
from llava_ds.constants import ConfigError, DataError
from llava_ds.data.file_slices import read_errors
from llava_ds.data.sources.detect import NUM_RECORDS, FirstRecords, detect, folder_of, metadata_columns, names_image
from llava_ds.data.sources.locate import locate
from llava_ds.data.sources.options import Columns, SourceOptions, nearest, parse_columns, short
from llava_ds.data.sources.selection import DEFAULT_SEED, Selection, parse_selection
from llava_ds.data.sources.source import FORMATS, SPOOLED_KINDS, Source
from llava_ds.data.sources.tables import (
    byte_columns,
    csv_columns,
    first_names,
    open_saved,
    parquet_schema,
    read_columns,
)
from llava_ds.files.places import exists, is_file, join, open_data
from llava_ds.files.reading import state_of
from llava_ds.files.urls import is_remote, local_path, real_path

MAX_SHOWN = 5  # number of problems listed in one message; the others are counted
MAX_MIXTURE_BYTES = 64 << 20
SPOOL_VERSION = 3  # increment if the same files would be spooled differently
MIXTURE_SUFFIXES = (".yaml", ".yml")
ENTRY_KEYS = (
    "path",
    "json_path",
    "image_folder",
    "video_folder",
    "weight",
    "sampling_strategy",
    "seed",
    "format",
    "columns",
    "bbox_type",
    "split",
)


def open_sources(data_path: str, options: SourceOptions) -> list[Source]:
    """Open the sources of --data_path, reading only their first records.

    Raises ConfigError or DataError; for a mixture, with all of its problems.
    """
    with read_errors(data_path):
        if data_path.endswith(MIXTURE_SUFFIXES):
            if options.split is not None:
                raise ConfigError(
                    f"{data_path} is a mixture: leave the split {options.split!r} out, and give its entries split:"
                )
            return _open_mixture(data_path, options)
        return [_open(data_path, options, Selection())]


def shown(problems: Iterable[str], where: str = "") -> str:
    """List the first problems, one per line, and count the remaining ones. where: text to append to that count."""
    problems = list(problems)
    lines = [f"  {problem}" for problem in problems[:MAX_SHOWN]]
    if len(problems) > MAX_SHOWN:
        lines.append(f"  and {len(problems) - MAX_SHOWN} more{where}")
    return "\n".join(lines)


def _open(data_path: str, options: SourceOptions, selection: Selection) -> Source:
    located = locate(data_path, options.split)
    kind, files = located.kind, located.files
    columns = Columns.of(options.columns)
    image_root, video_root = folder_of(options.image_folder), folder_of(options.video_folder or options.image_folder)
    if kind == "imagefolder":
        image_root = video_root = folder_of(os.path.dirname(files[0]) or ".")
    cache = Path(options.cache_dir).expanduser().absolute() / "pictures"
    source = Source(data_path, kind, "llava", image_root, video_root, files, str(cache), columns)
    source = dataclasses.replace(
        source,
        on_unmarked_image=options.on_unmarked_image,
        bbox_type=options.bbox_type,
        note=located.note,
        other_columns=options.other_columns,
    )
    keys, held = _table_columns(source)
    known = bool(keys)
    if kind == "imagefolder":
        if not keys:
            keys = list({key: None for record in source.first(NUM_RECORDS) for key in _keys(record.text)})
        source = dataclasses.replace(source, columns=metadata_columns(columns, keys, options))
    first = source.first(NUM_RECORDS)
    if not first:
        raise DataError(f"{data_path} holds no records")
    records = FirstRecords.of([record.text for record in first], keys, held, has_all_keys=known)
    found = detect(records, source.columns, options, data_path)
    source = dataclasses.replace(source, columns=found.columns)
    is_table = kind in SPOOLED_KINDS or files[0].endswith(".parquet")  # only some columns are read
    read = read_columns(keys, found.columns) if is_table else keys
    return dataclasses.replace(
        source,
        format=found.format,
        seen=found.seen,
        marks_added=found.marks_added,
        unread_columns=tuple(name for name in keys if name not in read),
        selection=selection,
        spool=str(cache / _spool_name(source)),
    )


def _table_columns(source: Source) -> tuple[list[str], list[str]]:
    """Return all columns of a table, and the columns that hold files as bytes or that are unread and name images. Both
    are empty for other kinds of files."""
    path = source.files[0]
    if source.kind == "datasets":
        path = os.path.dirname(path)
        schema = open_saved(path).data.schema
    elif path.endswith(".parquet"):
        schema = parquet_schema(path)
    else:
        is_csv = source.kind == "csv" or source.files[0].endswith(".csv")
        return csv_columns(source.files[0]) if is_csv else [], []
    rows = first_names(path, source.columns)
    named = [name for name in (rows[0] if rows else ()) if any(names_image(name, row[name]) for row in rows)]
    return schema.names, [*byte_columns(schema), *named]


def _keys(text: str) -> list[str]:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return list(record) if isinstance(record, dict) else []


def _spool_name(source: Source) -> str:
    """Return a name that changes with the columns, the files' states and their sampled blocks."""
    if source.kind not in (*SPOOLED_KINDS, "json", "jsonl"):
        return "none"
    more = ("other columns",) if source.other_columns else ()
    digest = hashlib.sha256(repr((SPOOL_VERSION, source.kind, source.columns, *more)).encode())
    for path in source.files:
        digest.update(repr((real_path(path), state_of(path))).encode())
    return digest.hexdigest()[:20]


def _open_mixture(path: str, options: SourceOptions) -> list[Source]:
    sources, problems = [], []
    for i, entry in enumerate(_entries(path)):
        try:
            sources.append(_open_entry(entry, os.path.dirname(local_path(path)), options))
        except (ConfigError, DataError) as error:
            problems.append(f"{path}, entry {i}: {error}")
    if problems:
        raise ConfigError("\n".join(problems))
    return sources


def _entries(path: str) -> list[object]:
    path = local_path(path)
    if exists(path) and not is_file(path):
        raise ConfigError(f"{path} is not a regular file: expected a YAML mixture")
    try:
        with open_data(path) as file:
            mixture = yaml.safe_load(file.read(MAX_MIXTURE_BYTES).decode("utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path} can't be read as a YAML mixture: {error}") from error
    if isinstance(mixture, dict):
        for key in mixture:
            if key != "datasets":
                raise ConfigError(f"{path}: unknown key {key!r}: {nearest(key, ('datasets',))}")
        mixture = mixture.get("datasets")
    if not isinstance(mixture, list) or not mixture:
        raise ConfigError(
            f"{path} is not a mixture: expected 'datasets:' with a list of {{path, sampling_strategy, …}}"
        )
    return mixture


def _open_entry(entry: object, folder: str, options: SourceOptions) -> Source:
    if not isinstance(entry, dict):
        raise ConfigError(f"is {short(entry)}, expected keys and values like path: data.json")
    unknown = [f"unknown key {key!r}: {nearest(key, ENTRY_KEYS)}" for key in entry if key not in ENTRY_KEYS]
    if unknown:
        raise ConfigError("; ".join(unknown))
    for key in ("path", "json_path", "image_folder", "video_folder", "format", "split"):
        if not isinstance(entry.get(key, ""), str):
            raise ConfigError(f"{key} is {short(entry[key])}, expected text")
    if ("path" in entry) == ("json_path" in entry):
        raise ConfigError("names both path and json_path" if "path" in entry else "has no path")
    data_path = join(folder, entry.get("path") or entry.get("json_path") or "")
    if data_path.endswith(MIXTURE_SUFFIXES):
        raise ConfigError(f"{data_path} is a mixture itself: list its entries here")
    known = ("auto", *FORMATS)
    if entry.get("format", "auto") not in known:
        raise ConfigError(f"unknown format {entry['format']!r}: {nearest(entry['format'], known)}")
    changed: dict[str, object] = {"split": entry.get("split")}
    for key in ("image_folder", "video_folder"):
        if key in entry:
            changed[key] = join(folder, entry[key])
            if not is_remote(changed[key]) and not os.path.isdir(changed[key]):
                raise ConfigError(f"{key} {changed[key]}: no such folder")
    if "image_folder" in entry and "video_folder" not in entry and options.video_folder is None:
        changed["video_folder"] = None  # videos are in the entry's image folder
    if "format" in entry:
        changed["data_format"] = entry["format"]
    if "columns" in entry:
        columns = entry["columns"]
        if isinstance(columns, dict):
            columns = ",".join(f"{field}={column}" for field, column in columns.items())
        if not isinstance(columns, str):
            raise ConfigError(f"columns is {short(columns)}, expected field=column pairs")
        changed["columns"] = parse_columns(columns)
    if "bbox_type" in entry:
        if entry["bbox_type"] not in BBOX_TYPES:
            raise ConfigError(f"bbox_type is {short(entry['bbox_type'])}, expected {' or '.join(BBOX_TYPES)}")
        changed["bbox_type"] = entry["bbox_type"]
    selection = parse_selection(
        entry.get("sampling_strategy", "all"), entry.get("weight", 1), entry.get("seed", DEFAULT_SEED)
    )
    return _open(data_path, dataclasses.replace(options, **changed), selection)
