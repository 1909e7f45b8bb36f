"""Tell URLs of objects in stores from paths, and resolve paths."""

import os
import re
import urllib.parse

HTTP = ("http", "https")
LOCAL = ("file", "local")
URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")


def is_remote(path: str | os.PathLike) -> bool:
    """True for a URL of a store or server; False for paths, and for file://."""
    if not isinstance(path, str) or path.startswith("/"):
        return False
    match = URL.match(path)
    return match is not None and match[1].lower() not in LOCAL


def real_path(path: str) -> str:
    """Resolve links in a path; for a URL, strip trailing slashes."""
    return path.rstrip("/") if is_remote(path) else os.path.realpath(path)


def local_path(path: str) -> str:
    """Resolve ~ and file:// in a path; a store's URL is returned unchanged."""
    if is_remote(path):
        return path
    for start in ("file://", "local://"):
        if path.startswith(start):
            return urllib.parse.unquote(path.removeprefix(start))
    return os.path.expanduser(path)
