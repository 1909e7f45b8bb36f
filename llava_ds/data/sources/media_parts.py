"""Images and videos as parts of a message, or as objects in a record's lists: their files and settings."""

from collections.abc import Iterable
from typing import NamedTuple

from llava_ds.constants import DataError
from llava_ds.data.sources.embedded import REFERENCE
from llava_ds.data.sources.options import nearest, short

Settings = tuple[tuple[str, float], ...]

KINDS = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "video": "video",
    "video_url": "video",
    "input_video": "video",
}
SOUNDS = ("audio", "audio_url", "input_audio")
FILES = {"image": ("image", "image_url", "path", "url"), "video": ("video", "video_url", "path", "url")}
# Keys that only describe the image, in an object of a record's list of images.
DESCRIPTIONS = (
    "id", "name", "filename", "file_name", "format", "mode", "mime_type", "width", "height", "size", "duration",
    "caption", "alt_text", "title", "source", "license", "sha256", "md5",
)  # fmt: skip
# Names of settings in qwen-vl-utils and transformers, mapped to ours; sizes are whole numbers.
SIZES = ("min_pixels", "max_pixels", "resized_height", "resized_width")
WHOLE = (*SIZES, "total_pixels", "nframes", "min_frames", "max_frames")
SETTINGS = {
    "image": {name: name for name in SIZES},
    "video": {
        **{name: name for name in (*WHOLE, "fps", "sample_fps", "video_start", "video_end")},
        "num_frames": "nframes",
    },
}
MOST = 1e9  # largest setting
DETAIL, INDEX = "detail", "index"


class Mark(NamedTuple):
    """An <image> or <video> mark in a text, or an image or video part of a message.

    value: its image or video, None for the next one that the record lists; settings: as in Media; index: position (from
    0) among the record's images or videos, as in Hugging Face's H4 data sets, None for the next one.
    """

    kind: str
    value: object = None
    settings: Settings = ()
    index: int | None = None


def read_mark(part: dict, where: str) -> Mark:
    """Read the image or video from a message part of a type in KINDS. where: for errors, like "turn 0 has a part".

    Raises DataError for unknown or contradictory keys.
    """
    kind = KINDS[part["type"]]
    given = {name: value for name, value in part.items() if name != "type" and not is_absent(value)}
    index = given.pop(INDEX, None)
    value, settings = _read(given, kind, where)
    value = [] if value is None and part.get("video") == [] else value
    if index is not None and (type(index) is not int or index < 0 or value is not None):
        raise DataError(
            f"{where} with {INDEX!r} {short(index)}"
            + (" and a file of its own: leave one of them out" if value is not None else ", expected a number from 0")
        )
    return Mark(kind, value, settings, index)


def read_file(value: object, kind: str) -> tuple[object, Settings]:
    """Return an image's or video's file, or a video's frames, and the settings. value: a path, a reference to a
    file slice, a list of frames, or an object with one of these. Raises DataError as read_mark does."""
    settings: Settings = ()
    while isinstance(value, dict) and REFERENCE not in value:
        where = f"has {short(value)} as its {kind}, an object"
        given = {name: each for name, each in value.items() if name != "type" and not is_absent(each)}
        inner, own = _read(given, kind, where, DESCRIPTIONS)
        if inner is None:
            raise DataError(f"has {short(value)} as its {kind}, expected a path")
        value, settings = inner, joined(settings, own, f"its {kind}")
    return value, settings


def refuse_unknown(part: dict, known: Iterable[str], where: str) -> None:
    """Raise DataError for a key of a part that has a value and is unknown."""
    for name, value in part.items():
        if name not in known and not is_absent(value):
            raise DataError(
                f"{where} with the key {short(name)}: it is not read, {nearest(name, tuple(known))}; take it out, "
                "or rename it"
            )


def joined(one: Settings, other: Settings, where: str) -> Settings:
    """Merge two groups of settings. Raises DataError if they contradict each other."""
    both = dict(one)
    for name, value in other:
        if both.setdefault(name, value) != value:
            raise DataError(f"gives two values for {name!r} of {where}, {both[name]:g} and {value:g}: leave one out")
    return tuple(sorted(both.items()))


def is_absent(value: object) -> bool:
    """True for an empty value: tables give every part the keys of all parts."""
    return value is None or (isinstance(value, (str, list, dict)) and not value)


def _read(given: dict, kind: str, where: str, beside: tuple[str, ...] = ()) -> tuple[object, Settings]:
    """Return an object's file, None if missing, and its settings. Keys in `beside` are also allowed."""
    settings = SETTINGS[kind]
    refuse_unknown(given, (*FILES[kind], *settings, DETAIL, *beside), where)
    files = {name: given[name] for name in FILES[kind] if name in given}
    if len(files) > 1:
        raise DataError(
            f"{where} with {' and '.join(map(repr, files))}: it can be only one {kind}, leave the others out"
        )
    if given.get(DETAIL, "auto") != "auto":
        raise DataError(
            f"{where} with {DETAIL!r} {short(given[DETAIL])}: this does not define a size, leave it out (where the "
            "model takes images of any size, 'min_pixels' and 'max_pixels' bound it)"
        )
    found = [(settings[name], _number(name, value, where)) for name, value in given.items() if name in settings]
    merged: Settings = ()
    for pair in found:
        merged = joined(merged, (pair,), f"a {kind}")
    return next(iter(files.values()), None), merged


def _number(name: str, value: object, where: str) -> float:
    """Parse a setting's number. Qwen's own examples also write it as text."""
    number = value
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            number = None
    is_whole, least = name in WHOLE or name == "num_frames", 0 if name in ("video_start", "video_end") else 1e-3
    fits = isinstance(number, (int, float)) and not isinstance(number, bool)
    if not fits or not least <= number <= MOST or (is_whole and number != int(number)):
        what = (
            "a whole number of at least 1" if is_whole else "a number of seconds" if not least else "a number above 0"
        )
        raise DataError(f"{where} with {name!r} {short(value)}, expected {what}")
    return int(number) if is_whole else float(number)
