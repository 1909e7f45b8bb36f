"""Replacements of `open` and `os.path` functions that accept local paths and URLs of object stores."""

import glob
import io
import os
import urllib.parse
from pathlib import Path
from typing import BinaryIO

from llava_ds.extensions.active import store_of
from llava_ds.files.urls import HTTP, is_remote, local_path

READ_BYTES = 1 << 20


def open_data(path: str) -> BinaryIO:
    """Open a file or object for reading. Raises OSError."""
    if is_remote(path):
        return io.BufferedReader(store_of(path).RemoteFile(path), READ_BYTES)
    return open(path, "rb")


def size_of(path: str) -> int:
    """Return the size of a file or object in bytes. Raises OSError."""
    return store_of(path).known_identity(path).num_bytes if is_remote(path) else os.stat(path).st_size


def is_file(path: str) -> bool:
    """Return True for a file, a link to a file, or an object."""
    if not is_remote(path):
        return os.path.isfile(path)
    return bool(store_of(path).found_in(path, lambda fs, inner: fs.isfile(inner)))


def is_folder(path: str) -> bool:
    """Return True for a folder, or for a prefix of objects; always False for web servers."""
    if not is_remote(path):
        return os.path.isdir(path)
    if path.lower().startswith(HTTP):
        return False
    return bool(store_of(path).found_in(path, lambda fs, inner: fs.isdir(inner)))


def exists(path: str) -> bool:
    """Return True if anything exists at the path."""
    return (is_file(path) or is_folder(path)) if is_remote(path) else os.path.exists(path)


def join(folder: str, path: str) -> str:
    """Join a folder and a path relative to it. Both may be URLs."""
    path = local_path(path)
    if is_remote(path):
        return path
    return f"{folder.rstrip('/')}/{path}" if is_remote(folder) else str(Path(folder) / path)


def files_in(folder: str, endings: tuple[str, ...]) -> list[str]:
    """List the files with these endings in a folder and its subfolders, sorted. Skips names that begin with . or __."""
    if is_remote(folder):
        store = store_of(folder)
        found = [store.full_url(folder, name) for name in store.found_in(folder, lambda fs, inner: fs.find(inner))]
        return sorted(file for file in found if file.lower().endswith(endings) and not _is_hidden(file, folder))
    found = []
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not _is_hidden(name, "")]
        named = [os.path.join(root, name) for name in files if name.lower().endswith(endings)]
        found += [file for file in named if os.path.isfile(file) and not _is_hidden(file, root)]  # excludes pipes
    return sorted(found)


def relative_to(file: str, folder: str) -> str:
    """Return the path of a file relative to a folder that contains it, with slashes."""
    if not is_remote(file):
        return os.path.relpath(file, folder).replace(os.sep, "/")
    inner, root = (url.partition("://")[2].strip("/") for url in (file, folder))
    return inner.removeprefix(root).lstrip("/")


def _is_hidden(file: str, folder: str) -> bool:
    name = relative_to(file, folder) if folder else file
    return any(part.startswith((".", "__")) for part in name.split("/"))


def names_in(folder: str) -> list[str]:
    """List a folder's entries, sorted."""
    if not is_remote(folder):
        return sorted(os.listdir(folder))
    return sorted(store_of(folder).found_in(folder, lambda fs, inner: fs.ls(inner, detail=False)))


def matching(pattern: str) -> list[str]:
    """Return the paths or URLs that match a glob pattern, sorted."""
    if not is_remote(pattern):
        return sorted(glob.glob(pattern, recursive=True))
    store = store_of(pattern)
    return sorted(store.full_url(pattern, name) for name in store.found_in(pattern, lambda fs, inner: fs.glob(inner)))


def inside(root: str, name: str) -> str | None:
    """Build the URL of an object that a record names; None if it is outside the root.

    A name with ".." counts as outside. Raises ValueError if the name is not a valid key.
    """
    if name.startswith(f"{root}/"):
        name = name[len(root) + 1 :]
    if "://" in name or "::" in name or name.startswith("/"):
        return None
    if any(ord(letter) < 32 for letter in name) or name.endswith("/"):
        raise ValueError("it is not a valid key of an object")
    parts = [part for part in name.replace("\\", "/").split("/") if part not in ("", ".")]
    if ".." in parts:
        return None
    key = "/".join(part for part in name.split("/") if part not in ("", "."))
    # Quote URLs, because a web server would end the path at ? or #, and would read %2e%2e as two dots.
    return f"{root}/{urllib.parse.quote(key) if root.lower().startswith(HTTP) else key}"
