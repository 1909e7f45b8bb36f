"""Options of a source, raw records, and helpers for error messages."""

import dataclasses
import functools
import reprlib
from dataclasses import dataclass, fields, replace
from typing import Literal

from llava_ds.boxes import BboxType
from llava_ds.constants import ConfigError, did_you_mean

_REPR = reprlib.Repr()
_REPR.maxstring, _REPR.maxother, _REPR.maxlevel, _REPR.maxlist, _REPR.maxdict = 120, 120, 3, 4, 4

# Keys of a record in ms-swift, verl, and OpenAI's and vLLM's requests.
TEMPLATE_KWARGS, TOOLS = "chat_template_kwargs", "tools"

# Keys of a turn, or of a record with a list: OpenAI's fine-tuning, ms-swift, axolotl, TRL and verl.
WEIGHT_KEYS = ("weight", "loss", "loss_scale", "train", "training", "trainable", "loss_mask")

# Keys of a record, for all of its turns or answers.
RECORD_WEIGHT_KEYS = (*WEIGHT_KEYS, "weights", "loss_weights", "loss_scales", "loss_masks")
ANY_RECORD_WEIGHT = frozenset(RECORD_WEIGHT_KEYS)

# Keys that are false in a record with a bad answer (KTO, in ms-swift, TRL and LLaMA-Factory), and ms-swift's key of a
# rejected answer's images.
GOOD_ANSWER_KEYS = ("label", "kto_tag")
REJECTED_IMAGES = "rejected_images"

QUESTIONS = ("prompt", "query", "question", "instruction", "input")  # question fields; input extends another field
ANSWERS = ("completion", "response", "answer", "output")  # fields of the answer
PAIRS = ("chosen", "rejected", "margin")
FIELDS = (
    *("id", "conversations", "messages", "image", "video", "text", "system", "texts", "history"),
    *(*QUESTIONS, *ANSWERS, *PAIRS),
)


@dataclass(frozen=True)
class SourceOptions:
    """Options for reading --data_path.

    columns: (field, name in the records) pairs; split: split to read, if a folder has several; are_preferences: every
    record has two answers; other_columns: keep values that are not read (Sample.other_columns); are_labelled: records
    may instead have one answer with a label, true for a good one.
    """

    data_format: str = "auto"
    columns: tuple[tuple[str, str], ...] = ()
    image_folder: str | None = None
    video_folder: str | None = None
    cache_dir: str = "~/.cache/llava_ds"
    on_unmarked_image: Literal["refuse", "prepend", "text"] = "prepend"
    bbox_type: BboxType = "real"
    split: str | None = None
    are_preferences: bool = False
    other_columns: bool = False
    are_labelled: bool = False


@dataclass(frozen=True)
class RawRecord:
    """One unparsed record as JSON text, and its location.

    line: first line in the file, from 1 (or row of a table, or member of a tar); index: index in the source, from 0. If
    a weight repeats a record, all repetitions have the same index.
    """

    file: str
    line: int
    index: int
    text: str


@dataclass(frozen=True)
class Columns:
    """The names that each field may have in a record. label: GOOD_ANSWER_KEYS if labels are read."""

    id: tuple[str, ...] = ("id",)
    turns: tuple[str, ...] = ("conversations", "messages")
    image: tuple[str, ...] = ("image", "images")
    video: tuple[str, ...] = ("video", "videos")
    text: tuple[str, ...] = ("text", "caption")
    system: tuple[str, ...] = ("system",)
    texts: tuple[str, ...] = ("texts",)
    history: tuple[str, ...] = ("history",)
    prompt: tuple[str, ...] = ("prompt",)
    query: tuple[str, ...] = ("query",)
    question: tuple[str, ...] = ("question", "problem")
    instruction: tuple[str, ...] = ("instruction",)
    input: tuple[str, ...] = ("input",)
    completion: tuple[str, ...] = ("completion",)
    response: tuple[str, ...] = ("response",)
    answer: tuple[str, ...] = ("answer", "answers", "solution", "reward_model")
    output: tuple[str, ...] = ("output",)
    chosen: tuple[str, ...] = ("chosen",)
    rejected: tuple[str, ...] = ("rejected", "rejected_response", "rejected_messages")
    margin: tuple[str, ...] = ("margin",)
    label: tuple[str, ...] = dataclasses.field(default=(), repr=False)  # repr is part of the fingerprint

    @classmethod
    def of(cls, columns: tuple[tuple[str, str], ...]) -> "Columns":
        """Use the usual names, except for fields that the user named. A column is used for one field only.

        Naming one question (or answer) field disables the other question (or answer) fields; instruction and input go
        together.
        """
        named: dict[str, tuple[str, ...]] = {}
        for field, column in columns:
            field = "turns" if field in ("conversations", "messages") else field
            named[field] = (*named.get(field, ()), column)
        together = {"instruction", "input"}
        for group in (QUESTIONS, ANSWERS):
            kept = {field for field in group if field in named}
            kept |= together if kept & together else set()
            named |= {field: () for field in group if kept and field not in kept}
        taken = {column for _, column in columns}
        usual = {field: names for field, names in cls().by_field().items() if field not in named}
        return cls(**named, **{field: tuple(n for n in names if n not in taken) for field, names in usual.items()})

    def only(self, used: tuple[str, ...]) -> "Columns":
        """Keep the names of these fields only."""
        return replace(self, **{field.name: () for field in fields(self) if field.name not in used})

    def by_field(self) -> dict[str, tuple[str, ...]]:
        """The names of every field."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @functools.cached_property
    def turn_lists(self) -> frozenset[str]:
        """Names of the fields that hold lists of turns."""
        return frozenset((*self.turns, *self.texts, *self.history))

    @functools.cached_property
    def spoken(self) -> frozenset[str]:
        """Names of the fields whose messages may have parts with images."""
        said = [getattr(self, field) for field in ("turns", "texts", "history", *QUESTIONS, *ANSWERS, *PAIRS)]
        return frozenset(name for names in said for name in names)

    @functools.cached_property
    def has_questions(self) -> bool:
        """True if a question and its answer may be in separate fields."""
        return any(getattr(self, field) for field in QUESTIONS) and any(getattr(self, field) for field in ANSWERS)

    @functools.cached_property
    def known(self) -> frozenset[str]:
        """All names, including the usual names of fields that are not read."""
        return frozenset((*self.all(), *Columns().all()))

    def all(self) -> tuple[str, ...]:
        """All names."""
        return tuple(name for names in self.by_field().values() for name in names)


def parse_columns(text: str | None) -> tuple[tuple[str, str], ...]:
    """Parse --data_columns, such as conversations=dialog,image=picture. Raises ConfigError with all problems."""
    pairs, problems = [], []
    for part in (text or "").split(","):
        field, equals, column = (piece.strip() for piece in part.partition("="))
        if not part.strip():
            continue
        if not equals or not field or not column:
            problems.append(f"{part.strip()!r} is not field=column, like image=photo")
        elif field not in FIELDS:
            problems.append(f"unknown field {field!r}: {nearest(field, FIELDS)}")
        elif field in dict(pairs):
            problems.append(f"the field {field!r} is named twice")
        elif column in dict(map(reversed, pairs)):
            problems.append(f"the name {column!r} is given for two fields")
        pairs.append((field, column))
    if problems:
        raise ConfigError("--data_columns: " + "; ".join(problems))
    return tuple(pairs)


EMPTY = (None, "", [], {})  # values treated as absent: a table gives every record all keys


def nearest(word: object, known: tuple[str, ...]) -> str:
    """Return a hint for an unknown word: the most similar valid word, or all valid words."""
    return did_you_mean(str(word), known, "known are " + ", ".join(known))


def short(value: object) -> str:
    """A short, printable form of a value for an error message."""
    return _REPR.repr(value)
