"""Images that come inside the records: spooled once to a file, so that the records themselves stay small.

A spool is a folder with all images of a source end to end and its records as lines of JSON, where each image is an
object that says where its bytes lie. Such an object counts only when a reader wrote it: wherever a record could bring
one of its own, `embed` takes it out, and to_sample allows no file but the spool's.
"""

import base64
import binascii
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from llava_ds.data.cache import put_in_place, scratch_beside
from llava_ds.data.file_slices import write_errors
from llava_ds.data.sources.options import Columns

REFERENCE = "llava_ds_file"  # key of an object in an image's place: a file, offset and num_bytes
REJECTED = "llava_ds_rejected"  # key of an object in a record's place: why its reader could make nothing of it
IMAGES, RECORDS = "pictures.bin", "records.jsonl"
PART_KEYS = ("image", "image_url", "path", "url", "video", "video_url")

Row = tuple[int, int, str]  # number of the file, line, the record's text


def reference(path: str, offset: int, num_bytes: int) -> dict[str, object]:
    """What stands in a record for the bytes of an image."""
    return {REFERENCE: path, "offset": offset, "num_bytes": num_bytes}


def embed(record: dict, columns: Columns, convert: Callable[[object], object]) -> dict:
    """The record with every value in an image's or video's place passed through `convert`, in place."""
    for name in (*columns.image, *columns.video):
        if record.get(name) is not None:
            record[name] = _converted(record[name], convert)
    for name in columns.turns:
        turns = record.get(name)
        for turn in turns if isinstance(turns, list) else ():
            for parts in turn.values() if isinstance(turn, dict) else ():
                for part in parts if isinstance(parts, list) else ():
                    for key in PART_KEYS if isinstance(part, dict) else ():
                        if part.get(key) is not None:
                            part[key] = _converted(part[key], convert)
    return record


def _converted(value: object, convert: Callable[[object], object], depth: int = 0) -> object:
    if isinstance(value, list) and depth < 2:  # a list of videos, each a list of frames
        return [_converted(each, convert, depth + 1) for each in value]
    if not isinstance(value, dict):
        return convert(value)
    if value.get("bytes") is not None:
        return convert(value["bytes"])
    if isinstance(value.get("url"), str):
        return convert(value["url"])
    return {"path": value["path"]} if isinstance(value.get("path"), str) else {}


def rejected(reason: str) -> str:
    """The text of a record that its reader could make nothing of."""
    return json.dumps({REJECTED: reason})


class ImageStore:
    """Takes the bytes of images, one after the other."""

    def __init__(self, file: BinaryIO, final_path: str) -> None:
        self.file, self.final_path, self.num_bytes = file, final_path, 0

    def add(self, data: bytes) -> dict[str, object]:
        """Keep the bytes and return what stands for them."""
        with write_errors(os.path.dirname(self.final_path), "the images inside the data"):
            self.file.write(data)
        self.num_bytes += len(data)
        return reference(self.final_path, self.num_bytes - len(data), len(data))

    def keep(self, value: object) -> object:
        """Bytes, or a data URI, to what stands for it; anything else as it is."""
        if isinstance(value, (bytes, bytearray)):
            return self.add(value)
        if isinstance(value, str) and value.startswith("data:image"):
            head, _, data = value.partition(",")
            if head.endswith(";base64"):
                try:
                    return self.add(base64.b64decode(data, validate=True))
                except (binascii.Error, ValueError):
                    pass  # stays a data URI, which to_sample names in its reason
        return value


def spooled(folder: str, rows: Callable[[ImageStore], Iterator[Row]]) -> Iterator[Row]:
    """The rows, with the images that they gave to the store in a file; made once, then read from the folder.

    The folder appears in one rename, so any number of processes may do this at once. Raises ConfigError when it
    can't be written, and what `rows` raises.
    """
    final = Path(folder)
    if not _is_whole(final):
        with write_errors(final, "the images inside the data"), scratch_beside(final) as scratch:
            _spool(scratch, final, rows)
            if not put_in_place(scratch, final) and not _is_whole(final):
                for name in (IMAGES, RECORDS):  # part of it was deleted
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
