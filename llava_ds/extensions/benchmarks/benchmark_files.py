"""Read benchmark files: their records and the images that they name."""

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from llava_ds.constants import ConfigError, DataError
from llava_ds.data.sources import shown
from llava_ds.data.sources.fields import find_file
from llava_ds.data.sources.options import short

T = TypeVar("T")


@dataclass(frozen=True)
class Given:
    """The command line's flags about the questions.

    data_path: the questions; annotations: the separate file of answers, if any; split: the split to read, for ScienceQA
    and folders of records; metric, and turns ("together" or "each"): used only for LLaVA-format files.
    """

    data_path: str
    annotations: str | None = None
    image_folder: str | None = None
    split: str | None = None
    metric: str = "exact"
    turns: str = "together"
    cache_dir: str = "~/.cache/llava_ds"


def read_json(path: str | Path) -> object:
    """Read a JSON file. Raises ConfigError if it is missing, DataError if it can't be read."""
    text = read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} can't be read as JSON: {error}") from None


def read_records(path: str | Path, what: str, keys: tuple[str, ...]) -> list[dict]:
    """Read the objects of a JSONL file. Raises DataError if the first record lacks a key of `what`."""
    records = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if not isinstance(record, dict):
                expected = f"expected {what}: a JSON object with {', '.join(keys)} on every line".replace("|", " or ")
                raise DataError(f"{path}, line {number}: {short(line)} is not a JSON object; {expected}") from None
            records.append(record)
    return checked_records(path, what, records, keys)


def records_in(path: str | Path, what: str, content: object, keys: tuple[str, ...], under: str = "data|questions"):
    """Find the records in a JSON file's content. under: alternative names, separated by |, of the list in an object. An
    object without such a list maps ids to records. Raises DataError if the content is not `what`.
    """
    if isinstance(content, dict):
        lists = [content[name] for name in under.split("|") if isinstance(content.get(name), list)]
        by_id = [{**each, "id": id} if isinstance(each, dict) else each for id, each in content.items()]
        content = lists[0] if lists else by_id
    return checked_records(path, what, content, keys)


def checked_records(path: str | Path, what: str, records: object, keys: tuple[str, ...]) -> list[dict]:
    """Return the records. Raises DataError unless they are a list of objects and the first one has the keys.

    keys: each a name, or alternative names separated by |.
    """
    expected = ", ".join(keys).replace("|", " or ")
    if not isinstance(records, list) or not records:
        found = "no records" if records == [] else short(records)
        raise DataError(f"{path} is not {what}: it contains {found}, expected records with {expected}")
    for number, record in enumerate(records):
        if not isinstance(record, dict):
            raise DataError(f"{path} is not {what}: record {number}: is {short(record)}, expected an object")
    if not all(set(key.split("|")) & set(records[0]) for key in keys):
        found = ", ".join(map(short, records[0]))
        raise DataError(f"{path} is not {what}: its first record has the keys {found}, expected {expected}")
    return records


def read_text(path: str | Path) -> str:
    """Read a text file. Raises ConfigError if it is missing."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from None


def convert_records(path: str | Path, records: Iterable, convert: Callable[[Any], T]) -> list[T]:
    """Convert every record. Raises DataError with the first problems if some can't be used."""
    converted, problems = [], []
    for index, record in enumerate(records):
        try:
            converted.append(convert(record))
        except DataError as error:
            problems.append(f"record {index}: {error}")
    if problems:
        total = len(problems) + len(converted)
        raise DataError(f"{path}: {len(problems)} of {total} records can't be used\n{shown(problems)}")
    return converted


def field(record: object, key: str, kind: type | tuple[type, ...]) -> object:
    """Return a record's value under a key. Raises DataError if it is missing or of another type."""
    if not isinstance(record, dict):
        raise DataError(f"is {short(record)}, expected an object")
    value = record.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        raise DataError(f"has {short(value)} under {key!r}, expected {' or '.join(each.__name__ for each in kinds)}")
    return value


class ImageFolder:
    """Find images in a folder by name, never outside the folder."""

    def __init__(self, folder: str | None) -> None:
        self.root = None
        if folder is not None:
            self.root = os.path.realpath(os.path.expanduser(folder))
            if not os.path.isdir(self.root):
                raise ConfigError(f"--image_folder {folder}: this folder does not exist")

    def __call__(self, *names: str) -> str:
        """Return the path of the first name that exists. Raises DataError if none does."""
        problem = None
        for name in names:
            try:
                return find_file(name, self.root)
            except DataError as error:
                problem = problem or error
        raise problem


def matching(answers: dict, key: object, path: str | Path) -> object:
    """Return a question's answers from an annotation file, by key. Raises DataError if the file has none."""
    if key not in answers:
        raise DataError(f"is the question {short(key)}, but {path} has no answer to it")
    return answers[key]


def complete(given: Given) -> str:
    """Return --data_path if its file includes the answers. Raises ConfigError if --annotations is also given."""
    if given.annotations is not None:
        raise ConfigError(f"--annotations {given.annotations}: {given.data_path} already has the answers: leave it out")
    return given.data_path


def annotations_of(given: Given, task: str, example: str) -> str:
    """Return --annotations. Raises ConfigError if it is missing."""
    if given.annotations is None:
        raise ConfigError(f"--annotations is missing: {given.data_path} has only {task}'s questions, give {example}")
    return given.annotations
