"""Files that are there whole or not at all."""

import contextlib
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from llava_ds.constants import ConfigError, in_short

NAME_MAX = 255  # bytes of a file's name on Linux' file systems


def write_whole(path: Path, content: str | Callable[[Path], object], shared: bool = False) -> None:
    """Write a file anew, in one rename: whoever reads it, after a kill too, finds all of the old one or of the new one.

    content: its text, or what writes it to a path that it is given; shared: whether other processes may write the same
    file at the same time. Nothing is flushed to the disk. Raises OSError and what content raises, with the old file as
    it was.
    """
    # One name for all starts of a run, so that the next overwrites what a kill has left.
    mark = f".{os.getpid()}" if shared else ""
    scratch = path.with_name(f".{path.name}{mark}.tmp")
    try:
        if isinstance(content, str):
            scratch.write_text(content, encoding="utf-8")
        else:
            content(scratch)
        os.replace(scratch, path)
    except BaseException:
        with contextlib.suppress(OSError):  # of a folder that is not there, or can't be written to
            scratch.unlink()
        raise


def write_output(path: Path, content: str | Callable[[Path], object], flag: str) -> None:
    """Write a file that the user named with a flag, as write_whole does; a device or pipe directly.

    Raises ConfigError where that fails.
    """
    try:
        # Nothing may be renamed over /dev/null, or over /dev/stdout, which is a link to a file.
        if path.absolute().is_relative_to("/dev") or (path.exists() and not stat.S_ISREG(path.stat().st_mode)):
            if path.is_fifo():
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))  # fails where nobody reads, instead of waiting
            if isinstance(content, str):
                path.write_text(content, encoding="utf-8")
            else:
                content(path)
        else:
            write_whole(path, content)
    except OSError as error:
        raise ConfigError(f"{flag} {path} can't be written ({error.strerror}): name another file") from error


def path_problem(text: str) -> str | None:
    """A reason why no file can have this path, or None: to follow the flag in a message."""
    if not text:
        return "is empty: name a path, or leave it out"
    if text.startswith("~") and os.path.expanduser(text) == text:
        return f"{in_short(text)}: there is no such user"
    try:
        os.lstat(os.path.expanduser(text))
    except FileNotFoundError:
        too_long = any(len(os.fsencode(part)) > NAME_MAX for part in Path(text).parts)
        return f"{in_short(text)}: a name in it has more than {NAME_MAX} bytes" if too_long else None
    except (OSError, ValueError) as error:  # ValueError: a null character
        if isinstance(error, PermissionError | NotADirectoryError):
            return None  # the flag's own check says what it needs
        return f"{in_short(text)}: {getattr(error, 'strerror', None) or error}"
    return None


def can_be_made(folder: str) -> bool:
    """True if the folder, or the nearest one above it that exists, is a folder that may be written to: a nameless file
    is made in it, for the rights say nothing of /proc or of a disk that is read-only."""
    if path_problem(folder) is not None:
        return False
    path = Path(os.path.expanduser(folder)).absolute()
    try:
        while not path.exists():
            path = path.parent
        with tempfile.TemporaryFile(dir=path):
            return True
    except OSError:
        return False
