"""Files and slices of files, such as members of a tar, with one interface. Disk errors become messages for users."""

import contextlib
import errno
import io
import os
import stat
from collections.abc import Iterator

from llava_ds.constants import ConfigError, DataError
from llava_ds.data.sample import FileRef
from llava_ds.extensions.active import store_of
from llava_ds.files.reading import SizedFile, open_without_waiting
from llava_ds.files.urls import is_remote

# Errors that mean the machine lacks a resource; the file or disk itself is fine.
LACKING = {
    errno.EMFILE: "raise the limit (ulimit -n), or give fewer workers",
    errno.ENFILE: "raise the limit (sysctl fs.file-max), or end other processes",
    errno.ENOMEM: "free some, or give fewer workers",
    errno.EAGAIN: "end other processes, raise the limit (ulimit -u), or give fewer workers",
}
# Errors that mean a failed write, for exceptions that don't name a file, such as pyarrow's.
UNWRITABLE = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM, errno.ESTALE,
    errno.EISDIR, errno.ENOTDIR, errno.ENOENT,
)  # fmt: skip


@contextlib.contextmanager
def read_errors(path: str | os.PathLike) -> Iterator[None]:
    """Turn an OSError, such as from a failing disk, into a DataError with a remedy."""
    try:
        yield
    except OSError as error:
        mend = "check that the store has it, and start again" if is_remote(path) else "copy it again, or check its disk"
        remedy = LACKING.get(error.errno, mend)
        raise DataError(f"{path} can't be read: {error.strerror or error}: {remedy}") from error


@contextlib.contextmanager
def write_errors(folder: str | os.PathLike, what: str, flag: str = "--cache_dir") -> Iterator[None]:
    """Turn an OSError from writing below a folder, or from a lack of memory or open files, into a ConfigError.

    what: noun for the thing being written; flag: name of the folder's flag. Other OSErrors pass through.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        if error.errno in LACKING:
            raise ConfigError(f"{what} can't be created: {reason}: {LACKING[error.errno]}") from error
        if error.errno not in UNWRITABLE if error.filename is None else not _is_within(folder, error.filename):
            raise
        raise ConfigError(
            f"{what} can't be written to {folder}: {reason}: make room there, or name another {flag}"
        ) from error


def _is_within(folder: str | os.PathLike, path: str | bytes | int) -> bool:
    """True if the path of an OSError is the folder, inside it, or above it."""
    if isinstance(path, int):  # a descriptor
        return False
    inner, outer = (os.path.abspath(os.fsdecode(each)) for each in (path, folder))
    return os.path.commonpath([inner, outer]) in (inner, outer)


class BoundedFile(io.RawIOBase):
    """A file or file slice that raises OSError after more than max_bytes were read. max_bytes None: no limit."""

    def __init__(self, raw: io.RawIOBase, max_bytes: int | None) -> None:
        self._raw, self.max_bytes = raw, max_bytes

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._raw.fileno()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._raw.seek(offset, whence)

    def readinto(self, buffer: memoryview) -> int:
        found = self._raw.readinto(buffer)
        if self.max_bytes is not None:
            self.max_bytes -= found
            if self.max_bytes < 0:
                raise OSError("it is much longer than a file of its kind needs")
        return found

    def close(self) -> None:
        self._raw.close()
        super().close()


def opened_file(ref: FileRef, max_bytes: int | None = None) -> io.BufferedReader:
    """Open a file or a slice of a file; `raw` is a BoundedFile. Raises DataError for anything but a regular file.

    Pass a file object to decoders, not a path: memory-mapping decoders crash if the file shrinks.
    """
    if is_remote(ref.path):
        file = store_of(ref.path).RemoteFile(ref.path, ref.offset, ref.num_bytes)
        return io.BufferedReader(BoundedFile(file, max_bytes))
    file = io.FileIO(ref.path, opener=open_without_waiting)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise DataError(f"{ref.path} is not a regular file: replace it or leave it out")
    return io.BufferedReader(
        BoundedFile(file if ref.num_bytes < 0 else _Slice(file, ref.offset, ref.num_bytes), max_bytes)
    )


class _Slice(SizedFile):
    """A byte range of an open file, as a file. Closing it closes the underlying file."""

    def __init__(self, file: io.FileIO, offset: int, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self._file, self._offset = file, offset

    def readinto(self, buffer: memoryview) -> int:
        wanted = max(0, min(len(buffer), self.num_bytes - self._at))
        self._file.seek(self._offset + self._at)
        found = self._file.readinto(memoryview(buffer)[:wanted])
        self._at += found
        return found

    def close(self) -> None:
        self._file.close()
        super().close()
