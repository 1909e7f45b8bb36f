"""Read objects in stores (s3://, gs://, ...) in blocks, through fsspec and a cache on a local disk.

An object is identified by its URL, its size and the store's content mark (an ETag, or a time). These form a block's
cache key, so replaced objects are read again and unchanged ones are fetched once. Credentials and endpoints come from
fsspec: environment variables, its implementations' files, ~/.config/fsspec.
"""

import contextlib
import errno
import functools
import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from llava_ds.config.arguments import Arguments
from llava_ds.constants import ConfigError, FileChanged
from llava_ds.extensions.object_store.flags import ALLOW_HTTP, FOLDER, MAX_BYTES
from llava_ds.extensions.object_store.object_cache import ObjectCache
from llava_ds.files.reading import SizedFile
from llava_ds.files.urls import HTTP, URL, is_remote

BLOCK_BYTES = 8 << 20  # fetched at a time: most images are one block
TRIES, FIRST_WAIT_S, MOST_WAIT_S = 6, 0.5, 8.0  # about 16 s in total
# Keys of content marks in file infos of fsspec's implementations, the most reliable first.
MARKS = ("ETag", "etag", "md5Hash", "content_md5", "Content-MD5", "generation", "Digest", "LastModified")
MARKS += ("last_modified", "Last-Modified", "updated", "mtime", "modified", "created")

_DEFAULT_FOLDER, _DEFAULT_BYTES = "~/.cache/llava_ds/objects", 100 * 10**9

Result = TypeVar("Result")


class Identity(NamedTuple):
    """An object's size, and a hash of the store's mark of its content."""

    num_bytes: int
    mark: str


def problem_with(url: str, args: Arguments) -> str | None:
    """Return why a flag's URL can't be read, as the end of a message; None if it can."""
    return url_problem(url, args.own["object_store"].allow_http)


def url_problem(url: str, allow_http: bool) -> str | None:
    """Return why a URL can't be read, as the end of a message; None if its form is valid."""
    protocol = URL.match(url)[1].lower()
    if "::" in url:
        return " chains several file systems: name the objects themselves"
    if protocol in HTTP and not allow_http:
        return " is on a web server, but these are not read by default: give --allow_http True, or download it first"
    import fsspec

    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        package = _PACKAGES.get(protocol)
        remedy = f"pip install {package}" if package else str(error)
        return f" needs a package that is not installed: {remedy}"
    except ValueError:
        return f": fsspec knows no protocol {protocol!r}; expected one like s3://, gs:// or abfs://, or a local path"
    return None


_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "abfss": "adlfs"}
_PACKAGES |= {"az": "adlfs", "adl": "adlfs", "http": "aiohttp", "https": "aiohttp", "oss": "ossfs", "oci": "ocifs"}


def identity_of(url: str) -> Identity:
    """Query the store for an object's identity. Raises OSError, FileNotFoundError if it does not exist."""

    def ask(fs, path: str) -> Identity:
        info = fs.info(path)
        if info.get("type", "file") != "file":
            raise IsADirectoryError(errno.EISDIR, "it is a folder of objects", url)
        if not isinstance(info.get("size"), int):
            raise OSError(errno.EOPNOTSUPP, "its server doesn't report its size", url)
        mark = next((f"{name}={info[name]}" for name in MARKS if info.get(name)), None)
        if mark is None:  # its size alone would not distinguish a newer object from the cached one
            raise OSError(errno.EOPNOTSUPP, "its server reports no ETag and no modification time: download it", url)
        return Identity(info["size"], hashlib.sha256(mark.encode()).hexdigest()[:32])

    found = _tried(url, ask)
    _keep(_key("identity", url), json.dumps(found).encode())
    return found


def known_identity(url: str) -> Identity:
    """Return an object's cached identity, or query the store if none is cached. Raises OSError."""
    noted = _cache().get(_key("identity", url))
    return identity_of(url) if noted is None else Identity(*json.loads(noted))


class RemoteFile(SizedFile):
    """A file over an object or a slice of it. Raises OSError, or FileChanged if the object is replaced meanwhile."""

    def __init__(self, url: str, offset: int = 0, num_bytes: int = -1) -> None:
        self.url, self.offset, self._identity = url, offset, known_identity(url)
        left = max(0, self._identity.num_bytes - offset)
        super().__init__(left if num_bytes < 0 else min(num_bytes, left))
        self._number, self._block = -1, b""

    def readinto(self, buffer: memoryview) -> int:
        number, first = divmod(self._at, BLOCK_BYTES)
        if self._at >= self.num_bytes:
            return 0
        if number != self._number:
            self._block, self._number = self._load(number), number
        part = self._block[first : first + len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)

    def read_at(self, count: int, start: int) -> bytes:
        """Return up to `count` bytes from `start`; fewer at the end of the object."""
        self.seek(start)
        found = b""
        while len(found) < count and (part := self.read(count - len(found))):
            found += part
        return found

    def _load(self, number: int) -> bytes:
        start = number * BLOCK_BYTES
        length = min(BLOCK_BYTES, self.num_bytes - start)
        start += self.offset
        key = _key("block", self.url, *map(str, (*self._identity, start, length)))
        data = _cache().get(key)
        if data is None:
            if identity_of(self.url) != self._identity:
                raise FileChanged(f"{self.url} was changed since it was checked; start again to have it checked")
            data = _tried(self.url, lambda fs, path: self._fetch(fs, path, start, length))
            _keep(key, data)
        return data

    def _fetch(self, fs, path: str, start: int, length: int) -> bytes:
        is_whole = (start, length) == (0, self._identity.num_bytes)  # some servers don't support ranges
        data = fs.cat_file(path) if is_whole else fs.cat_file(path, start=start, end=start + length)
        if len(data) != length:
            raise OSError(errno.EIO, f"received {len(data):,} bytes, expected {length:,}", self.url)
        return bytes(data)


def found_in(url: str, look: Callable[[object, str], Result]) -> Result:
    """Call `look` with the file system and its path, without cached listings. Raises OSError."""

    def fresh(fs, path: str) -> Result:
        fs.invalidate_cache()
        try:
            return look(fs, path)
        finally:
            fs.invalidate_cache()  # a listing holds every object of a folder

    return _tried(url, fresh)


def full_url(url: str, path: str) -> str:
    """Return the URL of a path that the file system of another URL returned."""
    return path if is_remote(path) else f"{URL.match(url)[0]}{path}"


def _tried(url: str, act: Callable[[object, str], Result]) -> Result:
    """Call act and return its result. Retries when the store fails."""
    for attempt in range(1, TRIES + 1):
        try:
            return act(*_file_system(url))
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, "this object does not exist", url) from error
        except PermissionError as error:
            raise PermissionError(errno.EACCES, f"the store refuses it ({_one_line(error)})", url) from error
        except (ConfigError, IsADirectoryError):
            raise
        except Exception as error:  # each store's client has other exception classes
            if isinstance(error, OSError) and error.errno == errno.EOPNOTSUPP:
                raise
            if attempt == TRIES:
                failed = f"the store failed {TRIES} times, the last time with {_one_line(error)}"
                raise OSError(errno.EIO, failed, url) from error
            time.sleep(min(MOST_WAIT_S, FIRST_WAIT_S * 2 ** (attempt - 1)) * random.uniform(0.5, 1.0))
    raise AssertionError("not reached")


def _file_system(url: str) -> tuple[object, str]:
    """Return this process's fsspec file system for a URL, and the path in it. Raises ConfigError."""
    if problem := url_problem(url, os.environ.get(ALLOW_HTTP) == "1"):
        raise ConfigError(f"{url}{problem}")
    import fsspec

    return fsspec.core.url_to_fs(url)  # it caches file systems per process


def _cache() -> ObjectCache:
    folder = os.environ.get(FOLDER) or os.path.expanduser(_DEFAULT_FOLDER)
    return ObjectCache(Path(folder), int(os.environ.get(MAX_BYTES, _DEFAULT_BYTES)))


def _keep(key: str, data: bytes) -> None:
    """Put bytes into the cache. Ignores failures, because the run can fetch the bytes again."""
    try:
        _cache().put(key, data)
    except OSError as error:
        _warn_once(f"{error.strerror or error}", str(_cache().folder))


@functools.cache
def _warn_once(reason: str, folder: str) -> None:
    with contextlib.suppress(OSError):
        print(f"objects can't be cached in {folder} ({reason}): they are fetched at every use", file=sys.stderr)


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
