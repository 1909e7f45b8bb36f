"""What may be said about a data set, and what its readers hand on."""

import difflib
import reprlib
from dataclasses import dataclass, fields
from typing import Literal

from llava_ds.constants import ConfigError

_REPR = reprlib.Repr()
_REPR.maxstring, _REPR.maxother, _REPR.maxlevel, _REPR.maxlist, _REPR.maxdict = 120, 120, 3, 4, 4

FIELDS = ("id", "conversations", "messages", "image", "video", "text", "system")


@dataclass(frozen=True)
class SourceOptions:
    """How --data_path is to be understood. columns: pairs of a field and the record's own name for it."""

    data_format: str = "auto"
    columns: tuple[tuple[str, str], ...] = ()
    image_folder: str | None = None
    video_folder: str | None = None
    cache_dir: str = "~/.cache/llava_ds"
    on_unmarked_image: Literal["refuse", "prepend", "text"] = "prepend"


@dataclass(frozen=True)
class RawRecord:
    """One record as JSON text, not parsed yet, and where it was found.

    line: where it starts in the file, from 1 (the row of a table, the member of a tar); index: its number in the
    source, from 0, which a record that a weight repeats keeps.
    """

    file: str
    line: int
    index: int
    text: str


@dataclass(frozen=True)
class Columns:
    """For every field, the names under which a record may hold it."""

    id: tuple[str, ...] = ("id",)
    turns: tuple[str, ...] = ("conversations", "messages")
    image: tuple[str, ...] = ("image", "images")
    video: tuple[str, ...] = ("video", "videos")
    text: tuple[str, ...] = ("text", "caption")
    system: tuple[str, ...] = ("system",)

    @classmethod
    def of(cls, columns: tuple[tuple[str, str], ...]) -> "Columns":
        """The usual names, but for the fields that the user named."""
        named: dict[str, tuple[str, ...]] = {}
        for field, column in columns:
            field = "turns" if field in ("conversations", "messages") else field
            named[field] = (*named.get(field, ()), column)
        return cls(**named)

    def all(self) -> tuple[str, ...]:
        """Every name that is looked for."""
        return tuple(name for field in fields(self) for name in getattr(self, field.name))


def parse_columns(text: str | None) -> tuple[tuple[str, str], ...]:
    """The pairs of --data_columns conversations=dialog,image=picture. Raises ConfigError for what is none."""
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
    """What to say behind an unknown word: the known one that looks most like it, or all."""
    close = difflib.get_close_matches(str(word), known, n=1)
    return f"did you mean {close[0]}?" if close else "known are " + ", ".join(known)


def short(value: object) -> str:
    """A value for an error message: bounded, printable and made without walking all of it."""
    return _REPR.repr(value)
