"""The files of --data_path, and the kind of reader for them."""

import glob
import json
import os
import re
from pathlib import Path

from llava_ds.constants import ConfigError, DataError
from llava_ds.data.sources.json_files import first_value, read_jsonl
from llava_ds.data.sources.tables import open_saved
from llava_ds.files.object_store import is_remote
from llava_ds.files.places import (
    exists,
    files_in,
    is_file,
    is_folder,
    join,
    local_path,
    matching,
    names_in,
    open_data,
)

METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
MAX_FILES = 100_000
KINDS = {
    "json": "a JSON list",
    "jsonl": "JSONL",
    "parquet": "parquet",
    "datasets": "a saved datasets folder",
    "imagefolder": "a folder of images",
    "webdataset": "WebDataset shards",
}

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d{1,9})\.\.(\d{1,9})")
_SPLITS = re.compile(r"(?:^|[-_./])(train|training|validation|valid|val|dev|test|testing|eval)(?=[-_./])")
_EXPECTED = (
    "a .json, .jsonl, .parquet or .tar file, a pattern of such files, a .yaml mixture, or a folder: saved by datasets, "
    "of .parquet or .tar files, or of images with metadata.jsonl, .csv or .parquet"
)


def locate(data_path: str) -> tuple[str, tuple[str, ...]]:
    """(kind of reader, files to read) of one source.

    Raises ConfigError if there is nothing to read, and DataError for damaged files.
    """
    path = local_path(data_path)
    if is_folder(path):
        return _folder(path)
    files = (path,) if exists(path) else expand(path)
    irregular = [file for file in files if not is_file(file)]
    if irregular:
        raise ConfigError(f"{irregular[0]} is no regular file: --data_path takes {_EXPECTED}")
    if len(files) == 1 and os.path.basename(files[0]) in METADATA:
        return "imagefolder", files
    kinds = {_kind_of_file(file): file for file in files}
    if len(kinds) > 1:
        found = ", ".join(f"{KINDS[kind]} ({os.path.basename(file)})" for kind, file in kinds.items())
        raise ConfigError(f"{data_path} matches files of several kinds: {found}; list them in a YAML mixture")
    return next(iter(kinds)), files


def expand(pattern: str) -> tuple[str, ...]:
    """The files that match a pattern with {a,b}, {000..009}, *, ? or [ab], in its order.

    Raises ConfigError if a part of it matches none.
    """
    files: list[str] = []
    for each in _without_braces(pattern):
        found = matching(each) if glob.has_magic(each) and not exists(each) else [each]
        if not found or not exists(found[0]):
            raise ConfigError(f"{each}: there is no such file or folder; expected {_EXPECTED}")
        files += found
    return tuple(files)


def _without_braces(pattern: str) -> list[str]:
    done, todo = [], [pattern]
    while todo:
        each = todo.pop()
        match = _BRACES.search(each)
        if match is None:
            done.append(each)
            continue
        numbers = _RANGE.fullmatch(match[1])
        if numbers:
            first, last = int(numbers[1]), int(numbers[2])
            if last - first >= MAX_FILES:
                raise ConfigError(f"{pattern}: {match[0]} stands for more than {MAX_FILES:,} files")
            width = len(numbers[1]) if numbers[1].startswith("0") else 0
            choices = [f"{number:0{width}d}" for number in range(first, last + 1)]
        else:
            choices = match[1].split(",")
        if len(todo) + len(done) + len(choices) > MAX_FILES:
            raise ConfigError(f"{pattern} stands for more than {MAX_FILES:,} files")
        todo += [each[: match.start()] + choice + each[match.end() :] for choice in reversed(choices)]
    return done


def _folder(path: str) -> tuple[str, tuple[str, ...]]:
    folder = Path(path)
    if any(is_file(join(path, name)) for name in ("state.json", "dataset_dict.json")):
        if is_remote(path):
            raise ConfigError(f"{path} was saved by datasets, which maps files of a disk: copy it, or write parquet")
        saved = open_saved(path)
        arrow = tuple(part["filename"] for part in saved.cache_files)
        state = Path(arrow[0]).parent if arrow else folder
        return "datasets", (str(state / "state.json"), str(state / "dataset_info.json"), *arrow)
    for root in (path, join(path, "train")):
        metadata = [file for name in METADATA if is_file(file := join(root, name))]
        if len(metadata) > 1:
            names = ", ".join(map(os.path.basename, metadata))
            raise ConfigError(f"{root} holds {names}: leave one of them there")
        if metadata:
            return "imagefolder", tuple(metadata)
    tars, tables = files_in(path, "*.tar"), files_in(path, "*.parquet", recursive=True)
    if tars and tables:
        raise ConfigError(f"{path} holds .tar and .parquet files: name one kind, like {path}/*.tar")
    if tables:
        splits = {match[1] for table in tables if (match := _SPLITS.search(os.path.relpath(table, path)))}
        if len(splits) > 1:
            raise ConfigError(
                f"{path} holds tables of several splits ({', '.join(sorted(splits))}): name one by a pattern, like "
                f"{os.path.dirname(tables[0])}/train-*.parquet"
            )
    if not tars and not tables:
        some = [os.path.basename(name) for name in names_in(path)[:5]]
        raise ConfigError(f"{path} holds nothing to read ({', '.join(some) or 'it is empty'}); expected {_EXPECTED}")
    return ("webdataset", tuple(tars)) if tars else ("parquet", tuple(tables))


def _first_line_is_whole(path: str) -> bool:
    """True for JSONL that begins with a list (a bad record); False for a JSON list in a file named .jsonl."""
    rows = read_jsonl(path)
    try:
        json.loads(next(rows)[1])
        return next(rows, None) is not None
    except (ValueError, RecursionError):  # DataError among them: the line is too long for a record
        return False


def _kind_of_file(path: str) -> str:
    with open_data(path) as file:
        start = file.read(512)
    suffix = os.path.splitext(path)[1].lower()
    if start.startswith(b"PAR1") or suffix == ".parquet":
        return "parquet"
    if suffix == ".tar" or start[257:262] == b"ustar":
        return "webdataset"
    if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise DataError(f"{path} can't be read as JSON: it is UTF-16, save it as UTF-8")
    first = start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] or first_value(path)[0].encode("utf-8", "replace")
    if not first:
        raise DataError(f"{path} is empty")
    lines = suffix in (".jsonl", ".ndjson")
    if first == b"[" and not (lines and _first_line_is_whole(path)):
        return "json"
    if lines:
        return "jsonl"
    if first != b"{":
        found = f"it begins with {start[:20]!r}"
        raise DataError(f"{path} can't be read as JSON: {found}; --data_path takes {_EXPECTED}")
    if first_value(path)[1] == "{":
        return "jsonl"
    raise DataError(
        f"{path} holds one object, expected a JSON list of records like "
        '{"id": "1", "image": "a.jpg", "conversations": [{"from": "human", "value": "<image>\\nWhat is it?"}, '
        '{"from": "gpt", "value": "A cat."}]}, or JSONL'
    )
