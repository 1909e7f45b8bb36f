"""Benchmarks' files from disk: their records, and the images that they name."""

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

    data_path: the questions; annotations: their answers, where another file has them; split: of ScienceQA, or of a
    folder of records; metric, and turns ("together" or "each"): of a LLaVA-format file.
    """

    data_path: str
    annotations: str | None = None
    image_folder: str | None = None
    split: str | None = None
    metric: str = "exact"
    turns: str = "together"
    cache_dir: str = "~/.cache/llava_ds"


def read_json(path: str | Path) -> object:
    """A JSON file. Raises ConfigError where there is none and DataError for one that can't be read."""
    text = read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} can't be read as JSON: {error}") from None


def read_records(path: str | Path, what: str, keys: tuple[str, ...]) -> list[dict]:
    """The objects of a JSONL file. Raises DataError where it is not `what`: its first record lacks one of the keys."""
    records = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if not isinstance(record, dict):
                expected = f"expected {what}: a JSON object with {', '.join(keys)} on every line".replace("|", " or ")
                raise DataError(f"{path}, line {number}: {short(line)} is no JSON object; {expected}") from None
            records.append(record)
    return checked_records(path, what, records, keys)


def records_in(path: str | Path, what: str, content: object, keys: tuple[str, ...], under: str = "data|questions"):
    """The records of a JSON file's content: a list, one in an object under one of the names, or an object of them by
    their ids. Raises DataError where it is not `what`."""
    if isinstance(content, dict):
        lists = [content[name] for name in under.split("|") if isinstance(content.get(name), list)]
        by_id = [{**each, "id": id} if isinstance(each, dict) else each for id, each in content.items()]
        content = lists[0] if lists else by_id
    return checked_records(path, what, content, keys)


def checked_records(path: str | Path, what: str, records: object, keys: tuple[str, ...]) -> list[dict]:
    """records. Raises DataError unless they are a list of objects, of which the first has the keys.

    A key with | in it is one of several names.
    """
    expected = ", ".join(keys).replace("|", " or ")
    if not isinstance(records, list) or not records:
        found = "no records" if records == [] else short(records)
        raise DataError(f"{path} is not {what}: it holds {found}, expected records with {expected}")
    for number, record in enumerate(records):
        if not isinstance(record, dict):
            raise DataError(f"{path} is not {what}: record {number}: is {short(record)}, expected an object")
    if not all(set(key.split("|")) & set(records[0]) for key in keys):
        found = ", ".join(map(short, records[0]))
        raise DataError(f"{path} is not {what}: its first record has the keys {found}, expected {expected}")
    return records


def read_text(path: str | Path) -> str:
    """A text file. Raises ConfigError where there is none."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not a text in UTF-8: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from None


def convert_records(path: str | Path, records: Iterable, convert: Callable[[Any], T]) -> list[T]:
    """convert of every record. Raises DataError, with the first problems, where some can't be used."""
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
    """The value under a key of a record. Raises DataError where it is absent or of another kind."""
    if not isinstance(record, dict):
        raise DataError(f"is {short(record)}, expected an object")
    value = record.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        raise DataError(f"has {short(value)} under {key!r}, expected {' or '.join(each.__name__ for each in kinds)}")
    return value


class ImageFolder:
    """The images in a folder, by name; nothing outside it is found."""

    def __init__(self, folder: str | None) -> None:
        self.root = None
        if folder is not None:
            self.root = os.path.realpath(os.path.expanduser(folder))
            if not os.path.isdir(self.root):
                raise ConfigError(f"--image_folder {folder}: there is no such folder")

    def __call__(self, *names: str) -> str:
        """The path of the first of the names that is there. Raises DataError where none is."""
        problem = None
        for name in names:
            try:
                return find_file(name, self.root)
            except DataError as error:
                problem = problem or error
        raise problem


def matching(answers: dict, key: object, path: str | Path) -> object:
    """The answers to a question in an annotation file. Raises DataError where it has none."""
    if key not in answers:
        raise DataError(f"is the question {short(key)}, to which {path} has no answer")
    return answers[key]


def complete(given: Given) -> str:
    """--data_path of a file that has the answers, too. Raises ConfigError where --annotations is given as well."""
    if given.annotations is not None:
        raise ConfigError(f"--annotations {given.annotations}: {given.data_path} has the answers, too: leave it out")
    return given.data_path


def annotations_of(given: Given, task: str, example: str) -> str:
    """--annotations. Raises ConfigError where it is missing."""
    if given.annotations is None:
        raise ConfigError(f"--annotations is missing: {given.data_path} holds {task}'s questions only, give {example}")
    return given.annotations
