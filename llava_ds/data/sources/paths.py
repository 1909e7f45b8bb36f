"""Names of pictures and videos to files that lie inside the folder they may be taken from."""

import errno
import functools
import os
import reprlib
import stat
import urllib.parse
from pathlib import Path

from llava_ds.constants import DataError, FileProblem
from llava_ds.files.reading import KINDS

MAX_PATH_BYTES = 4096  # Linux's own limit; a longer name is not worth asking the system, nor keeping

_REPR = reprlib.Repr()
_REPR.maxstring, _REPR.maxother, _REPR.maxlevel, _REPR.maxlist, _REPR.maxdict = 120, 120, 3, 4, 4


def short(value: object) -> str:
    """A value for an error message: bounded, printable and made without walking all of it."""
    return _REPR.repr(value)


def find_file(name: str, root: str | None, what: str = "picture", flag: str = "--image_folder") -> str:
    """The real path of the file that a record names.

    root: the real path of the folder that it is relative to, and that it has to lie in once links are resolved.
    One system call for a file whose folder was met before; nothing is opened. Raises DataError with the reason.
    """
    folder_name = flag.removeprefix("--").replace("_", " ")
    if name.startswith(("http://", "https://", "ftp://")):
        raise DataError(f"names the {what} {short(name)}, a remote URL, which is never fetched: download it first")
    if name.startswith("data:"):
        raise DataError(f"has {short(name)} for a {what}, expected a path (data:image/…;base64 is read as a picture)")
    if name.startswith("file://"):
        name = urllib.parse.unquote(name[len("file://") :])
    if root is None:
        raise DataError(f"names the {what} {short(name)}: give {flag}")
    try:
        if not name or len(name.encode()) > MAX_PATH_BYTES:
            raise ValueError("it is empty" if not name else f"it is longer than {MAX_PATH_BYTES} bytes")
        parent, base = os.path.split(os.path.join(root, name))
        if base in ("", ".", ".."):
            parent, base = os.path.split(os.path.realpath(os.path.join(root, name)))
        folder = _folder_inside(parent, root)
        path = None if folder is None else os.path.join(folder, base)
        mode = None if path is None else os.lstat(path).st_mode
        if mode is not None and stat.S_ISLNK(mode):
            path = os.path.realpath(path)
            path = path if _folder_inside(os.path.dirname(path), root) is not None else None
            mode = None if path is None else os.stat(path).st_mode
    except ValueError as error:
        raise DataError(f"names the {what} {short(name)}, which no file can be called: {error}") from error
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise FileProblem(f"names the {what} {short(name)}, but there is no file {short(path)}") from error
        raise FileProblem(f"names the {what} {short(name)}, which can't be read: {error.strerror}") from error
    if path is None:
        raise FileProblem(f"names the {what} {short(name)}, which lies outside the {folder_name} {root}")
    if not stat.S_ISREG(mode):
        found = KINDS.get(stat.S_IFMT(mode), "no file")
        raise FileProblem(f"names the {what} {short(name)}, but there is no file {short(path)}: it is {found}")
    return path


@functools.lru_cache(maxsize=8192)
def _folder_inside(folder: str, root: str) -> str | None:
    """The real path of a folder, None when it lies outside. Asked for every file, but there are few folders."""
    real = os.path.realpath(folder)
    return real if Path(real).is_relative_to(root) else None
