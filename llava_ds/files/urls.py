"""Distinguish URLs of objects in stores from local paths, and resolve local paths."""

import os
import re
import urllib.parse

HTTP = ("http", "https")
LOCAL = ("file", "local")
URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")


def is_remote(path: str | os.PathLike) -> bool:
    """Return True for a URL of a store or web server, False for a local path or a file:// URL."""
    if not isinstance(path, str) or path.startswith("/"):
        return False
    match = URL.match(path)
    return match is not None and match[1].lower() not in LOCAL


def real_path(path: str) -> str:
    """Return a path with its links resolved, or a URL without trailing slashes."""
    return path.rstrip("/") if is_remote(path) else os.path.realpath(path)


def local_path(path: str) -> str:
    """Return a path with ~ and file:// resolved, or a store's URL unchanged."""
    if is_remote(path):
        return path
    for start in ("file://", "local://"):
        if path.startswith(start):
            return urllib.parse.unquote(path.removeprefix(start))
    return os.path.expanduser(path)
