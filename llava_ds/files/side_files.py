"""Small files beside data, weights and checkpoints, read safely whoever has touched them since they were written.

Only regular files of a bounded size are opened, so that no named pipe, device or folder in their place makes a program
wait, or take all memory; and what they hold is compared with a type before anybody uses it.
"""

import json
import os
import stat
import time
from functools import cache
from pathlib import Path
from typing import BinaryIO

from pydantic import TypeAdapter, ValidationError

from llava_ds.constants import DataError

MAX_JSON_BYTES = 16 << 20  # a manifest of 4,096 ranks has 3 MB; read, nested lists take twenty times their text
MAX_LINE_BYTES = 16 << 20
MAX_ROWS_BYTES = 2 << 30  # of a JSONL file: more than a million steps

KINDS = {  # of what is no regular file
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: str | Path) -> BinaryIO:
    """Open a file for reading. Raises OSError, and DataError where it is no regular file; never waits for a writer."""
    file = open(path, "rb", opener=_open_without_waiting)  # noqa: SIM115 the caller's; a folder raises here
    mode = os.fstat(file.fileno()).st_mode
    if not stat.S_ISREG(mode):
        file.close()
        raise DataError(f"it is {KINDS.get(stat.S_IFMT(mode), 'no file')}, expected a file")
    return file


def why_not_regular(path: Path) -> str | None:
    """Why a path can't be read or replaced as a file; None for a regular file and where there is nothing."""
    try:
        open_regular(path).close()
    except FileNotFoundError:
        return "it is a link that leads nowhere" if path.is_symlink() else None
    except DataError as error:
        return str(error)
    except OSError as error:
        return f"it is {error.strerror}" if path.is_dir() else error.strerror
    return None


def read_bytes(path: str | Path, max_bytes: int) -> bytes:
    """All of a regular file. Raises FileNotFoundError, and DataError with the reason alone for all else."""
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
    """Read a JSON file and compare it with a type (a TypedDict, dict[str, int], …) in pydantic's strict mode.

    Raises FileNotFoundError, and DataError with the reason alone: the caller says which file, and what to do.
    """
    value = _parsed(read_bytes(path, max_bytes))
    if (problem := mismatch(value, expected)) is not None:
        raise DataError(problem)
    return value


def mismatch(value: object, expected: object) -> str | None:
    """Say where a value is first not of a type, and what was expected there; None where it is of it."""
    try:
        _adapter(expected).validate_python(value, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(str(part)[:80] for part in first["loc"])
        said = first["msg"][:1].lower() + first["msg"][1:]
        return f"{place or 'it'}: {said}"
    except RecursionError:
        return "it is nested too deeply"
    return None


def read_rows(path: Path, expected: object = dict) -> tuple[list[dict], list[int]]:
    """The rows of a JSONL file, and the numbers (from 1) of lines that hold none: no UTF-8, no JSON, another type.

    A last line that a kill cut short counts as neither. Raises FileNotFoundError, and DataError with the reason alone.
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
    """Rename what can't be used, so that a sound one can take its place and nothing is lost. Returns its new path."""
    name = f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}"
    target, count = path.with_name(name), 1
    while os.path.lexists(target):
        count += 1
        target = path.with_name(f"{name}-{count}")
    return path.rename(target)


def _parsed(content: bytes) -> object:
    try:
        return json.loads(content)
    except UnicodeDecodeError as error:
        raise DataError(f"it is no UTF-8 (byte {error.start})") from error
    except RecursionError as error:
        raise DataError("it is nested too deeply") from error
    except ValueError as error:
        raise DataError(f"it is no JSON ({error})" if content.strip() else "it is empty") from error


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


@cache
def _adapter(expected: object) -> TypeAdapter:
    return TypeAdapter(expected)
