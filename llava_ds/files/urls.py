"""URLs of objects in stores, told from paths, and the settings by which they are read."""

import os
import re
from pathlib import Path

HTTP = ("http", "https")
LOCAL = ("file", "local")
URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
# The settings, which are for every process of a run, started by whichever library: a child inherits its environment.
FOLDER, MAX_BYTES, ALLOW_HTTP = (f"LLAVA_DS_OBJECT_{name}" for name in ("CACHE", "CACHE_BYTES", "HTTP"))


def configure(folder: str | os.PathLike, max_bytes: int, allow_http: bool) -> None:
    """Set the cache, and whether web servers may be read, for this process and those that it starts."""
    os.environ[FOLDER] = str(Path(folder).expanduser().absolute())
    os.environ[MAX_BYTES] = str(max_bytes)
    os.environ[ALLOW_HTTP] = "1" if allow_http else "0"


def is_remote(path: str | os.PathLike) -> bool:
    """True for a URL of a store or server; False for paths, and for file://."""
    if not isinstance(path, str) or path.startswith("/"):
        return False
    match = URL.match(path)
    return match is not None and match[1].lower() not in LOCAL
