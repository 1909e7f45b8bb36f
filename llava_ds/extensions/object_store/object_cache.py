"""A bounded cache of bytes on disk, shared by any number of processes and nodes. Any process may be killed.

Entries are files with a checksum, created by a rename. A process first reserves the entry's size in a ledger, under a
lock, and evicts the least recently used entries to make room. So the folder exceeds its bound by at most one entry per
process. A killed process leaves an unused reservation, until the next eviction recounts the files.
"""

import contextlib
import fcntl
import os
import re
import secrets
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PAGE = 4096  # file systems allocate space in pages
CHECKSUM_BYTES = 4
EVICTED_TO = 0.9  # evict down to this fraction of the bound, because an eviction reads every entry's time
TOUCHED_AFTER_S = 60.0  # an entry's use is recorded if its last recorded use is older
SCRATCH_AGE_S = 3600.0  # a scratch file without writes for this long was left by a killed process
LEDGER = "ledger"

# Files with other names in the folder are neither counted nor removed.
_FOLDER, _ENTRY = re.compile(r"[0-9a-f]{2}"), re.compile(r"[0-9a-f]{8,64}|\.[0-9a-f]{16}\.tmp")


@dataclass(frozen=True)
class ObjectCache:
    """Bytes by key. Keys are hexadecimal digits; max_bytes bounds the folder's size, counted in pages."""

    folder: Path
    max_bytes: int

    def get(self, key: str) -> bytes | None:
        """Return the bytes of a key; None if they are missing or damaged."""
        path = self._path(key)
        try:
            data = path.read_bytes()
            content, checksum = data[:-CHECKSUM_BYTES], data[-CHECKSUM_BYTES:]
            if zlib.crc32(content).to_bytes(CHECKSUM_BYTES, "big") != checksum:  # by a power cut or a failing disk
                path.unlink(missing_ok=True)
                return None
        except OSError:
            return None
        with contextlib.suppress(OSError):  # another process may have evicted it just now
            if time.time() - path.stat().st_mtime > TOUCHED_AFTER_S:
                os.utime(path)
        return content

    def put(self, key: str, data: bytes) -> None:
        """Add the bytes of a key, unless they alone exceed the bound. Raises OSError."""
        path, size = self._path(key), _in_pages(len(data) + CHECKSUM_BYTES)
        if size > self.max_bytes:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        self._reserve(size)
        scratch = path.with_name(f".{secrets.token_hex(8)}.tmp")
        try:
            with open(scratch, "xb") as file:
                file.write(data)
                file.write(zlib.crc32(data).to_bytes(CHECKSUM_BYTES, "big"))
            os.replace(scratch, path)
        except BaseException:
            with contextlib.suppress(OSError):
                scratch.unlink()
            raise

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / key

    def _reserve(self, size: int) -> None:
        with open(self.folder / LEDGER, "a+b") as ledger:
            fcntl.flock(ledger, fcntl.LOCK_EX)  # released when the file is closed, also by a kill
            ledger.seek(0)
            text = ledger.read(32)
            used = int(text) if text.isdigit() else None  # an empty or truncated ledger has no valid number
            if used is None or used + size > self.max_bytes:
                used = self._evict(size)
            ledger.seek(0)
            ledger.truncate()
            ledger.write(b"%d" % (used + size))

    def _evict(self, size: int) -> int:
        """Remove the least recently used entries until there is room; returns the remaining bytes."""
        entries = sorted(self._entries())
        used = sum(size for _, size, _ in entries)
        if used + size <= self.max_bytes:
            return used
        allowed = min(self.max_bytes - size, int(EVICTED_TO * self.max_bytes))
        for used_at, num_bytes, path in entries:
            if used <= allowed:
                break
            if path.suffix == ".tmp" and time.time() - used_at < SCRATCH_AGE_S:
                continue  # another process is writing it
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            used -= num_bytes
        return used

    def _entries(self) -> Iterator[tuple[float, int, Path]]:
        """Yield (time of the last use, bytes, path) of every entry and scratch file."""
        for folder in self.folder.iterdir():
            for path in folder.iterdir() if _FOLDER.fullmatch(folder.name) else ():
                if _ENTRY.fullmatch(path.name):
                    with contextlib.suppress(FileNotFoundError):
                        stat = path.stat()
                        yield stat.st_mtime, _in_pages(stat.st_size), path


def _in_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE
