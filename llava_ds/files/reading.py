"""Read files safely, even if something else changed or replaced them.

Only regular files up to a size limit are read, so a named pipe, device or folder at the path can't block the program or
exhaust memory. JSON is checked against a type before use. A stamp and a hash of some blocks identify a large file
without reading it completely.
"""

import hashlib
import io
import json
import os
import stat
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import BinaryIO, NamedTuple

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from llava_ds.constants import DataError
from llava_ds.extensions.active import store_of
from llava_ds.files.urls import is_remote

MAX_JSON_BYTES = 16 << 20  # a manifest of 4,096 ranks has 3 MB; parsed nested lists need twenty times as much memory
MAX_LINE_BYTES = 16 << 20
MAX_ROWS_BYTES = 2 << 30  # largest JSONL file; enough for a million steps

WHOLE_BYTES = 64 << 10  # files up to this size are hashed completely by blocks_digest
BLOCK_BYTES, NUM_BLOCKS = 4 << 10, 16  # size and number of the blocks hashed of a larger file
READ_BYTES = 1 << 20  # bytes per read

KINDS = {  # names of file types for messages
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: str | Path, buffering: int = -1) -> BinaryIO:
    """Open a file for reading, without waiting even if it is a pipe. buffering: as in open. Raises OSError, and
    DataError if it is not a regular file."""
    file = open(path, "rb", buffering, opener=open_without_waiting)  # noqa: SIM115 the caller's
    mode = os.fstat(file.fileno()).st_mode
    if not stat.S_ISREG(mode):
        file.close()
        raise DataError(f"it is {KINDS.get(stat.S_IFMT(mode), 'no file')}, expected a file")
    return file


def open_without_waiting(path: str, flags: int) -> int:
    """Open a file without blocking, even if it is a named pipe. For open()'s parameter `opener`."""
    return os.open(path, flags | os.O_NONBLOCK)


def why_not_regular(path: Path) -> str | None:
    """Return the reason why a path can't be used as a file; None if it is a regular file or missing."""
    try:
        open_regular(path).close()
    except FileNotFoundError:
        return "it is a broken link" if path.is_symlink() else None
    except DataError as error:
        return str(error)
    except OSError as error:
        return f"it is {error.strerror}" if path.is_dir() else error.strerror
    return None


def read_bytes(path: str | Path, max_bytes: int) -> bytes:
    """Read a regular file. Raises FileNotFoundError if missing, else DataError; its message has only the reason."""
    try:
        with open_regular(path) as file:
            content = file.read(max_bytes + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DataError(error.strerror or str(error)) from error
    if len(content) > max_bytes:
        raise DataError(f"it is larger than {max_bytes >> 20} MB")
    return content


def read_json(path: str | Path, expected: object, max_bytes: int = MAX_JSON_BYTES):
    """Read a JSON file and check it against a type (a TypedDict, dict[str, int], …) in pydantic's strict mode.

    Raises FileNotFoundError if it is missing, else DataError with only the reason: the caller adds path and remedy.
    """
    value = _parsed(read_bytes(path, max_bytes))
    if (problem := mismatch(value, expected)) is not None:
        raise DataError(problem)
    return value


def mismatch(value: object, expected: object) -> str | None:
    """Describe where a value first differs from a type, and the expected type; None if the value matches."""
    try:
        _adapter(expected).validate_python(value, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(str(part)[:80] for part in first["loc"])
        return f"{place or 'it'}: {first['msg'][:1].lower()}{first['msg'][1:]}"
    except RecursionError:
        return "it is nested too deeply"
    return None


def read_rows(path: Path, expected: object = dict) -> tuple[list[dict], list[int]]:
    """Return the rows of a JSONL file, and the numbers (from 1) of lines that are not valid JSON of type `expected`.

    A truncated last line is skipped. Raises FileNotFoundError if the file is missing, else DataError with the reason.
    """
    rows, damaged = [], []
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > MAX_ROWS_BYTES:
                raise DataError(f"it is larger than {MAX_ROWS_BYTES >> 30} GB")
            number, begins = 0, True
            while line := file.readline(MAX_LINE_BYTES):
                whole, began = line.endswith(b"\n"), begins
                number, begins = number + began, whole
                if not line.strip():
                    continue
                try:
                    row = _parsed(line) if began and (whole or len(line) < MAX_LINE_BYTES) else None
                    problem = mismatch(row, expected)
                except DataError as error:
                    row, problem = None, str(error)
                if problem is None:
                    rows.append(row)
                elif whole or len(line) == MAX_LINE_BYTES:
                    damaged.append(number)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DataError(error.strerror or str(error)) from error
    return rows, sorted(set(damaged))


def move_aside(path: Path) -> Path:
    """Rename a damaged file, to keep it when a new file is written. Returns its new path."""
    name = f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}"
    target, count = path.with_name(name), 1
    while os.path.lexists(target):
        count += 1
        target = path.with_name(f"{name}-{count}")
    return path.rename(target)


class Stamp(NamedTuple):
    """A file's size, times and inode. Writing to the file changes the stamp, even if mtime is restored afterwards."""

    num_bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int  # lower 63 of 64 bits, because the tables that store it have signed integers


def stamp_of(path: str | Path) -> Stamp:
    """Return the stamp of a file (links are followed), or of an object in a store. Raises OSError."""
    if is_remote(path):
        size, mark = store_of(path).identity_of(path)
        return Stamp(size, int(mark[:15], 16), 0, 0)
    stat = os.stat(path)
    return Stamp(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino & (2**63 - 1))


class FileState(TypedDict):
    """A file's stamp and block digest. They differ for another file at the same path, even of equal size and time."""

    stamp: list[int]
    blocks: str


def state_of(path: str | Path) -> FileState:
    """Return a file's stamp, and a hash of some blocks for file systems without change times.

    Raises OSError, and DataError if it is not a regular file.
    """
    stamp = list(stamp_of(path))
    if not is_remote(path):
        return {"stamp": stamp, "blocks": blocks_digest(path)}
    return {"stamp": stamp, "blocks": store_of(path).known_identity(path).mark}


def blocks_digest(path: str | Path, offset: int = 0, num_bytes: int = -1, whole_bytes: int = WHOLE_BYTES) -> str:
    """Hash a file, or a slice, to 32 hexadecimal digits.

    Up to whole_bytes, all content is hashed; above, the size and NUM_BLOCKS evenly spaced blocks. num_bytes: -1 for the
    rest of the file. Raises OSError, and DataError if it is not a regular file.
    """
    if is_remote(path):
        with store_of(path).RemoteFile(path, offset, num_bytes) as file:
            return _digest(file.read_at, file.num_bytes, whole_bytes)
    with open_regular(path, buffering=0) as file:
        handle = file.fileno()
        if num_bytes < 0:
            num_bytes = os.fstat(handle).st_size - offset
        return _digest(lambda count, start: os.pread(handle, count, offset + start), num_bytes, whole_bytes)


def _digest(read_at: Callable[[int, int], bytes], num_bytes: int, whole_bytes: int) -> str:
    """Implement blocks_digest. read_at: function that returns `count` bytes from `start`."""
    digest = hashlib.sha256(num_bytes.to_bytes(8, "big"))
    if num_bytes <= whole_bytes:
        for start in range(0, num_bytes, READ_BYTES):
            digest.update(read_at(min(READ_BYTES, num_bytes - start), start))
        return digest.hexdigest()[:32]
    last = num_bytes - BLOCK_BYTES
    for i in range(NUM_BLOCKS):
        digest.update(read_at(BLOCK_BYTES, last * i // (NUM_BLOCKS - 1)))
    return digest.hexdigest()[:32]


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal. Raises OSError, and DataError if it is not a regular file."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _parsed(content: bytes) -> object:
    try:
        return json.loads(content)
    except UnicodeDecodeError as error:
        raise DataError(f"it is not UTF-8 (byte {error.start})") from error
    except RecursionError as error:
        raise DataError("it is nested too deeply") from error
    except ValueError as error:
        raise DataError(f"it is no JSON ({error})" if content.strip() else "it is empty") from error


@cache
def _adapter(expected: object) -> TypeAdapter:
    return TypeAdapter(expected)


class SizedFile(io.RawIOBase):
    """Base class of seekable files with a known size. Subclasses implement readinto() that reads from self._at."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.num_bytes, self._at = num_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.num_bytes}[whence]
        self._at = max(0, start + offset)
        return self._at
