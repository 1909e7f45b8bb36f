"""Fields of a record, and the files or file slices of its images and videos."""

import errno
import functools
import json
import os
import stat
import urllib.parse
from collections.abc import Callable
from pathlib import Path

from llava_ds.constants import DataError, FileProblem
from llava_ds.data.sample import FileRef, Media
from llava_ds.data.sources.embedded import REFERENCE
from llava_ds.data.sources.media_parts import Mark, is_absent, joined, read_file
from llava_ds.data.sources.options import EMPTY, short
from llava_ds.data.sources.source import Source
from llava_ds.data.sources.tars import VIDEO_SUFFIXES
from llava_ds.files.places import inside, size_of
from llava_ds.files.reading import KINDS
from llava_ds.files.urls import is_remote

MAX_PATH_BYTES = 4096  # Linux's limit
MAX_NAME = 255  # characters; longer names that begin like base64 are taken for base64
BASE64_BEGINNINGS = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR", "Qk")  # PNG, JPEG, GIF, WebP and BMP
MAX_FILES_PER_RECORD = 10_000

_VIDEO_ENDINGS = tuple(f".{suffix}" for suffix in VIDEO_SUFFIXES)


def to_media(mark: Mark, source: Source) -> Media:
    """Resolve the files of a mark's image or video. Raises DataError if a file is missing."""
    kind, value, settings = mark.kind, mark.value, mark.settings
    if isinstance(value, dict):
        value, own = read_file(value, kind)
        settings = joined(settings, own, f"its {kind}")
    if kind == "image":
        return Media("image", (_file(value, source, "image"),), settings)
    if isinstance(value, list):
        if not 0 < len(value) <= MAX_FILES_PER_RECORD:
            raise DataError(f"names a video of {len(value):,} frames, expected 1 to {MAX_FILES_PER_RECORD:,}")
        return Media("frames", tuple(_file(frame, source, "frame") for frame in value), settings)
    return Media("video", (_file(value, source, "video"),), settings)


def _file(value: object, source: Source, what: str) -> FileRef:
    """Resolve the file, or slice of a file, of an image, a video or a frame."""
    if isinstance(value, dict):
        value, settings = read_file(value, "video" if what == "video" else "image")
        if settings:
            raise DataError(f"has {settings[0][0]!r} for a frame of a video: give it for the whole video")
    if isinstance(value, dict):
        return _slice(value, source)
    if not isinstance(value, str):
        raise DataError(f"has {short(value)} as its {what}, expected a path")
    root = source.image_root if what == "image" else source.video_root
    flag = "--image_folder" if what == "image" else "--video_folder"
    return FileRef(find_file(value, root, what, flag))


def find_file(name: str, root: str | None, what: str = "image", flag: str = "--image_folder") -> str:
    """Resolve the real path of a file named by a record.

    root: real path of the folder that name is relative to and must not leave. Makes one system call if the folder is
    cached, none for an object in a store. Opens no file. Raises DataError with the reason.
    """
    folder_name = flag.removeprefix("--").replace("_", " ")
    if root is not None and is_remote(root):
        return _find_object(name, root, what, folder_name)
    if name.startswith(("http://", "https://", "ftp://")):
        raise DataError(f"names the {what} {short(name)}, a remote URL: these are never fetched, download it first")
    if name.startswith("data:"):
        raise DataError(f"has {short(name)} as its {what}, expected a path (data:image/…;base64 is read as an image)")
    if name.startswith("file://"):
        name = urllib.parse.unquote(name[len("file://") :])
    if root is None:
        raise DataError(f"names the {what} {short(name)}: give {flag}")
    looks = len(name) > MAX_NAME and name.startswith(BASE64_BEGINNINGS)
    base64 = ", and looks like base64: put data:image/png;base64, before it" if looks else ""
    try:
        if not name or len(name.encode()) > MAX_PATH_BYTES:
            raise ValueError(f"it is longer than {MAX_PATH_BYTES} bytes{base64}" if name else "it is empty")
        parent, base = os.path.split(os.path.join(root, name))
        if base in ("", ".", ".."):
            parent, base = os.path.split(os.path.realpath(os.path.join(root, name)))
        folder = _folder_inside(parent, root)
        path = None if folder is None else os.path.join(folder, base)
        mode = None if path is None else os.lstat(path).st_mode
        if mode is not None and stat.S_ISLNK(mode):
            path = os.path.realpath(path)
            path = path if _folder_inside(os.path.dirname(path), root) is not None else None
            mode = None if path is None else os.stat(path).st_mode
    except ValueError as error:
        raise DataError(f"names the {what} {short(name)}, not a valid file name: {error}") from error
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise FileProblem(f"names the {what} {short(name)}, but no file exists at {short(path)}") from error
        raise FileProblem(f"names the {what} {short(name)}, but it can't be read: {error.strerror}{base64}") from error
    if path is None:
        raise FileProblem(f"names the {what} {short(name)}, outside the {folder_name} {root}")
    if not stat.S_ISREG(mode):
        found = KINDS.get(stat.S_IFMT(mode), "no file")
        raise FileProblem(f"names the {what} {short(name)}, but no file exists at {short(path)}: it is {found}")
    return path


def _find_object(name: str, root: str, what: str, folder_name: str) -> str:
    """Resolve the URL of an object named by a record. A missing object is noticed only when it is read."""
    try:
        if not name or len(name.encode()) > MAX_PATH_BYTES:
            raise ValueError("it is empty" if not name else f"it is longer than {MAX_PATH_BYTES} bytes")
        url = inside(root, name)
    except ValueError as error:
        raise DataError(f"names the {what} {short(name)}, not a valid file name: {error}") from error
    if url is None:
        raise FileProblem(f"names the {what} {short(name)}, outside the {folder_name} {root}")
    return url


@functools.lru_cache(maxsize=8192)
def _folder_inside(folder: str, root: str) -> str | None:
    """The real path of a folder; None if it is outside root."""
    real = os.path.realpath(folder)
    return real if Path(real).is_relative_to(root) else None


def _slice(value: dict, source: Source) -> FileRef:
    """Resolve a reference to a slice. Refuses, as forged, references to another source's file or past a file's end."""
    path, offset, num_bytes = (value.get(key) for key in (REFERENCE, "offset", "num_bytes"))
    if isinstance(path, str) and path in source.slices_of and type(offset) is int and type(num_bytes) is int:
        try:
            size = size_of(path)
        except OSError as error:
            raise DataError(f"has an image inside {path}, but that can't be read: {error.strerror}") from None
        if num_bytes == 0 and 0 <= offset <= size:
            raise DataError("has an image without bytes")
        if 0 <= offset < size and 0 < num_bytes <= size - offset:
            return FileRef(path, offset, num_bytes)
    raise DataError(f"has {short(value)} as its image, expected a path")


def listed(record: dict, names: tuple[str, ...]) -> list:
    """List the images that a record names."""
    name, value = field_of(record, names)
    if value is None or value == "":
        return []
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(each, (str, dict)) for each in values):
        raise DataError(f"has {short(value)} under {name!r}, expected a path or a list of paths")
    return values


def videos(record: dict, names: tuple[str, ...]) -> list:
    """List the videos, each a file or a list of frames. A list of image paths is one video."""
    name, value = field_of(record, names)
    if value is None or value == "" or value == []:
        return []
    values = value if isinstance(value, list) else [value]
    if all(isinstance(each, (str, dict)) for each in values):
        files = [_is_video(each) for each in values]
        if not isinstance(value, list) or all(files):
            return values
        if not any(files):
            return [values]
    elif all(isinstance(each, (str, list, dict)) and each for each in values):
        return values
    raise DataError(f"has {short(value)} under {name!r}, expected a video, its frames, or a list of these")


def _is_video(value: str | dict) -> bool:
    """True for a whole video, not a frame: by the ending of its path, or as an object with a video."""
    if isinstance(value, dict):
        named = [value.get(key) for key in ("video", "video_url")]
        if not all(map(is_absent, named)):
            return True
        value = next((value[key] for key in ("path", "url") if isinstance(value.get(key), str)), "")
    return value.lower().endswith(_VIDEO_ENDINGS)


def field_of(record: dict, names: tuple[str, ...]) -> tuple[str, object]:
    """Return the name and value of a field with several possible names. The value is None if absent or null."""
    found, value = names[0], None
    for name in names:
        each = record.get(name)
        if each is not None:
            if value is not None:
                raise DataError(f"has both {found!r} and {name!r}: name one with --data_columns")
            found, value = name, each
    return found, value


def json_of(value: object, name: str) -> str:
    """Serialize an object of a record to JSON, "" if it is missing or empty. value: the object, or its JSON text."""
    found = (
        "" if isinstance(value, str) and not value.strip() else from_json(value, f"has {short(value)} under {name!r}")
    )
    if found in EMPTY:
        return ""
    if not isinstance(found, dict):
        raise DataError(f"has {short(value)} under {name!r}, expected an object, or an object as JSON text")
    text = json.dumps(found, ensure_ascii=False)
    return checked_text(text, lambda: f"has {short(value)} under {name!r}, not valid Unicode")


def from_json(value: object, what: str) -> object:
    """Parse the value if it is JSON text. what: the beginning of an error message."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{what}, not valid JSON: {error}") from None


def checked_text(value: object, problem: Callable[[], str]) -> str:
    """Return the value if it is encodable text, otherwise raise DataError. `problem` builds the message only on error:
    formatting a value takes longer than all other checks of a record."""
    if not is_text(value):
        raise DataError(problem())
    return value


def is_text(value: object) -> bool:
    """True if the text has no lone surrogates (tokenizers reject them)."""
    if not isinstance(value, str):
        return False
    try:
        value.isascii() or value.encode()
    except UnicodeEncodeError:
        return False
    return True


def either(names: tuple[str, ...]) -> str:
    """Join names for an error message."""
    return " or ".join(map(repr, names))


def keys_of(record: dict) -> str:
    """List the keys of a record for an error message."""
    shown = ", ".join(short(key) for key in list(record)[:10]) or "none"
    return f"its keys: {shown}" + (f" and {len(record) - 10} more" if len(record) > 10 else "")
