"""Detection of the format of a source's records, from the first of them."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from llava_ds.constants import IMAGE_TOKEN, ConfigError
from llava_ds.data.sources.options import Columns, SourceOptions, short
from llava_ds.data.sources.preferences import FORMS
from llava_ds.files.places import local_path, real_path

NUM_RECORDS = 100  # to detect the format from
FORMATS_HELP = (
    'llava: {"image": "a.jpg", "conversations": [{"from": "human", "value": "<image>\\nWhat is it?"}, '
    '{"from": "gpt", "value": "A cat."}]}; '
    'sharegpt: the same with "images": [...], "system": text and more names of roles; '
    'messages: {"images": [...], "messages": [{"role": "user", "content": text or parts}, ...]}; '
    'caption: {"image": "a.jpg", "text": "A cat."}'
)


@dataclass(frozen=True)
class Found:
    """A record format and the names of fields found. marks_added: True if images came without marks."""

    format: str
    seen: tuple[tuple[str, str], ...]
    marks_added: bool


def detect(texts: Iterable[str], keys: Iterable[str], columns: Columns, options: SourceOptions, path: str) -> Found:
    """Detect the format of records from the first of them. keys: names known already, as a table's columns.

    Raises ConfigError if no format fits, or if two names could be meant for one field.
    """
    records, keys = [], dict.fromkeys(keys)
    for text in texts:
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            continue  # to_sample gives the reason
        if isinstance(record, dict):
            records.append(record)
            keys.update(dict.fromkeys(record))
    for field, column in options.columns:
        if column not in keys and field in ("conversations", "messages", "text"):
            raise ConfigError(f"--data_columns {field}={column}: no record of {path} has it ({_shown(keys)})")
    seen = _seen(records, columns, path)
    votes = Counter(filter(None, (_format_of(record, columns) for record in records)))
    found = options.data_format if options.data_format != "auto" else max(votes, key=votes.get, default=None)
    if options.are_preferences:
        _refuse_no_preferences(records, keys, path)
        found = "preference"
    if found is None:
        raise ConfigError(
            f"{path}: its records are of no known format ({_shown(keys)}); known are {FORMATS_HELP}. Name the fields "
            "with --data_columns"
        )
    if found == "caption":
        seen = tuple((field, name) for field, name in seen if field != "turns")
    else:
        seen = tuple((field, name) for field, name in seen if field != "text")
    seen = tuple(("conversation" if field == "turns" else field, name) for field, name in seen)
    unmarked = found in ("sharegpt", "messages") and any(_shows_unmarked(record, columns) for record in records)
    return Found(found, seen, unmarked)


def _refuse_no_preferences(records: list[dict], keys: Iterable[str], path: str) -> None:
    """Raise ConfigError where none of the first records has two answers."""
    if not any('"chosen"' in str(record.get("text")) or "chosen" in record for record in records):
        raise ConfigError(
            f"{path}: none of its first records has a chosen and a rejected answer ({_shown(keys)}), "
            f"as pairs have; known are {FORMS}"
        )


def metadata_columns(columns: Columns, keys: Iterable[str], options: SourceOptions) -> Columns:
    """The columns of a folder of images, with datasets' names: file_name, file_names and others ending so."""
    named = {field for field, _ in options.columns}
    files = [key for key in keys if key.endswith(("file_name", "file_names"))]
    videos = tuple(key for key in files if key.startswith("video"))
    images = tuple(key for key in files if not key.startswith("video"))
    changed = {}
    if images and "image" not in named:
        changed["image"] = images
    if videos and "video" not in named:
        changed["video"] = videos
    return Columns(**{**vars(columns), **changed})


def _seen(records: list[dict], columns: Columns, path: str) -> tuple[tuple[str, str], ...]:
    """Pairs of a field and a name of it in some record, the id last."""
    seen: dict[tuple[str, str], None] = {}
    for field, names in vars(columns).items():
        present = [[name for name in names if record.get(name) is not None] for record in records]
        present = list(filter(None, present))
        several = [names for names in present if len(names) > 1]
        # One such record is a bad record. If most are like that, the user has to decide.
        if len(several) > len(present) / 2 and (field != "text" or "turns" not in dict(seen)):
            known = "conversations" if field == "turns" else field
            raise ConfigError(
                f"{path}: its records have {' and '.join(map(repr, several[0]))}, and either could be the {known}: "
                f"name one with --data_columns {known}={several[0][0]}"
            )
        seen.update(dict.fromkeys((field, name) for names in present for name in names))
    return tuple(sorted(seen, key=lambda pair: pair[0] == "id"))


def _format_of(record: dict, columns: Columns) -> str | None:
    turns = next((record[name] for name in columns.turns if isinstance(record.get(name), list)), None)
    if turns:
        turn = turns[0] if isinstance(turns[0], dict) else {}
        if turn.get("from") is not None:
            listed = any(record.get(name) is not None for name in ("images", "videos", *columns.system))
            single = any(record.get(name) is not None for name in ("image", "video"))
            return "sharegpt" if listed and not single else "llava"
        return "messages" if turn.get("role") is not None else None
    has_text = any(isinstance(record.get(name), str) for name in columns.text)
    return "caption" if has_text and _has_media(record, columns) else None


def _has_media(record: dict, columns: Columns) -> bool:
    return any(record.get(name) not in (None, "", []) for name in (*columns.image, *columns.video))


def _shows_unmarked(record: dict, columns: Columns) -> bool:
    turns = [record[name] for name in columns.turns if record.get(name) is not None]
    text = short(turns) if not turns else json.dumps(turns)
    return _has_media(record, columns) and not any(
        mark in text for mark in (IMAGE_TOKEN, "<video>", '"type": "image', '"type": "video')
    )


def _shown(keys: Iterable[str]) -> str:
    keys = list(keys)
    more = f" and {len(keys) - 20} more" if len(keys) > 20 else ""
    return "keys found: " + (", ".join(map(short, keys[:20])) + more or "none")


def folder_of(path: str | None) -> str | None:
    """The real path of a folder; None for None."""
    return None if path is None else real_path(local_path(path))
