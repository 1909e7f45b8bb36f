"""Write files completely or not at all, flush them to the disk, and hash them while writing."""

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

RUN_FOLDER = "run"  # name of a run's folder for its own files in --output_dir
Entry = dict[str, object]  # size ("bytes") and "sha256" of one file

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
    """Return the folder of a run's own files, such as metrics.jsonl. Earlier versions wrote them to output_dir."""
    is_earlier = any((output_dir / name).exists() for name in ("run.json", "metrics.jsonl"))
    return output_dir if is_earlier else output_dir / RUN_FOLDER


def write_whole(path: Path, content: str | Callable[[Path], object], shared: bool = False) -> None:
    """Replace a file in one rename, so that readers never find a partly written file, even after a kill.

    content: text, or a function that writes the file to a path; shared: True if other processes may write the same file
    at the same time. Nothing is flushed to the disk. On OSError, or an error of the function, the old file is
    unchanged.
    """
    # The name is the same at every start, so a start overwrites the temporary file of a killed one.
    mark = f".{os.getpid()}" if shared else ""
    scratch = path.with_name(f".{path.name}{mark}.tmp")
    try:
        if isinstance(content, str):
            # File names in the text that are not UTF-8 are written as Python's escapes.
            scratch.write_text(content, encoding="utf-8", errors="backslashreplace")
        else:
            content(scratch)
        os.replace(scratch, path)
    except BaseException:
        with contextlib.suppress(OSError):  # the folder is missing, or can't be written to
            scratch.unlink()
        raise


def write_output(path: Path, content: str | Callable[[Path], object], flag: str) -> None:
    """Write a file that a flag names, like write_whole; write a device or pipe directly. flag: its name for messages.

    Raises ConfigError if the file can't be written.
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
    """Return why a path can't name any file, as text that follows the flag in a message; None if it is valid."""
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
            return None  # the code that opens the file reports it
        return f"{in_short(text)}: {getattr(error, 'strerror', None) or error}"
    return None


def utf8_problem(text: str) -> str | None:
    """Return why safetensors, tokenizers and pyarrow can't open this path (it is not UTF-8); None if they can."""
    try:
        text.encode()
    except UnicodeEncodeError:
        why = "a name in it is not UTF-8, so safetensors, tokenizers and pyarrow can't open it: rename it"
        return f"{in_short(text)}: {why}"
    return None


def can_be_made(folder: str) -> bool:
    """Return True if the folder, or its nearest existing parent, can be written to.

    It creates an unnamed file there, because permissions don't reveal /proc or a read-only disk.
    """
    if path_problem(folder) is not None:
        return False
    try:
        with tempfile.TemporaryFile(dir=nearest_folder(folder)):
            return True
    except OSError:
        return False


def nearest_folder(path: str | Path) -> Path:
    """Return the folder if it exists, else its nearest existing parent."""
    path = Path(os.path.expanduser(path)).absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())


class HashedFile:
    """A file that torch.save can write to, and that is hashed while it is written.

    write() never raises, because torch's C++ writer can't handle exceptions; close() raises the first error.
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
        """Do nothing, because close() flushes the file."""

    def close(self) -> Entry:
        """Flush the file to the disk, close it, and return its size and hash. Raises the first OSError of any write."""
        try:
            if self.error is None:
                self._file.flush()
                os.fsync(self._file.fileno())
        except OSError as error:
            self.error = error
        try:
            self._file.close()
        except OSError as error:  # writing the rest of the buffer failed
            self.error = self.error or error
        if self.error is not None:
            raise self.error
        return {"bytes": self._bytes, "sha256": self._digest.hexdigest()}


def write_file(path: Path, write: Callable[[HashedFile], object]) -> Entry:
    """Open a file, call `write` with it, and flush it to the disk. Returns its size and hash. Raises OSError."""
    file = HashedFile(path)
    try:
        write(file)
    except BaseException:
        file.error = file.error or OSError(errno.EIO, "writing it was interrupted")
        with contextlib.suppress(OSError):  # the original error is raised below
            file.close()
        raise
    return file.close()


def write_tensors(path: Path, tensors: dict[str, "torch.Tensor"]) -> None:
    """Write a safetensors file with the usual permissions; safetensors alone makes it readable only by its owner."""
    from safetensors.torch import save_file  # imports torch: takes seconds

    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)


def flush(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def flush_and_hash(path: Path) -> Entry:
    """Flush an existing file to the disk. Returns its size and hash."""
    flush(path)
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def not_cached(path: Path) -> None:
    """Drop a flushed file from the page cache, so that the next read comes from the disk itself."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def damage(folder: Path, name: str, entry: Entry, hashed: bool = True) -> str | None:
    """Describe how a file differs from its entry; None if it matches. hashed: False to compare only the size."""
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
    """Return a message about a file's error, with a remedy if there is one."""
    if not isinstance(error, OSError) or error.errno is None:
        return f"{path}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    remedy = REMEDIES.get(error.errno)
    code = errno.errorcode.get(error.errno, error.errno)
    return f"{path}: {error.strerror} ({code})" + (f"; {remedy}" if remedy else "")
