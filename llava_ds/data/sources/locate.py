"""Find the files of --data_path and the kind of reader for them."""

import glob
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from llava_ds.constants import ConfigError, DataError
from llava_ds.data.sources.json_files import first_value, read_jsonl
from llava_ds.data.sources.options import short
from llava_ds.data.sources.split_files import choose_files
from llava_ds.data.sources.tables import open_saved, saved_splits
from llava_ds.files.places import exists, files_in, is_file, is_folder, join, matching, names_in, open_data, relative_to
from llava_ds.files.urls import is_remote, local_path

METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
MAX_FILES = 100_000
KINDS = {
    "json": "a JSON list",
    "jsonl": "JSONL",
    "csv": "CSV",
    "parquet": "parquet",
    "datasets": "a saved datasets folder",
    "imagefolder": "a folder of images",
    "webdataset": "WebDataset shards",
}

_FIRST_KEY = re.compile(rb'(?:\xef\xbb\xbf)?\s*\{\s*"([^"\\]*)"')
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d{1,9})\.\.(\d{1,9})")
_TEXTS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
# Files of a cloned hub repository that hold no records.
_NO_DATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json")
_EXPECTED = (
    "a .json, .jsonl, .csv, .parquet or .tar file, a pattern of such files, a .yaml mixture, or a folder: saved by "
    "datasets, of such files, or of images with metadata.jsonl, .csv or .parquet"
)


@dataclass(frozen=True)
class Located:
    """The files of a source. kind: a key of KINDS; note: a remark to print about the choice of files, or ""."""

    kind: str
    files: tuple[str, ...]
    note: str = ""


def locate(data_path: str, split: str | None = None) -> Located:
    """Find the files of one source. split: name of a folder's split; None if it has only one.

    Raises ConfigError if nothing is found or a split must be named, and DataError for damaged files.
    """
    path = local_path(data_path)
    if is_folder(path):
        return _folder(path, split)
    if split is not None:
        raise ConfigError(f"{data_path} is not a folder with splits: leave the split {split!r} out")
    return _files(data_path, path)


def _files(data_path: str, path: str) -> Located:
    """Find a single file, or the files of a pattern."""
    files = (path,) if exists(path) else expand(path)
    irregular = [file for file in files if not is_file(file)]
    if irregular:
        raise ConfigError(f"{irregular[0]} is not a regular file: --data_path takes {_EXPECTED}")
    if len(files) == 1 and os.path.basename(files[0]) in METADATA:
        return Located("imagefolder", files)
    return Located(_one_kind(data_path, files), files)


def _one_kind(data_path: str, files: tuple[str, ...]) -> str:
    kinds = {_kind_of_file(file): file for file in files}
    if len(kinds) > 1:
        found = ", ".join(f"{KINDS[kind]} ({os.path.basename(file)})" for kind, file in kinds.items())
        raise ConfigError(f"{data_path} matches files of several kinds: {found}; list them in a YAML mixture")
    return next(iter(kinds))


def expand(pattern: str) -> tuple[str, ...]:
    """Expand a pattern with {a,b}, {000..009}, *, ? or [ab] to files, in the pattern's order.

    Raises ConfigError if an expanded pattern matches no file.
    """
    files: list[str] = []
    for each in _without_braces(pattern):
        found = matching(each) if glob.has_magic(each) and not exists(each) else [each]
        if not found or not exists(found[0]):
            raise ConfigError(f"{each}: no such file or folder; expected {_EXPECTED}")
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
                raise ConfigError(f"{pattern}: {match[0]} matches more than {MAX_FILES:,} files")
            width = len(numbers[1]) if numbers[1].startswith("0") else 0
            choices = [f"{number:0{width}d}" for number in range(first, last + 1)]
        else:
            choices = match[1].split(",")
        if len(todo) + len(done) + len(choices) > MAX_FILES:
            raise ConfigError(f"{pattern} matches more than {MAX_FILES:,} files")
        todo += [each[: match.start()] + choice + each[match.end() :] for choice in reversed(choices)]
    return done


def _folder(path: str, split: str | None) -> Located:
    if any(is_file(join(path, name)) for name in ("state.json", "dataset_dict.json")):
        return _saved(path, split)
    metadata = [file for name in METADATA if is_file(file := join(path, name))]
    if metadata:
        return _image_folder(path, metadata, split)
    found = files_in(path, (".tar", ".parquet", *_TEXTS))
    in_folders = [file for file in found if os.path.basename(file) in METADATA]
    tars, tables = (
        [file for file in found if file.lower().endswith(ending) and file not in in_folders]
        for ending in (".tar", ".parquet")
    )
    above = [file for file in tars if "/" not in relative_to(file, path)]
    if in_folders and not tars and not tables:
        return _image_folder(path, in_folders, split)
    if above and tables:
        raise ConfigError(f"{path} holds .tar and .parquet files: name one kind, like {path}/*.tar")
    if tables or tars:
        kind, files = ("parquet", tables) if tables else ("webdataset", above or tars)
        chosen = choose_files(path, files, split)
        return Located(kind, chosen.files, chosen.note)
    texts = [file for file in found if file.lower().endswith(_TEXTS) and os.path.basename(file) not in _NO_DATA]
    if not texts:
        some = [os.path.basename(name) for name in names_in(path)[:5]]
        raise ConfigError(f"{path} has nothing to read ({', '.join(some) or 'it is empty'}); expected {_EXPECTED}")
    chosen = choose_files(path, texts, split)
    return Located(_one_kind(path, chosen.files), chosen.files, chosen.note)


def _saved(path: str, split: str | None) -> Located:
    """Locate a folder written by `save_to_disk`, or one of its splits."""
    if is_remote(path):
        raise ConfigError(f"{path} was saved by datasets, and can only be opened on a disk: copy it, or write parquet")
    splits, note = saved_splits(path), ""
    if split is not None and split not in splits:
        raise ConfigError(f"{path} has no split {split!r}: its splits are {', '.join(map(repr, splits)) or 'none'}")
    if len(splits) > 1 and split is None:
        raise ConfigError(
            f"{path} holds the splits {' and '.join(map(repr, splits))}: choose one with --data_split {splits[0]}, or "
            f"as --data_path {join(path, splits[0])}"
        )
    if splits:
        taken = split or splits[0]
        others = [name for name in splits if name != taken]
        note = f"the split {taken!r}" + (f", and not {', '.join(map(repr, others))}" if others else "")
        path = join(path, taken)
    saved = open_saved(path)
    arrow = tuple(part["filename"] for part in saved.cache_files)
    state = Path(arrow[0]).parent if arrow else Path(path)
    return Located("datasets", (str(state / "state.json"), str(state / "dataset_info.json"), *arrow), note)


def _image_folder(path: str, metadata: list[str], split: str | None) -> Located:
    """Locate the image folder whose metadata belongs to a split."""
    chosen = choose_files(path, metadata, split)
    folders = {os.path.dirname(file) for file in chosen.files}
    if len(folders) > 1:
        some = " and ".join(sorted(folders)[:4])
        raise ConfigError(f"{path} has several folders with metadata ({some}): list them in a YAML mixture")
    if len(chosen.files) > 1:
        names = ", ".join(map(os.path.basename, chosen.files))
        raise ConfigError(f"{folders.pop()} holds {names}: leave one of them there")
    return Located("imagefolder", chosen.files, chosen.note)


def _first_line_is_whole(path: str) -> bool:
    """True for JSONL that begins with a list (a bad record); False for a JSON list in a file named .jsonl."""
    rows = read_jsonl(path)
    try:
        json.loads(next(rows)[1])
        return next(rows, None) is not None
    except (ValueError, RecursionError):  # includes DataError: the line is too long for a record
        return False


def _kind_of_file(path: str) -> str:
    with open_data(path) as file:
        start = file.read(512)
    suffix = os.path.splitext(path)[1].lower()
    if start.startswith(b"PAR1") or suffix == ".parquet":
        return "parquet"
    if suffix == ".tar" or start[257:262] == b"ustar":
        return "webdataset"
    if start[:2] == b"\x1f\x8b" or start[:4] == b"\x28\xb5\x2f\xfd" or start[:3] in (b"BZh", b"PK\x03"):
        raise DataError(f"{path} is compressed: unpack it")
    if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise DataError(
            f"{path} can't be read as {'CSV' if suffix in ('.csv', '.tsv') else 'JSON'}: it is UTF-16, save it as UTF-8"
        )
    if suffix in (".csv", ".tsv"):
        return "csv"
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
    key = _FIRST_KEY.match(start)
    found = f" of key {short(key[1].decode('utf-8', 'replace'))}" if key else ""
    raise DataError(
        f"{path} holds one object, expected a JSON list of records like "
        '{"id": "1", "image": "a.jpg", "conversations": [{"from": "human", "value": "<image>\\nWhat is it?"}, '
        '{"from": "gpt", "value": "A cat."}]}, or JSONL. '
        f"It begins with the value{found}: write the list of its records into a separate file"
    )
