"""Tell URLs of objects in stores from paths."""

import os
import re

HTTP = ("http", "https")
LOCAL = ("file", "local")
URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")


def is_remote(path: str | os.PathLike) -> bool:
    """True for a URL of a store or server; False for paths, and for file://."""
    if not isinstance(path, str) or path.startswith("/"):
        return False
    match = URL.match(path)
    return match is not None and match[1].lower() not in LOCAL
