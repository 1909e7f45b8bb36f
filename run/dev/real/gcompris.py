"""GCompris's images: drawings and photographs. File names are the names of the things in them.

GCompris keeps them in Qt's binary resources (rcc): a tree of names, with data that may be compressed by zlib.
"""

import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

ACTIVITIES = (
    "babymatch", "categorization", "explore_farm_animals", "explore_world_animals", "instruments", "lang", "memory",
)  # fmt: skip
_HEADER = ">4sIIII"  # magic, version, and the offsets of tree, data and names
_COMPRESSED, _FOLDER, _ZSTD = 1, 2, 4  # flags of an entry


def read_images(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield path and content of each image of the activities that show named things."""
    for activity in ACTIVITIES:
        for path, content in read_resources(folder / f"{activity}.rcc"):
            if re.search(r"/resource/.*\.(webp|png|jpg|svg)$", path) and not re.search(r"background|-bg", path):
                yield f"{activity}/{path.partition('/resource/')[2]}", content


def read_resources(file: Path) -> Iterator[tuple[str, bytes]]:
    """Yield path and content of each file in a Qt resource. Raises ValueError for another format."""
    stored = file.read_bytes()
    magic, version, tree, data, names = struct.unpack_from(_HEADER, stored)
    if magic != b"qres":
        raise ValueError(f"{file}: not a Qt resource: it begins with {magic!r}, expected b'qres'")
    size = 22 if version >= 2 else 14  # bytes of an entry

    def entries(index: int, folder: str) -> Iterator[tuple[str, bytes]]:
        name_at, flags = struct.unpack_from(">IH", stored, tree + index * size)
        count, first = struct.unpack_from(">II", stored, tree + index * size + 6)
        path = f"{folder}/{_name(stored, names + name_at)}" if index else ""
        if flags & _FOLDER:
            for child in range(first, first + count):
                yield from entries(child, path)
            return
        (start,) = struct.unpack_from(">I", stored, tree + index * size + 10)
        (length,) = struct.unpack_from(">I", stored, data + start)
        content = stored[data + start + 4 : data + start + 4 + length]
        if flags & _ZSTD:
            raise ValueError(f"{file}: {path} is compressed by zstd: only zlib is supported")
        yield path, zlib.decompress(content[4:]) if flags & _COMPRESSED else content

    return entries(0, "")


def _name(stored: bytes, at: int) -> str:
    (length,) = struct.unpack_from(">H", stored, at)
    return stored[at + 6 : at + 6 + 2 * length].decode("utf-16-be")
