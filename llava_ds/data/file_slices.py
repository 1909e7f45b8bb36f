"""Files and slices of files, such as the members of a tar, behind one face."""

import contextlib
import errno
import io
import os
import stat
from collections.abc import Iterator

from llava_ds.constants import ConfigError, DataError
from llava_ds.data.sample import FileRef

# What the machine lacks is no fault of the file or disk that just then was asked for more.
LACKING = {
    errno.EMFILE: "raise the limit (ulimit -n), or give fewer workers",
    errno.ENFILE: "raise the limit (sysctl fs.file-max), or end other processes",
    errno.ENOMEM: "free some, or give fewer workers",
    errno.EAGAIN: "end other processes, raise the limit (ulimit -u), or give fewer workers",
}
# Of errors that name no file, as pyarrow's do not, those of writing.
UNWRITABLE = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM, errno.ESTALE,
    errno.EISDIR, errno.ENOTDIR, errno.ENOENT,
)  # fmt: skip


@contextlib.contextmanager
def read_errors(path: str | os.PathLike) -> Iterator[None]:
    """Raise DataError where the system can't read on, as on a disk that fails."""
    try:
        yield
    except OSError as error:
        remedy = LACKING.get(error.errno, "copy it anew, or look at its disk")
        raise DataError(f"{path} can't be read: {error.strerror or error}: {remedy}") from error


@contextlib.contextmanager
def write_errors(folder: str | os.PathLike, what: str, flag: str = "--cache_dir") -> Iterator[None]:
    """Raise ConfigError where the system can't write on below a folder that a flag names, as on a disk that is full, or
    lacks memory or open files for it. An OSError of something else passes through."""
    try:
        yield
    except OSError as error:
        said = error.strerror or error
        if error.errno in LACKING:
            raise ConfigError(f"{what} can't be made: {said}: {LACKING[error.errno]}") from error
        if error.errno not in UNWRITABLE if error.filename is None else not _lies_in(folder, error.filename):
            raise
        raise ConfigError(
            f"{what} can't be written to {folder}: {said}: make room there, or name another {flag}"
        ) from error


def _lies_in(folder: str | os.PathLike, path: str | bytes | int) -> bool:
    """True if a path, as an OSError has it, is that of a folder, of something in it, or of one above it."""
    if isinstance(path, int):  # a descriptor
        return False
    inner, outer = (os.path.abspath(os.fsdecode(each)) for each in (path, folder))
    return os.path.commonpath([inner, outer]) in (inner, outer)


class BoundedFile(io.RawIOBase):
    """A file, or a slice of one, of which no more than max_bytes may be read: past that, OSError. None: no bound."""

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
                raise OSError("it goes on for much longer than such a file needs to")
        return found

    def close(self) -> None:
        self._raw.close()
        super().close()


def opened_file(ref: FileRef, max_bytes: int | None = None) -> io.BufferedReader:
    """A file, or a slice of one, to read; its `raw` is a BoundedFile. Raises DataError when it is no regular file.

    Decoders are given no path: some would map the file, which may shrink.
    """
    file = io.FileIO(ref.path, opener=_open_without_waiting)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise DataError(f"{ref.path} is no regular file: replace it or leave it out")
    return io.BufferedReader(
        BoundedFile(file if ref.num_bytes < 0 else _Slice(file, ref.offset, ref.num_bytes), max_bytes)
    )


def _open_without_waiting(path: str, flags: int) -> int:
    """A named pipe that took a file's place would wait for a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


class _Slice(io.RawIOBase):
    """Some bytes of an open file as a file of their own. Closing it closes the file."""

    def __init__(self, file: io.FileIO, offset: int, num_bytes: int) -> None:
        self._file, self._offset, self._num_bytes, self._at = file, offset, num_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._num_bytes}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: memoryview) -> int:
        wanted = max(0, min(len(buffer), self._num_bytes - self._at))
        self._file.seek(self._offset + self._at)
        found = self._file.readinto(memoryview(buffer)[:wanted])
        self._at += found
        return found

    def close(self) -> None:
        self._file.close()
        super().close()
