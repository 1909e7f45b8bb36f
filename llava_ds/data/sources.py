"""Records on disk to samples. Nothing is trusted: shape, types and paths are checked before anything is built."""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from llava_ds.constants import IMAGE_TOKEN, DataError
from llava_ds.data.sample import Message

MAX_SHOWN = 5  # problems spelled out in one message; the rest are counted


@dataclass(frozen=True)
class Sample:
    """One record: its conversation, and the pictures as paths that lie inside the image folder."""

    id: str
    messages: tuple[Message, ...]
    images: tuple[str, ...]
    kind: str = ""  # of question, in files to evaluate on


def read_samples(path: str | Path, image_folder: str | Path | None) -> list[Sample]:
    """All samples of a LLaVA-format JSON file, in its order.

    Raises DataError, which names the file, the first records that are wrong and what was expected of them.
    """
    try:
        records = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{path} can't be read as JSON: {error}") from error
    if not isinstance(records, list) or not records:
        found = "an empty list" if records == [] else f"a {type(records).__name__}"
        raise DataError(
            f"{path} holds {found}, expected LLaVA's format: a JSON list of records like "
            '{"id": "1", "image": "a.jpg", "conversations": [{"from": "human", "value": "<image>\\nWhat is it?"}, '
            '{"from": "gpt", "value": "A cat."}]}'
        )
    root = None if image_folder is None else os.path.realpath(image_folder)
    samples, problems = [], []
    for index, record in enumerate(records):
        try:
            samples.append(_to_sample(record, index, root))
        except DataError as error:
            problems.append(f"record {index}: {error}")
    if problems:
        raise DataError(f"{path}: {len(problems)} of {len(records)} records can't be used\n" + shown(problems))
    return samples


def shown(problems: Iterable[str]) -> str:
    """The first problems, a line each, and how many more there are."""
    problems = list(problems)
    lines = [f"  {problem}" for problem in problems[:MAX_SHOWN]]
    if len(problems) > MAX_SHOWN:
        lines.append(f"  and {len(problems) - MAX_SHOWN} more")
    return "\n".join(lines)


def _to_sample(record: object, index: int, image_root: str | None) -> Sample:
    if not isinstance(record, dict):
        raise DataError(f"is a {type(record).__name__}, expected an object with 'conversations'")
    turns = record.get("conversations")
    if not isinstance(turns, list) or not turns:
        keys = ", ".join(map(repr, record)) or "none"
        raise DataError(f"has no list under 'conversations' (its keys: {keys})")
    messages = tuple(_to_message(turn, i) for i, turn in enumerate(turns))
    images = record.get("image", [])
    images = [images] if isinstance(images, str) else images
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise DataError(f"has {record['image']!r} under 'image', expected a path or a list of paths")
    marks = sum(message.text.count(IMAGE_TOKEN) for message in messages)
    if marks != len(images):
        raise DataError(f"names {len(images)} pictures under 'image', but its text has {marks} {IMAGE_TOKEN} marks")
    paths = tuple(_inside(image, image_root) for image in images)
    return Sample(str(record.get("id", index)), messages, paths, str(record.get("kind", "")))


def _to_message(turn: object, i: int) -> Message:
    if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
        raise DataError(f"turn {i} is {str(turn)[:80]!r}, expected {{'from': 'human' or 'gpt', 'value': text}}")
    if turn.get("from") not in ("human", "gpt"):
        raise DataError(f"turn {i} is from {turn.get('from')!r}, expected 'human' or 'gpt'")
    try:
        turn["value"].encode()
    except UnicodeEncodeError as error:
        raise DataError(f"turn {i} is not valid Unicode: {error}") from error
    return Message(turn["from"], turn["value"])


def _inside(image: str, root: str | None) -> str:
    """The real path of a picture. It has to exist and, links resolved, to lie inside the image folder."""
    if root is None:
        raise DataError(f"names the picture {image!r}: give --image_folder")
    try:
        path = Path(os.path.realpath(os.path.join(root, image)))
    except ValueError as error:
        raise DataError(f"names the picture {image!r}, which no file can be called: {error}") from error
    if not path.is_relative_to(root):
        raise DataError(f"names the picture {image!r}, which lies outside the image folder {root}")
    if not path.is_file():
        raise DataError(f"names the picture {image!r}, but there is no file {path}")
    return str(path)
