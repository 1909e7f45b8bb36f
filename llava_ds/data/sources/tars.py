"""WebDataset shards: tars whose members with the same key are one record. Images are read in place, as slices.

Headers are read by hand, not by `tarfile`: with it, indexing a shard takes 1.9 times as long (2.7 times with pax
headers), it ends silently at a damaged header, and it reads extended headers of any size into memory. The tests compare
names, offsets and sizes with tarfile's.
"""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

from llava_ds.constants import DataError
from llava_ds.data.sources.embedded import embed, reference, rejected
from llava_ds.data.sources.options import Columns
from llava_ds.files.places import open_data

BLOCK = 512
MAX_NAME_BYTES = 1 << 20  # of an extended header; real ones have a few hundred
MAX_TEXT_BYTES = 32 << 20

TEXT_SUFFIXES = ("json", "txt")
IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "jp2", "avif", "jfif")
VIDEO_SUFFIXES = ("mp4", "avi", "mkv", "mov", "webm", "m4v", "mpg", "mpeg", "flv", "wmv", "ts")


@dataclass(frozen=True)
class Member:
    """A file in a tar: its name, its number (from 1), and the place of its bytes."""

    name: str
    number: int
    offset: int
    num_bytes: int

    @property
    def key(self) -> str:
        """The name up to the first dot behind the last slash, which members of one record share."""
        folder, slash, base = self.name.rpartition("/")
        return folder + slash + base.partition(".")[0]

    @property
    def suffix(self) -> str:
        return self.name.rpartition(".")[2].lower()


def read_members(file: BinaryIO, path: str) -> Iterator[Member]:
    """The regular files of a tar, in order (ustar, GNU and pax names).

    Raises DataError for a compressed tar and, with the position, for one that is damaged or has no end mark, as after a
    download that stopped between two members.
    """
    if file.read(2) == b"\x1f\x8b":
        raise DataError(f"{path} is compressed: unpack it to a plain .tar, because images are read in place")
    size = file.seek(0, os.SEEK_END)
    offset, number, extended = 0, 0, {}
    while True:
        file.seek(offset)
        header = file.read(BLOCK)
        if len(header) < BLOCK:
            raise DataError(f"{path}: the tar ends at byte {size} without its end mark: it is not whole")
        if header == bytes(BLOCK):
            return
        num_bytes = _num_bytes(header, offset, path)
        num_bytes = extended.get("size", num_bytes)
        kind, data = header[156:157], offset + BLOCK
        if kind in (b"1", b"2", b"3", b"4", b"5", b"6"):
            num_bytes = 0  # links, devices and folders have no bytes, whatever their header says
        offset = data + -(-num_bytes // BLOCK) * BLOCK
        if data + num_bytes > size:
            raise DataError(f"{path}: the tar ends at byte {size}, inside the member at byte {data - BLOCK}")
        if kind in (b"x", b"L", b"g", b"K"):
            if num_bytes > MAX_NAME_BYTES:
                raise DataError(f"{path}: the header at byte {data - BLOCK} is larger than {MAX_NAME_BYTES} bytes")
            extended.update(_extended(kind, file.read(num_bytes), data, path))
            continue
        if kind == b"S" or extended.get("sparse"):
            raise DataError(f"{path}: the member at byte {data - BLOCK} is sparse: pack it without --sparse")
        if kind in (b"0", b"\0", b"7"):
            number += 1
            yield Member(extended.get("name") or _name(header), number, data, num_bytes)
        extended = {}


def read_shard(path: str, columns: Columns) -> Iterator[tuple[int, str]]:
    """Member number and text of every record of a shard: consecutive members with the same key."""
    with open_data(path) as file:
        group: list[Member] = []
        for member in read_members(file, path):
            if not member.key.rpartition("/")[2]:
                continue  # a hidden file, such as macOS adds
            if group and group[0].key != member.key:
                yield group[0].number, _as_text(group, columns, file, path)
                group = []
            group.append(member)
        if group:
            yield group[0].number, _as_text(group, columns, file, path)


def shard_contents(path: str) -> Iterator[bytes]:
    """The contents of a shard that its hash covers: names, sizes and texts of members, but no pixels."""
    with open_data(path) as file:
        for member in read_members(file, path):
            yield json.dumps([member.name, member.num_bytes]).encode()
            if member.suffix in TEXT_SUFFIXES and member.num_bytes <= MAX_TEXT_BYTES:
                yield _bytes_of(member, file)


def _as_text(group: list[Member], columns: Columns, file: BinaryIO, path: str) -> str:
    texts = {member.suffix: member for member in group if member.suffix in TEXT_SUFFIXES}
    if len(texts) < sum(member.suffix in TEXT_SUFFIXES for member in group):
        return rejected(f"the key {group[0].key!r} has several .json or .txt members")
    if any(member.num_bytes > MAX_TEXT_BYTES for member in texts.values()):
        return rejected(f"a .json or .txt member of the key {group[0].key!r} is larger than {MAX_TEXT_BYTES} bytes")
    record: object = {}
    try:
        if "json" in texts:
            record = json.loads(_bytes_of(texts["json"], file))
        if not isinstance(record, dict):
            return rejected(f"its .json is a {type(record).__name__}, expected an object")
        if "txt" in texts:
            for name in columns.text:
                record.pop(name, None)
            record[columns.text[0]] = _bytes_of(texts["txt"], file).decode("utf-8").strip()
        record.setdefault(columns.id[0], group[0].key)
        for names, suffixes in ((columns.image, IMAGE_SUFFIXES), (columns.video, VIDEO_SUFFIXES)):
            _name_members(record, names, [member for member in group if member.suffix in suffixes])
        return json.dumps(embed(record, columns, _resolver(group, path)))
    except RecursionError:
        return rejected("its .json is nested too deeply")
    except ValueError as error:
        return rejected(f"its .json or .txt can't be read: {error}")


def _name_members(record: dict, names: tuple[str, ...], members: list[Member]) -> None:
    """Let a record name its image members if it names none, or as many by other names, from before the packing."""
    bases = {member.name.rpartition("/")[2] for member in members}
    for name in names:
        value = record.get(name)
        if value is None:
            continue
        values = value if isinstance(value, list) else [value]
        known = any(isinstance(each, str) and each.rpartition("/")[2] in bases for each in values)
        if not known and len(values) == len(members):
            record[name] = [member.name for member in members]
        return
    if members:
        record[names[0]] = [member.name for member in members]


def _resolver(group: list[Member], path: str) -> Callable[[object], object]:
    """A function from the name of a member (in full, without folder or without key) to its slice."""
    known: dict[str, Member] = {}
    for member in group:
        base = member.name.rpartition("/")[2]
        for name in (member.name, base, base.partition(".")[2]):
            known.setdefault(name, member)

    def resolve(value: object) -> object:
        if isinstance(value, str) and (member := known.get(value) or known.get(value.rpartition("/")[2])):
            return reference(path, member.offset, member.num_bytes)
        return value

    return resolve


def _bytes_of(member: Member, file: BinaryIO) -> bytes:
    file.seek(member.offset)
    return file.read(member.num_bytes)


def _num_bytes(header: bytes, offset: int, path: str) -> int:
    try:
        stated = int(header[148:156].strip(b" \0") or b"0", 8)
        if stated != sum(header) - sum(header[148:156]) + 8 * ord(" "):
            raise ValueError("its checksum is wrong")
        if header[124] & 0x80:  # GNU's form for what octal digits can't hold
            return int.from_bytes(header[125:136], "big")
        num_bytes = int(header[124:136].strip(b" \0") or b"0", 8)
        if num_bytes < 0:
            raise ValueError("its size is negative")
        return num_bytes
    except ValueError as error:
        raise DataError(f"{path}: there is no tar header at byte {offset}: {error}") from error


def _name(header: bytes) -> str:
    name = header[:100].partition(b"\0")[0]
    prefix = header[345:500].partition(b"\0")[0] if header[257:263] == b"ustar\0" else b""
    return (prefix + b"/" + name if prefix else name).decode("utf-8", "surrogateescape")


def _extended(kind: bytes, data: bytes, offset: int, path: str) -> dict[str, object]:
    """Fields of a GNU or pax header, which are for the next member."""
    if kind == b"L":
        return {"name": data.rstrip(b"\0").decode("utf-8", "surrogateescape")}
    found: dict[str, object] = {}
    try:
        while kind == b"x" and data.strip(b"\0"):
            length = int(data[: data.index(b" ")])
            keyword, _, value = data[data.index(b" ") + 1 : length - 1].partition(b"=")
            if length < 5 or length > len(data):
                raise ValueError("a wrong length")
            if keyword == b"path":
                found["name"] = value.decode("utf-8", "surrogateescape")
            elif keyword == b"size":
                found["size"] = int(value)
            elif keyword.startswith(b"GNU.sparse"):
                found["sparse"] = True
            data = data[length:]
    except ValueError as error:
        raise DataError(f"{path}: the pax header at byte {offset} can't be read: {error}") from error
    if found.get("size", 0) < 0:
        raise DataError(f"{path}: the pax header at byte {offset} gives a negative size")
    return found
