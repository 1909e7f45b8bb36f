"""Base class of files whose size is known before they are read."""

import io


class SizedFile(io.RawIOBase):
    """A file of num_bytes. Subclasses implement readinto to read at _at."""

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
