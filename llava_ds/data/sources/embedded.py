"""Extract images embedded in records to a spool, once, so that records stay small.

A spool is a folder with two files: all images of a source, and its records as lines of JSON, in which a reference
(file, offset, size) replaces each image. Only references written by readers are trusted: `embed` removes references
in a record, and to_sample accepts no file other than the spool.
"""

import base64
import binascii
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from llava_ds.constants import DataError
from llava_ds.data.cache import cache_scratch, put_in_place
from llava_ds.data.file_slices import write_errors
from llava_ds.data.sources.options import Columns
from llava_ds.data.sources.turn_lists import as_turns, is_turn_list, loose_turns

REFERENCE = "llava_ds_file"  # key of a reference: its value has a file, offset and num_bytes
REJECTED = "llava_ds_rejected"  # key of the reason, in the object that replaces a record rejected by its reader
IMAGES, RECORDS = "pictures.bin", "records.jsonl"
PART_KEYS = ("image", "image_url", "path", "url", "video", "video_url")
_OWN_KEYS = (REFERENCE, "offset", "num_bytes")  # keys of references, not allowed in records

Row = tuple[int, int, str]  # index of the file, line, the record's text


def reference(path: str, offset: int, num_bytes: int) -> dict[str, object]:
    """Build a reference to the bytes of an image."""
    return {REFERENCE: path, "offset": offset, "num_bytes": num_bytes}


def embed(record: dict, columns: Columns, convert: Callable[[object], object]) -> dict:
    """Apply `convert` to all values of a record's image and video fields, in place.

    Conversations in JSON text or in objects of lists become lists of turns, so that all their parts are converted.
    """
    for name in (*columns.image, *columns.video):
        if record.get(name) is not None:
            record[name] = _converted(record[name], convert)
    for name in columns.spoken.intersection(record):
        value = record[name]
        if value is not None and name in columns.turn_lists and not is_turn_list(value):
            value = record[name] = _turns_in(value, name)
        elif isinstance(value, (str, dict)):
            value = record[name] = loose_turns(value)
        for turn in value if isinstance(value, list) else [value]:
            if isinstance(turn, dict):
                if "type" in turn:
                    _embed_parts([turn], convert)  # the value is a part itself
                for parts in turn.values():
                    if isinstance(parts, list):
                        _embed_parts(parts, convert)
    return record


def _turns_in(value: object, name: str) -> object:
    try:
        return as_turns(value, name)
    except DataError:
        return value  # to_sample gives the reason


def _embed_parts(parts: list, convert: Callable[[object], object]) -> None:
    for part in parts:
        for key in PART_KEYS if isinstance(part, dict) else ():
            if part.get(key) is not None:
                part[key] = _converted(part[key], convert)


def _converted(value: object, convert: Callable[[object], object], depth: int = 0) -> object:
    if isinstance(value, list) and depth < 2:  # a list of videos, each a list of frames
        return [_converted(each, convert, depth + 1) for each in value]
    if not isinstance(value, dict):
        return convert(value)
    rest = {key: each for key, each in value.items() if key not in (*_OWN_KEYS, "bytes", *PART_KEYS)}
    rest = {key: each for key, each in rest.items() if each is not None}
    if value.get("bytes") is not None:
        file = convert(value["bytes"])
        return {**rest, "path": file} if rest else file
    named = {key: _converted(value[key], convert) for key in PART_KEYS if key != "path" and value.get(key) is not None}
    return {**rest, **named, **({"path": value["path"]} if isinstance(value.get("path"), str) else {})}


def rejected(reason: str) -> str:
    """Build the text that replaces a record rejected by its reader."""
    return json.dumps({REJECTED: reason})


class ImageStore:
    """Appends images to a file."""

    def __init__(self, file: BinaryIO, final_path: str) -> None:
        self.file, self.final_path, self.num_bytes = file, final_path, 0

    def add(self, data: bytes) -> dict[str, object]:
        """Append the bytes and return a reference to them."""
        with write_errors(os.path.dirname(self.final_path), "the images inside the data"):
            self.file.write(data)
        self.num_bytes += len(data)
        return reference(self.final_path, self.num_bytes - len(data), len(data))

    def embed(self, value: object) -> object:
        """Append bytes or a data URI and return a reference; other values are returned unchanged."""
        if isinstance(value, (bytes, bytearray)):
            return self.add(value)
        if isinstance(value, str) and value.startswith("data:image"):
            head, _, data = value.partition(",")
            if head.endswith(";base64"):
                try:
                    return self.add(base64.b64decode(data, validate=True))
                except (binascii.Error, ValueError):
                    pass  # to_sample rejects the data URI with a reason
        return value


def spooled(folder: str, rows: Callable[[ImageStore], Iterator[Row]]) -> Iterator[Row]:
    """Yield rows from a spool. Writes the spool first if it is incomplete.

    The folder is published by one rename, so any number of processes may do this at once. Raises ConfigError if it
    can't be written, and the errors of `rows`.
    """
    final = Path(folder)
    if not _is_whole(final):
        with write_errors(final, "the images inside the data"), cache_scratch(final) as scratch:
            _spool(scratch, final, rows)
            if not put_in_place(scratch, final) and not _is_whole(final):
                for name in (IMAGES, RECORDS):  # some of its files were deleted
                    os.replace(scratch / name, final / name)
    with open(final / RECORDS, "rb") as records:
        for row in records:
            number, line, text = row.decode("utf-8", "surrogateescape").rstrip("\n").split(" ", 2)
            yield int(number), int(line), text


def _spool(scratch: Path, final: Path, rows: Callable[[ImageStore], Iterator[Row]]) -> None:
    with open(scratch / IMAGES, "wb") as blob, open(scratch / RECORDS, "wb") as records:
        for number, line, text in rows(ImageStore(blob, str(final / IMAGES))):
            records.write(f"{number} {line} {text}\n".encode("utf-8", "surrogateescape"))
        for file in (blob, records):
            file.flush()
            os.fsync(file.fileno())


def _is_whole(folder: Path) -> bool:
    return all((folder / name).is_file() for name in (IMAGES, RECORDS))
