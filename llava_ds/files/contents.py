"""Telling whether a file is still the one that was looked at, without reading all of a large one."""

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

from typing_extensions import TypedDict

from llava_ds.files.side_files import open_regular

WHOLE_BYTES = 64 << 10  # up to which all of a file is compared, where nothing else is said
BLOCK_BYTES, NUM_BLOCKS = 4 << 10, 16  # that are compared of a larger one
READ_BYTES = 1 << 20  # at a time


class Stamp(NamedTuple):
    """A file system's record of a file. Writing to it changes one of these, whatever is restored afterwards."""

    num_bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int  # of its 64 bits the lower 63, for tables have no unsigned numbers; some file systems use all


def stamp_of(path: str | Path) -> Stamp:
    """The stamp of a file, links followed. Raises OSError."""
    stat = os.stat(path)
    return Stamp(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino & (2**63 - 1))


class FileState(TypedDict):
    """What tells a file from every other that takes its place, also where its size and time are restored."""

    stamp: list[int]
    blocks: str


def state_of(path: str | Path) -> FileState:
    """A file's stamp, and a hash of some of its blocks, for file systems that know no change times.

    Raises OSError, and DataError for what is no regular file.
    """
    return {"stamp": list(stamp_of(path)), "blocks": blocks_digest(path)}


def blocks_digest(path: str | Path, offset: int = 0, num_bytes: int = -1, whole_bytes: int = WHOLE_BYTES) -> str:
    """A hash of what a file, or a slice of one, holds: all of it up to whole_bytes, else size and NUM_BLOCKS blocks
    from its first byte to its last.

    32 hexadecimal digits. Raises OSError, and DataError for what is no regular file.
    """
    with open_regular(path) as file:
        handle = file.fileno()
        if num_bytes < 0:
            num_bytes = os.fstat(handle).st_size - offset
        digest = hashlib.sha256(num_bytes.to_bytes(8, "big"))
        if num_bytes <= whole_bytes:
            for start in range(0, num_bytes, READ_BYTES):
                digest.update(os.pread(handle, min(READ_BYTES, num_bytes - start), offset + start))
            return digest.hexdigest()[:32]
        last = num_bytes - BLOCK_BYTES
        for i in range(NUM_BLOCKS):
            digest.update(os.pread(handle, BLOCK_BYTES, offset + last * i // (NUM_BLOCKS - 1)))
        return digest.hexdigest()[:32]
