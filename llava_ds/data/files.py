"""Files and slices of files, such as the members of a tar, behind one face."""

import io

from llava_ds.data.sample import FileRef


def opened_file(ref: FileRef) -> io.BufferedReader:
    """A file, or a slice of one, to read. Decoders are given no path: some would map the file, which may shrink."""
    file = io.FileIO(ref.path)
    return io.BufferedReader(file if ref.num_bytes < 0 else _Slice(file, ref.offset, ref.num_bytes))


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
