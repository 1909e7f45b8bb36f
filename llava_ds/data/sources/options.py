"""Options of a source, raw records, and helpers for error messages."""

import reprlib
from dataclasses import dataclass, fields
from typing import Literal

from llava_ds.boxes import BboxType
from llava_ds.constants import ConfigError, did_you_mean

_REPR = reprlib.Repr()
_REPR.maxstring, _REPR.maxother, _REPR.maxlevel, _REPR.maxlist, _REPR.maxdict = 120, 120, 3, 4, 4

FIELDS = ("id", "conversations", "messages", "image", "video", "text", "system")


@dataclass(frozen=True)
class SourceOptions:
    """Options for reading --data_path.

    columns: pairs of a field and its name in the records; are_preferences: every record has two answers.
    """

    data_format: str = "auto"
    columns: tuple[tuple[str, str], ...] = ()
    image_folder: str | None = None
    video_folder: str | None = None
    cache_dir: str = "~/.cache/llava_ds"
    on_unmarked_image: Literal["refuse", "prepend", "text"] = "prepend"
    bbox_type: BboxType = "real"
    are_preferences: bool = False


@dataclass(frozen=True)
class RawRecord:
    """One record as JSON text, not parsed yet, and its place.

    line: where it starts in the file, from 1 (the row of a table, the member of a tar); index: its number in the
    source, from 0, the same for every repetition by a weight.
    """

    file: str
    line: int
    index: int
    text: str


@dataclass(frozen=True)
class Columns:
    """The names that each field may have in a record."""

    id: tuple[str, ...] = ("id",)
    turns: tuple[str, ...] = ("conversations", "messages")
    image: tuple[str, ...] = ("image", "images")
    video: tuple[str, ...] = ("video", "videos")
    text: tuple[str, ...] = ("text", "caption")
    system: tuple[str, ...] = ("system",)

    @classmethod
    def of(cls, columns: tuple[tuple[str, str], ...]) -> "Columns":
        """The usual names, but for fields that the user named."""
        named: dict[str, tuple[str, ...]] = {}
        for field, column in columns:
            field = "turns" if field in ("conversations", "messages") else field
            named[field] = (*named.get(field, ()), column)
        return cls(**named)

    def all(self) -> tuple[str, ...]:
        """All names."""
        return tuple(name for field in fields(self) for name in getattr(self, field.name))


def parse_columns(text: str | None) -> tuple[tuple[str, str], ...]:
    """Parse --data_columns, as conversations=dialog,image=picture. Raises ConfigError with all problems."""
    pairs, problems = [], []
    for part in (text or "").split(","):
        field, equals, column = (piece.strip() for piece in part.partition("="))
        if not part.strip():
            continue
        if not equals or not field or not column:
            problems.append(f"{part.strip()!r} is no field=column, like image=picture")
        elif field not in FIELDS:
            problems.append(f"there is no field {field!r}: {nearest(field, FIELDS)}")
        elif field in dict(pairs):
            problems.append(f"the field {field!r} is named twice")
        pairs.append((field, column))
    if problems:
        raise ConfigError("--data_columns: " + "; ".join(problems))
    return tuple(pairs)


def nearest(word: object, known: tuple[str, ...]) -> str:
    """A hint for an unknown word: the most similar known one, or all."""
    return did_you_mean(str(word), known, "known are " + ", ".join(known))


def short(value: object) -> str:
    """A short, printable form of a value for an error message."""
    return _REPR.repr(value)
