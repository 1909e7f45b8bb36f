"""Write files completely or not at all, and flush them to the disk and hash them during writing."""

import contextlib
import errno
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from llava_ds.constants import ConfigError, DataError, in_short
from llava_ds.files.reading import open_regular, sha256

if TYPE_CHECKING:
    import torch

RUN_FOLDER = "run"  # in --output_dir
Entry = dict[str, object]  # "bytes" and "sha256" of one file

NAME_MAX = 255  # maximum length of a file's name in bytes on Linux file systems
BUFFER_BYTES = 1 << 20

REMEDIES = {
    errno.ENOSPC: "free space there, or keep fewer checkpoints with --save_total_limit",
    errno.EDQUOT: "free some of your quota there, or keep fewer checkpoints with --save_total_limit",
    errno.EROFS: "the file system is mounted read-only: mount it writable again",
    errno.EACCES: "give this user the right to write there",
    errno.EPERM: "give this user the right to write there",
    errno.ENOENT: "the folder has vanished: check that it is mounted and that nothing removes it",
    errno.EIO: "the disk reports errors: check the system's log",
}


def run_folder(output_dir: Path) -> Path:
    """Return the folder of a run's own files, such as metrics.jsonl: output_dir itself for runs of earlier versions."""
    is_earlier = any((output_dir / name).exists() for name in ("run.json", "metrics.jsonl"))
    return output_dir if is_earlier else output_dir / RUN_FOLDER


def write_whole(path: Path, content: str | Callable[[Path], object], shared: bool = False) -> None:
    """Replace a file in one rename: readers find all of the old or all of the new file, even after a kill.

    content: the text, or a function that writes the file to a path; shared: other processes may write the same file at
    the same time. Nothing is flushed to the disk. Raises OSError and the function's errors, and leaves the old file
    unchanged.
    """
    # One name for all starts of a run, so that the next start overwrites the remains of a killed one.
    mark = f".{os.getpid()}" if shared else ""
    scratch = path.with_name(f".{path.name}{mark}.tmp")
    try:
        if isinstance(content, str):
            # File names that are not UTF-8 are written as Python's escapes.
            scratch.write_text(content, encoding="utf-8", errors="backslashreplace")
        else:
            content(scratch)
        os.replace(scratch, path)
    except BaseException:
        with contextlib.suppress(OSError):  # the folder is missing, or can't be written to
            scratch.unlink()
        raise


def write_output(path: Path, content: str | Callable[[Path], object], flag: str) -> None:
    """Write a file that the user named with a flag, as write_whole does; a device or pipe is written directly.

    Raises ConfigError if that fails.
    """
    try:
        # Never rename over /dev/null, or over /dev/stdout (a link to a file).
        if path.absolute().is_relative_to("/dev") or (path.exists() and not stat.S_ISREG(path.stat().st_mode)):
            if path.is_fifo():
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))  # fails if nobody reads, instead of waiting
            if isinstance(content, str):
                path.write_text(content, encoding="utf-8", errors="backslashreplace")
            else:
                content(path)
        else:
            write_whole(path, content)
    except OSError as error:
        raise ConfigError(f"{flag} {path} can't be written ({error.strerror}): name another file") from error


def path_problem(text: str) -> str | None:
    """Explain, to follow the flag in a message, why a path is invalid for any file; None if valid."""
    if not text:
        return "is empty: name a path, or leave it out"
    if text.startswith("~") and os.path.expanduser(text) == text:
        return f"{in_short(text)}: no such user"
    try:
        os.lstat(os.path.expanduser(text))
    except FileNotFoundError:
        too_long = any(len(os.fsencode(part)) > NAME_MAX for part in Path(text).parts)
        return f"{in_short(text)}: a name in it has more than {NAME_MAX} bytes" if too_long else None
    except UnicodeEncodeError:
        return f"{in_short(text)}: a name in it has half a character, invalid in file names"
    except (OSError, ValueError) as error:  # ValueError: a null character
        if isinstance(error, PermissionError | NotADirectoryError):
            return None  # the flag's own check reports a missing file
        return f"{in_short(text)}: {getattr(error, 'strerror', None) or error}"
    return None


def utf8_problem(text: str) -> str | None:
    """Explain why libraries that open files themselves can't open this path; None if they can."""
    try:
        text.encode()
    except UnicodeEncodeError:
        why = "a name in it is not UTF-8, so safetensors, tokenizers and pyarrow can't open it: rename it"
        return f"{in_short(text)}: {why}"
    return None


def can_be_made(folder: str) -> bool:
    """True if the folder, or its nearest existing parent, can be written to.

    Tries it with a nameless file: permissions don't reveal /proc or a read-only disk.
    """
    if path_problem(folder) is not None:
        return False
    try:
        with tempfile.TemporaryFile(dir=nearest_folder(folder)):
            return True
    except OSError:
        return False


def nearest_folder(path: str | Path) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    path = Path(os.path.expanduser(path)).absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())


class HashedFile:
    """A file that torch.save can write to.

    write() never raises, because torch's C++ writer in between does not survive exceptions. close() raises the error.
    """

    def __init__(self, path: Path) -> None:
        self.error: OSError | None = None
        self._file = path.open("wb", buffering=BUFFER_BYTES)
        self._digest = hashlib.sha256()
        self._bytes = 0

    def write(self, data) -> int:
        size = memoryview(data).nbytes
        if self.error is None:
            try:
                self._file.write(data)
                self._digest.update(data)
                self._bytes += size
            except OSError as error:
                self.error = error
        return size

    def flush(self) -> None:
        """Do nothing: close() flushes once."""

    def close(self) -> Entry:
        """Flush everything to the disk. Raises the first OSError of the file."""
        try:
            if self.error is None:
                self._file.flush()
                os.fsync(self._file.fileno())
        except OSError as error:
            self.error = error
        try:
            self._file.close()
        except OSError as error:  # the rest of the buffer can't be written either
            self.error = self.error or error
        if self.error is not None:
            raise self.error
        return {"bytes": self._bytes, "sha256": self._digest.hexdigest()}


def write_file(path: Path, write: Callable[[HashedFile], object]) -> Entry:
    """Write a file by calling `write` with it, and flush it to the disk. Raises OSError."""
    file = HashedFile(path)
    try:
        write(file)
    except BaseException:
        file.error = file.error or OSError(errno.EIO, "writing it was interrupted")
        with contextlib.suppress(OSError):  # the other error is the cause
            file.close()
        raise
    return file.close()


def write_tensors(path: Path, tensors: dict[str, "torch.Tensor"]) -> None:
    """Write a safetensors file with a new file's usual permissions: safetensors makes it readable only by its owner."""
    from safetensors.torch import save_file  # imports torch: takes seconds

    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)


def flush(path: Path) -> None:
    """Flush a file or a folder's entries to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def flush_and_hash(path: Path) -> Entry:
    """Flush a file written by others to the disk, and hash it."""
    flush(path)
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def not_cached(path: Path) -> None:
    """Drop a flushed file from the page cache, so that the next read comes from the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def damage(folder: Path, name: str, entry: Entry, hashed: bool = True) -> str | None:
    """Describe how a file differs from its entry; None if it matches. hashed: read the content, not only the size."""
    try:
        if not (folder / name).resolve().is_relative_to(folder.resolve()):
            return f"{name} is a link to a place outside the checkpoint"
        with open_regular(folder / name) as file:
            size = os.fstat(file.fileno()).st_size
        if size != entry["bytes"]:
            return f"{name} has {size} bytes, not {entry['bytes']}"
        same = not hashed or sha256(folder / name) == entry["sha256"]
        return None if same else f"{name} has changed since it was saved"
    except FileNotFoundError:
        return f"{name} is missing"
    except DataError as error:
        return f"{name} can't be read ({error})"
    except OSError as error:
        return f"{name} can't be read ({error.strerror})"
    except (RuntimeError, ValueError) as error:  # a link to itself; a name that no file can have
        return f"{name[:200]!r} can't be read ({error})"


def described(path: Path | str, error: Exception) -> str:
    """Message about an error of a file, with the remedy."""
    if not isinstance(error, OSError) or error.errno is None:
        return f"{path}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    remedy = REMEDIES.get(error.errno)
    code = errno.errorcode.get(error.errno, error.errno)
    return f"{path}: {error.strerror} ({code})" + (f"; {remedy}" if remedy else "")
