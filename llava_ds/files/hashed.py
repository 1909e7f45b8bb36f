"""Files that are flushed to the disk and hashed while they are written."""

import contextlib
import errno
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from llava_ds.constants import DataError
from llava_ds.files.side_files import open_regular

Entry = dict[str, object]  # of one file: its "bytes" and its "sha256"

BLOCK_BYTES = 1 << 20

REMEDIES = {
    errno.ENOSPC: "free space there, or keep fewer checkpoints with --save_total_limit",
    errno.EDQUOT: "free some of your quota there, or keep fewer checkpoints with --save_total_limit",
    errno.EROFS: "the file system is mounted read-only: mount it writable again",
    errno.EACCES: "give this user the right to write there",
    errno.EPERM: "give this user the right to write there",
    errno.ENOENT: "the folder has vanished: see that it is mounted and that nothing removes it",
    errno.EIO: "the disk reports errors: look into the system's log",
}


class HashedFile:
    """A file that torch.save can write to.

    It never raises while it is written: torch's C++ writer stands between, and does not survive it well. What went
    wrong is raised by close.
    """

    def __init__(self, path: Path) -> None:
        self.error: OSError | None = None
        self._file = path.open("wb", buffering=BLOCK_BYTES)
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
        """Nothing: close does it once, for all."""

    def close(self) -> Entry:
        """Bring all of it to the disk. Raises the first OSError that the file met."""
        try:
            if self.error is None:
                self._file.flush()
                os.fsync(self._file.fileno())
        except OSError as error:
            self.error = error
        try:
            self._file.close()
        except OSError as error:  # what is left in the buffer can't be written either
            self.error = self.error or error
        if self.error is not None:
            raise self.error
        return {"bytes": self._bytes, "sha256": self._digest.hexdigest()}


def write_file(path: Path, write: Callable[[HashedFile], object]) -> Entry:
    """Write a file with what `write` does to it, flushed to the disk. Raises OSError."""
    file = HashedFile(path)
    try:
        write(file)
    except BaseException:
        file.error = file.error or OSError(errno.EIO, "its writing was broken off")
        with contextlib.suppress(OSError):  # the other error is the cause
            file.close()
        raise
    return file.close()


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a safetensors file with the rights that any new file gets: safetensors lets only its owner read it."""
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)


def flush(path: Path) -> None:
    """Bring a file or a folder's entries to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def flush_and_hash(path: Path) -> Entry:
    """Bring a file that others wrote to the disk."""
    flush(path)
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def sha256(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal. Raises OSError, and DataError for what is no regular file."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def not_cached(path: Path) -> None:
    """Let the next reading of a file that was flushed come from the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def damage(folder: Path, name: str, entry: Entry) -> str | None:
    """How a file differs from what was written of it; None when it does not. Reads all of it."""
    try:
        if not (folder / name).resolve().is_relative_to(folder.resolve()):
            return f"{name} is a link that leads out of the checkpoint"
        with open_regular(folder / name) as file:
            size = os.fstat(file.fileno()).st_size
        if size != entry["bytes"]:
            return f"{name} has {size} bytes, not {entry['bytes']}"
        return None if sha256(folder / name) == entry["sha256"] else f"{name} has changed since it was saved"
    except FileNotFoundError:
        return f"{name} is missing"
    except DataError as error:
        return f"{name} can't be read ({error})"
    except OSError as error:
        return f"{name} can't be read ({error.strerror})"
    except (RuntimeError, ValueError) as error:  # a link that leads to itself; a name that no file can have
        return f"{name[:200]!r} can't be read ({error})"


def described(path: Path | str, error: Exception) -> str:
    """What went wrong with a file, and what to do about it."""
    if not isinstance(error, OSError) or error.errno is None:
        return f"{path}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    remedy = REMEDIES.get(error.errno)
    code = errno.errorcode.get(error.errno, error.errno)
    return f"{path}: {error.strerror} ({code})" + (f"; {remedy}" if remedy else "")
