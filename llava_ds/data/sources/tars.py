"""Read WebDataset shards: tars in which members with the same key form a record. Images are read in place, as slices.

A key ends at the first dot of a name, as in WebDataset. If members with one key include several texts (img_0.5.txt and
img_0.75.txt) and each image is named after one of the texts, every text is a record, and keys end at the last dot.
"""

import json
import os
import re
import tarfile
from collections.abc import Callable, Iterator
from typing import BinaryIO, NamedTuple

from llava_ds.constants import DataError
from llava_ds.data.sources.embedded import embed, reference, rejected
from llava_ds.data.sources.options import QUESTIONS, Columns
from llava_ds.files.places import open_data

MAX_NAME_BYTES = 1 << 20  # maximum size of an extended header; usual ones have a few hundred bytes
MAX_TEXT_BYTES = 32 << 20

TEXT_SUFFIXES = ("json", "txt")
CLASS_SUFFIX = "cls"
NO_CAPTIONS = (*QUESTIONS, "system", "history")  # fields whose text alone does not make a record
IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "jp2", "avif", "jfif")
VIDEO_SUFFIXES = ("mp4", "avi", "mkv", "mov", "webm", "m4v", "mpg", "mpeg", "flv", "wmv", "ts")
MEDIA_SUFFIXES = frozenset((*IMAGE_SUFFIXES, *VIDEO_SUFFIXES))


class Member(NamedTuple):
    """A file in a tar: its name, its index (from 1), and the location of its bytes.

    key: the name up to the first dot after the last slash, shared by the members of one record; stem: the name up to
    its last dot; suffix: the rest, in lower case.
    """

    name: str
    number: int
    offset: int
    num_bytes: int
    key: str
    stem: str
    suffix: str

    @classmethod
    def of(cls, name: str, number: int, offset: int, num_bytes: int) -> "Member":
        stem, _, suffix = name.rpartition(".")
        slash = name.rfind("/") + 1
        dot = name.find(".", slash)
        return cls(name, number, offset, num_bytes, name if dot < 0 else name[:dot], stem, suffix.lower())


def read_members(file: BinaryIO, path: str) -> Iterator[Member]:
    """Yield the regular files of a tar, in order (ustar, GNU and pax names).

    Raises DataError for a compressed tar and, with the position, for a damaged tar or one without an end mark, as after
    an interrupted download.
    """
    if file.read(2) == b"\x1f\x8b":
        raise DataError(f"{path} is compressed: unpack it to a plain .tar, because images are read in place")
    size, number, offset = file.seek(0, os.SEEK_END), 0, 0
    file.seek(0)
    try:
        with tarfile.open(fileobj=file, mode="r:", tarinfo=_Header, encoding="utf-8") as archive:
            while (header := archive.next()) is not None:
                archive.members.clear()  # tarfile would keep a kilobyte per member
                _check_place(header, size, path)
                offset = archive.offset
                if header.isreg():
                    number += 1
                    yield Member.of(header.name, number, header.offset_data, header.size)
        reason = "its checksum is wrong"  # tarfile ends silently at a damaged header
    except DataError:
        raise
    except (tarfile.TarError, ValueError, RecursionError) as error:
        reason = str(error)
    file.seek(offset)
    block = file.read(tarfile.BLOCKSIZE)
    if len(block) < tarfile.BLOCKSIZE:
        raise DataError(f"{path}: the tar ends at byte {size} without its end mark: it is not whole")
    if any(block):
        raise DataError(f"{path}: no tar header at byte {offset}: {reason}")


def _check_place(header: tarfile.TarInfo, size: int, path: str) -> None:
    """Raise DataError unless a member's bytes are one slice of the tar. size: size of the tar in bytes."""
    place = header.offset_data - tarfile.BLOCKSIZE
    if header.issparse():
        raise DataError(f"{path}: the member at byte {place} is sparse: pack it without --sparse")
    if header.size < 0:
        raise DataError(f"{path}: the member at byte {place} has a negative size")
    if header.isreg() and header.offset_data + header.size > size:
        raise DataError(f"{path}: the tar ends at byte {size}, inside the member at byte {place}")


class _Header(tarfile.TarInfo):
    """tarfile's TarInfo with a limit: the original reads extended headers of any size into memory."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in b"xgXLK" and not 0 <= self.size <= MAX_NAME_BYTES:
            raise tarfile.HeaderError(f"an extended header of {self.size} bytes, at most {MAX_NAME_BYTES} are read")
        return super()._proc_member(archive)


def read_shard(path: str, columns: Columns) -> Iterator[tuple[int, str]]:
    """Yield each record's member number and text from a shard, in the order of their first members."""
    with open_data(path) as file:
        groups: dict[str, list[Member]] = {}
        for member in read_members(file, path):
            if member.key and member.key[-1] != "/":  # hidden files, such as macOS adds, have no key
                groups.setdefault(member.key, []).append(member)
        for key, members in groups.items():
            for own_key, group in records_of(key, members, columns):
                yield group[0].number, _as_text(own_key, group, columns, file, path)


def records_of(key: str, members: list[Member], columns: Columns) -> list[tuple[str, list[Member]]]:
    """Split the members with a common key into records, usually one. Returns each record's key and members."""
    stem = members[0].stem
    if all(member.stem == stem for member in members):
        return [(key if stem == key or _field_in(stem, key, columns) else stem, members)]
    texts = list(dict.fromkeys(member.stem for member in members if member.suffix in (*TEXT_SUFFIXES, CLASS_SUFFIX)))
    nested = any(_is_under(one, other) for one in texts for other in texts if one != other)
    if len(texts) < 2 or nested or all(_field_in(stem, key, columns) for stem in texts):
        return [(key, members)]
    owners = [next((text for text in texts if _is_under(member.stem, text)), None) for member in members]
    if None in owners:
        return [(key, members)]
    return [(text, [each for each, owner in zip(members, owners) if owner == text]) for text in texts]


def _is_under(stem: str, text: str) -> bool:
    return stem == text or stem.startswith(f"{text}.")


def _field_in(stem: str, key: str, columns: Columns) -> str:
    """Return the field named between a member's key and suffix, as in key.conversations.json; "" without one."""
    if stem == key:
        return ""
    inner = stem[len(key) + 1 :]
    return inner if inner in columns.known else ""


def shard_contents(path: str) -> Iterator[bytes]:
    """Yield the contents that a shard's hash covers: names, sizes and texts of members, but no pixels."""
    with open_data(path) as file:
        for member in read_members(file, path):
            yield json.dumps([member.name, member.num_bytes]).encode()
            if member.suffix in TEXT_SUFFIXES and member.num_bytes <= MAX_TEXT_BYTES:
                yield _bytes_of(member, file)


def _as_text(key: str, group: list[Member], columns: Columns, file: BinaryIO, path: str) -> str:
    texts = [member for member in group if member.suffix in TEXT_SUFFIXES]
    media = [member for member in group if member.suffix in MEDIA_SUFFIXES]
    if len(media) > 1:
        media.sort(key=_natural)
    owned = [any(_is_under(member.stem, text.stem) for text in texts) for member in media]
    if any(owned) and not all(owned):
        other = media[owned.index(False)].name
        return rejected(f"the key {key!r} has an image of another name than its text: {other!r}, not {texts[0].name!r}")
    if any(member.num_bytes > MAX_TEXT_BYTES for member in texts):
        return rejected(f"a .json or .txt member of the key {key!r} is larger than {MAX_TEXT_BYTES} bytes")
    if not texts and any(member.suffix == CLASS_SUFFIX for member in group):
        return rejected(f"the key {key!r} has a class (.cls) and no text to learn: add a .txt or .json")
    try:
        record = _record_of(key, texts, columns, file)
        record.setdefault(columns.id[0], key)
        for member in group:
            if member.suffix not in TEXT_SUFFIXES and member.suffix not in MEDIA_SUFFIXES:
                record[f".{member.suffix}"] = True  # reported as an unread key; no JSON key is named so
        videos = [member for member in media if member.suffix in VIDEO_SUFFIXES]
        resolve = _resolver(key, group, path)
        images = [member for member in media if member not in videos] if videos else media
        _name_members(record, columns.image, images, resolve)
        _name_members(record, columns.video, videos, resolve)
        return json.dumps(embed(record, columns, resolve))
    except RecursionError:
        return rejected("its .json is nested too deeply")
    except DataError as error:
        return rejected(str(error))
    except ValueError as error:
        return rejected(f"its .json or .txt can't be read: {error}")


def _record_of(key: str, texts: list[Member], columns: Columns, file: BinaryIO) -> dict:
    """Read the record from the .json and .txt members of a key. Raises DataError, and ValueError for invalid JSON or
    UTF-8."""
    fields = [_field_in(member.stem, key, columns) for member in texts]
    if len(texts) == 1:
        if texts[0].suffix == "txt" and fields[0] not in NO_CAPTIONS:
            fields = [""]  # key.output.txt alone is a caption
    elif len({field or member.suffix for member, field in zip(texts, fields)}) < len(texts):
        raise DataError(f"the key {key!r} has several .json or .txt members")
    record: dict[str, object] = {}
    caption = None
    for field, member in sorted(zip(fields, texts), key=lambda pair: bool(pair[0])):
        data = _bytes_of(member, file)
        value = json.loads(data) if member.suffix == "json" else data.decode("utf-8").strip()
        if member.suffix == "txt" and not field:
            caption = value
        elif isinstance(value, dict) and (not field or field in value):
            record.update(value)
        elif field or (isinstance(value, list) and value and all(isinstance(each, dict) for each in value)):
            record[field or columns.turns[0]] = value  # a list is the turns
        else:
            raise DataError(f"its .json is a {type(value).__name__}, expected an object or a list of turns")
    if caption is not None:
        _add_caption(record, caption, columns)
    return record


def _add_caption(record: dict, caption: str, columns: Columns) -> None:
    """Add the text of a .txt member to a record. Raises DataError if it differs from the JSON's caption."""
    if "txt" in columns.text:
        record["txt"] = caption
        return
    written = [value.strip() for name in columns.text if isinstance(value := record.get(name), str)]
    if caption in written:
        return
    if "text" in record and "text" in columns.text:
        raise DataError(
            "its .txt and the 'text' of its .json differ: take the first with --data_columns text=txt, or leave it out"
        )
    record.setdefault("text", caption)


def _natural(member: Member) -> tuple[list[object], str]:
    """Sort key for names with numbers: img2 before img10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", member.stem)], member.name


def _name_members(
    record: dict, names: tuple[str, ...], members: list[Member], resolve: Callable[[object], object]
) -> None:
    """Set a record's images to its image members, if it names no images, or the same number of them by names that the
    files had before packing."""
    for name in names:
        value = record.get(name)
        if value is None:
            continue
        values = value if isinstance(value, list) else [value]
        known = any(isinstance(each, str) and resolve(each) is not each for each in values)
        if not known and len(values) == len(members):
            record[name] = [member.name for member in members]
        return
    if members:
        record[names[0]] = [member.name for member in members]


def _resolver(key: str, group: list[Member], path: str) -> Callable[[object], object]:
    """Return a function that maps a member's name (full, without folder or without key) to a reference to its slice."""
    known: dict[str, Member] = {}
    for member in group:
        base = member.name.rpartition("/")[2]
        for name in (member.name, base, base.partition(".")[2], member.name[len(key) + 1 :]):
            known.setdefault(name, member)

    def resolve(value: object) -> object:
        if isinstance(value, str) and (member := known.get(value) or known.get(value.rpartition("/")[2])):
            return reference(path, member.offset, member.num_bytes)
        return value

    return resolve


def _bytes_of(member: Member, file: BinaryIO) -> bytes:
    file.seek(member.offset)
    return file.read(member.num_bytes)
