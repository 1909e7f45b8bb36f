"""Detect the format of a source's records from its first records."""

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from llava_ds.constants import IMAGE_TOKEN, ConfigError, DataError
from llava_ds.data.sources.embedded import REJECTED
from llava_ds.data.sources.fields import BASE64_BEGINNINGS, either
from llava_ds.data.sources.options import ANSWERS, GOOD_ANSWER_KEYS, PAIRS, QUESTIONS, Columns, SourceOptions, short
from llava_ds.data.sources.preferences import FORMS, LABELLED_FORMS, pair_problem
from llava_ds.data.sources.record_forms import CHOICE_KEYS, FIELDS_OF_ALL, FORM_FIELDS, WITHOUT_TURNS, present
from llava_ds.data.sources.tars import IMAGE_SUFFIXES
from llava_ds.data.sources.turn_lists import as_turns, is_turn_list
from llava_ds.files.urls import local_path, real_path

NUM_RECORDS = 100  # number of first records to examine
FORMATS_HELP = (
    'llava: {"image": "a.jpg", "conversations": [{"from": "human", "value": "<image>\\nWhat is it?"}, '
    '{"from": "gpt", "value": "A cat."}]}; '
    'sharegpt: the same with "images": [...], "system": text and more names of roles; '
    'messages: {"images": [...], "messages": [{"role": "user", "content": text or parts}, ...]}; '
    'texts: {"images": [...], "texts": [{"user": "What is it?", "assistant": "A cat."}]}; '
    'question_answer: {"image": "a.jpg", "question": "What is it?", "answer": "A cat."}, also as prompt and '
    "completion, query and response, or instruction, input and output, with images, system and history; "
    'caption: {"image": "a.jpg", "text": "A cat."}'
)
OPTIONAL_FIELDS = (*FIELDS_OF_ALL, "input", "history", "margin")  # may appear only in later records
_IMAGE_KEY = re.compile("image|img|picture|photo|video", re.IGNORECASE)
_IMAGE_NAME = re.compile("(?:image|img|picture|photo)s?[ _-]?(?:id|name|idx|index|no)s?", re.IGNORECASE)  # not a path
_OPTION_KEY = re.compile("A|(?:choice|option)_?(?:a|1)", re.IGNORECASE)  # column of the first choice
_CHOICE = re.compile(r"\(?([A-Ja-j]|\d{1,2})[).]?")
MIN_BASE64 = 64  # minimum length in characters, because a file name may begin like base64
ALPACA_QUESTION = {"instruction", "input"}
IMAGE_ENDINGS = tuple(f".{suffix}" for suffix in IMAGE_SUFFIXES)


@dataclass(frozen=True)
class Found:
    """A detected record format and its field names.

    format: format of most records; columns: names of the fields that are read; marks_added: some images have no marks.
    """

    format: str
    columns: Columns
    seen: tuple[tuple[str, str], ...]
    marks_added: bool


@dataclass(frozen=True)
class FirstRecords:
    """The first records of a source: the valid objects, all keys, and reasons for rejected records.

    held: keys with images or other files as bytes, and unread columns that name images; has_all_keys: True if later
    records have no other keys.
    """

    records: list[dict]
    keys: list[str]
    reasons: list[str]
    held: tuple[str, ...] = ()
    has_all_keys: bool = False

    @classmethod
    def of(
        cls, texts: Iterable[str], keys: Iterable[str], held: Iterable[str] = (), has_all_keys: bool = False
    ) -> "FirstRecords":
        """Parse the records. keys: names known in advance, such as a table's columns."""
        records, names, reasons = [], dict.fromkeys(keys), []
        for text in texts:
            try:
                record = json.loads(text)
            except (ValueError, RecursionError):
                continue  # to_sample gives the reason
            if isinstance(record, dict) and REJECTED in record:
                reasons.append(str(record[REJECTED]))
            elif isinstance(record, dict):
                records.append(record)
                names.update(dict.fromkeys(record))
        return cls(records, list(names), reasons, tuple(held), has_all_keys)


def detect(first: FirstRecords, columns: Columns, options: SourceOptions, path: str) -> Found:
    """Detect the format of a source's records from its first records.

    Raises ConfigError if no format fits, or if two names could belong to one field.
    """
    for field, column in options.columns:
        may_come = field in OPTIONAL_FIELDS and not first.has_all_keys
        if column not in first.keys and not may_come:
            raise ConfigError(f"--data_columns {field}={column}: no record of {path} has it ({_shown(first.keys)})")
    votes = Counter(filter(None, (_format_of(record, columns) for record in first.records)))
    found = options.data_format if options.data_format != "auto" else max(votes, key=votes.get, default=None)
    if options.are_preferences:
        _refuse_no_preferences(first, columns, options, path)
        found = "preference"
    if found is None:
        raise ConfigError(_unknown(first, columns, path))
    used = _used_fields(found, votes if options.data_format == "auto" else [])
    if options.are_labelled:
        used, columns = (*used, *_labelled_answers(first, columns, path)), replace(columns, label=GOOD_ANSWER_KEYS)
    if found != "preference":
        problems = [pair_problem(record, columns.only(used)) for record in first.records]
        if problems and None not in problems:
            raise ConfigError(f"{path}: the first of its records {problems[0]}")
    if "answer" in used and not {field for field, _ in options.columns} & set(ANSWERS):
        _refuse_choices(first, columns, path)
    seen = _seen(first.records, columns.only(used), path)
    if "answer" in used:
        _refuse_several(first.records, columns, path)
    sees = any(field in ("image", "video") for field, _ in seen)
    if found != "caption" and not sees and options.on_unmarked_image != "text":
        _refuse_unread_images(first, columns, path)
    seen = tuple(("conversation" if field == "turns" else field, name) for field, name in seen)
    has_marks = found in ("sharegpt", "messages", *WITHOUT_TURNS)
    unmarked = has_marks and any(_shows_unmarked(record, found, columns) for record in first.records)
    return Found(found, columns.only((*used, "turns")), seen, unmarked)


def _used_fields(found: str, votes: Iterable[str]) -> tuple[str, ...]:
    """Return the fields of all formats that occur, the main one first: each record is read in its own format."""
    forms = [found] if found in ("caption", "preference") else [found, *(each for each in votes if each != "caption")]
    return tuple(dict.fromkeys(field for each in forms for field in (*FIELDS_OF_ALL, *FORM_FIELDS[each])))


def _unknown(first: FirstRecords, columns: Columns, path: str) -> str:
    """Return the message for records that fit no format, with the problem of the first record."""
    if not first.records and first.reasons:
        return f"{path}: none of its first records can be used; the first: {first.reasons[0]}"
    why = next(filter(None, (_wrong_with(record, first.keys, columns) for record in first.records)), None)
    found = f"the first {why}" if why else "none of their keys is known"
    return (
        f"{path}: its records are of no known format: {found} ({_shown(first.keys)}); known are {FORMATS_HELP}. Name "
        "the fields with --data_columns"
    )


def _wrong_with(record: dict, keys: list[str], columns: Columns) -> str | None:
    """Describe the problem with a record of unknown format. keys: keys of all records, and names of columns."""
    for fields in (("turns",), ("texts",)):
        for _, name in present(record, columns, fields):
            try:
                as_turns(record[name], name)
            except DataError as error:
                return str(error)
            return f"has turns without a text under {name!r}: {short(record[name])}"
    questions, answers = (present(record, columns, fields) for fields in (QUESTIONS, ANSWERS))
    if questions or answers:
        name = (questions or answers)[0][1]
        half, other = ("a question", "answer") if questions else ("an answer", "question")
        texts = present(record, columns, ("text",))
        unread = [key for key in keys if key not in (*columns.all(), *GOOD_ANSWER_KEYS) and _is_said(record.get(key))]
        example = texts[0][1] if texts else unread[0] if len(unread) == 1 else "NAME"
        caption = f", or learn {example!r} alone with --data_format caption" if texts else ""
        return f"has {half} under {name!r} and no {other}: name it with --data_columns {other}={example}{caption}"
    named = _likely_columns(record, keys, columns)
    if named:
        return f"has keys that are not read: give --data_columns {','.join(named)}, if they are those fields"
    texts = present(record, columns, ("text",))
    if texts and isinstance(record[texts[0][1]], str):
        return f"has a text under {texts[0][1]!r} and no image under {either(columns.image)}, as a caption has"
    if texts:
        return f"has {short(record[texts[0][1]])} under {texts[0][1]!r}, expected a caption"
    if _has_media(record, columns):
        return "has an image, but its text is under no known key"
    return None


def _likely_columns(record: dict, keys: list[str], columns: Columns) -> list[str]:
    """Suggest pairs for --data_columns: keys that match a name except for capitals or a plural s, or else the only
    other key with a list of turns."""
    field_of_name = {name: field for field, names in columns.by_field().items() for name in names}
    field_of_name |= {name.removesuffix("s"): "turns" for name in columns.turns}
    odd = [name for name in keys if name not in columns.all()]
    pairs = {field_of_name[name.lower()]: name for name in odd if name.lower() in field_of_name}
    if pairs:
        return [f"{'conversations' if field == 'turns' else field}={name}" for field, name in pairs.items()]
    lists = [name for name, value in record.items() if name not in field_of_name and _begins_with_turn(value, name)]
    return [f"conversations={lists[0]}"] if len(lists) == 1 else []


def _begins_with_turn(value: object, name: str) -> bool:
    try:
        turns = as_turns(value, name)
    except DataError:
        return False
    return is_turn_list(value) or (isinstance(value, (str, dict)) and is_turn_list(turns))


def _refuse_no_preferences(first: FirstRecords, columns: Columns, options: SourceOptions, path: str) -> None:
    """Raise ConfigError if none of the first records has two answers or, if labels are read, a labelled answer."""
    if options.are_labelled and any(key in record for record in first.records for key in GOOD_ANSWER_KEYS):
        return
    labelled = ", or an answer with a label" if options.are_labelled else ""
    packed = ('"chosen"' in str(record.get("text")) for record in first.records)
    if not any(present(record, columns, ("chosen", "rejected")) for record in first.records) and not any(packed):
        found = f"the first: {first.reasons[0]}" if first.reasons else _shown(first.keys)
        raise ConfigError(
            f"{path}: none of its first records has a chosen and a rejected answer{labelled} ({found}). Supported: "
            f"{FORMS}" + (f"; {LABELLED_FORMS}" if labelled else "") + ". If the fields have other names, give "
            "--data_columns chosen=NAME,rejected=NAME"
        )


def _labelled_answers(first: FirstRecords, columns: Columns, path: str) -> tuple[str, ...]:
    """Return the fields of single labelled answers. They include `answer` only if no record has an answer elsewhere:
    next to another answer, it is usually a reference. Raises ConfigError if questions have no answer."""
    own = ("completion", "output", "label")
    if any(present(record, columns, ("turns", *PAIRS, "response", *own[:2])) for record in first.records):
        return own
    answered = any(present(record, columns, ("answer",)) for record in first.records)
    asked = (record for record in first.records if present(record, columns, QUESTIONS))
    if not answered and (record := next(asked, None)):
        raise ConfigError(f"{path}: the first of its records {_wrong_with(record, first.keys, columns)}")
    return (*own, "answer")


def _is_said(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _refuse_several(records: list[dict], columns: Columns, path: str) -> None:
    """Raise ConfigError if most records have two fields that could be the question, or the answer."""
    for what, fields in (("question", QUESTIONS), ("answer", ANSWERS)):
        each = [present(record, columns, fields) for record in records]
        each = [pairs for pairs in each if pairs]
        several = [pairs for pairs in each if len(pairs) > 1 and {field for field, _ in pairs} != ALPACA_QUESTION]
        if len(several) > len(each) / 2:
            names = " and ".join(repr(name) for _, name in several[0])
            field, name = several[0][0]
            raise ConfigError(
                f"{path}: its records have {names}, and either could be the {what}: name one with --data_columns "
                f"{field}={name}"
            )


def _refuse_choices(first: FirstRecords, columns: Columns, path: str) -> None:
    """Raise ConfigError if answers are numbers or letters of choices that no question shows."""
    choices = next((key for key in first.keys if key in CHOICE_KEYS or _OPTION_KEY.fullmatch(key)), None)
    if choices is None:
        return
    answers: dict[str, list[object]] = {}
    for record in first.records:
        for _, name in present(record, columns, ANSWERS):
            answers.setdefault(name, []).append(record[name])
    for name, values in answers.items():
        if all(type(each) is int or (isinstance(each, str) and _CHOICE.fullmatch(each)) for each in values):
            raise ConfigError(
                f"{path}: its answers under {name!r}, such as {short(values[0])}, are numbers or letters of "
                f"{choices!r}, and the question does not show these: write questions and answers as texts, or name the "
                "answers with --data_columns answer=… to learn them unchanged"
            )


def _refuse_unread_images(first: FirstRecords, columns: Columns, path: str) -> None:
    """Raise ConfigError if no image is found, but an unread key seems to contain one."""
    known = set(columns.all())
    unread = [key for key in first.held if key not in known]
    others = [key for key in first.keys if key not in known and key not in unread]
    unread += [key for key in others if any(names_image(key, record.get(key)) for record in first.records)]
    if unread:
        some = ", ".join(map(repr, unread[:8]))
        one = f"name it with --data_columns image={unread[0]}"
        several = "put them in one list under 'images', or name the only one with --data_columns image=…"
        how = one if len(unread) == 1 else several
        if all(map(_IMAGE_NAME.fullmatch, unread)):
            how = "write the paths of the images themselves under 'image'"
        raise ConfigError(
            f"{path}: its records have no image under {either(columns.image)}, but probably one under {some}: {how}; "
            "--on_unmarked_image text learns the text alone"
        )


def names_image(key: str, value: object) -> bool:
    """True for a path with an image's ending, a path or URL under a key such as image_url, base64, and an image_id."""
    if isinstance(value, list) and value:
        value = value[0]
    if _IMAGE_NAME.fullmatch(key) and value not in (None, "", []):
        return True
    if not isinstance(value, str) or not value:
        return False
    if len(value) >= MIN_BASE64 and value.startswith(BASE64_BEGINNINGS):
        return True
    is_file = value.lower().endswith(IMAGE_ENDINGS) and "://" not in value
    return is_file or (_IMAGE_KEY.search(key) is not None and ("/" in value or value.lower().endswith(IMAGE_ENDINGS)))


def metadata_columns(columns: Columns, keys: Iterable[str], options: SourceOptions) -> Columns:
    """Return the columns of an image folder in the datasets library's form: keys that end in file_name(s) are paths."""
    named = {field for field, _ in options.columns}
    files = [key for key in keys if key.endswith(("file_name", "file_names"))]
    videos = tuple(key for key in files if key.startswith("video"))
    images = tuple(key for key in files if not key.startswith("video"))
    changed = {}
    if images and "image" not in named:
        changed["image"] = images
    if videos and "video" not in named:
        changed["video"] = videos
    return replace(columns, **changed)


def _seen(records: list[dict], columns: Columns, path: str) -> tuple[tuple[str, str], ...]:
    """Return the pairs of a field and its name that occur in the records, the id last."""
    seen: dict[tuple[str, str], None] = {}
    for field, names in columns.by_field().items():
        present = [[name for name in names if record.get(name) is not None] for record in records]
        present = list(filter(None, present))
        several = [names for names in present if len(names) > 1]
        # A single record with two names is a bad record. If most have two, the user must choose one.
        if len(several) > len(present) / 2:
            known = "conversations" if field == "turns" else field
            raise ConfigError(
                f"{path}: its records have {' and '.join(map(repr, several[0]))}, and either could be the {known}: "
                f"name one with --data_columns {known}={several[0][0]}"
            )
        seen.update(dict.fromkeys((field, name) for names in present for name in names))
    return tuple(sorted(seen, key=lambda pair: pair[0] == "id"))


def _format_of(record: dict, columns: Columns) -> str | None:
    for _, name in present(record, columns, ("turns",)):
        if record[name] not in ([], "", {}):
            return _format_of_turns(record, name, columns)
    if any(record[name] not in ([], "", {}) for _, name in present(record, columns, ("texts",))):
        return "texts" if _holds_turns(record, "texts", columns) else None
    has_question, has_answer = (bool(present(record, columns, fields)) for fields in (QUESTIONS, ANSWERS))
    if has_question and has_answer:
        return "question_answer"
    has_text = any(isinstance(record.get(name), str) for name in columns.text)
    return "caption" if has_text and _has_media(record, columns) and not has_question else None


def _format_of_turns(record: dict, name: str, columns: Columns) -> str | None:
    try:
        turn = as_turns(record[name], name)[0]
    except DataError:
        return None
    if turn.get("from") is None:
        return "messages"
    listed = any(record.get(name) is not None for name in ("images", "videos", *columns.system))
    single = any(record.get(name) is not None for name in ("image", "video"))
    return "sharegpt" if listed and not single else "llava"


def _holds_turns(record: dict, field: str, columns: Columns) -> bool:
    try:
        return all(as_turns(record[name], name) for _, name in present(record, columns, (field,)))
    except DataError:
        return False


def _has_media(record: dict, columns: Columns) -> bool:
    return any(record.get(name) not in (None, "", []) for name in (*columns.image, *columns.video))


def _shows_unmarked(record: dict, found: str, columns: Columns) -> bool:
    said = [record[name] for _, name in present(record, columns, FORM_FIELDS[found])]
    text = short(said) if not said else json.dumps(said)
    return _has_media(record, columns) and not any(
        mark in text for mark in (IMAGE_TOKEN, "<video>", '"type": "image', '"type": "video')
    )


def _shown(keys: Iterable[str]) -> str:
    keys = list(keys)
    more = f" and {len(keys) - 20} more" if len(keys) > 20 else ""
    return "keys found: " + (", ".join(map(short, keys[:20])) + more or "none")


def folder_of(path: str | None) -> str | None:
    """Return the real path of a folder; None for None."""
    return None if path is None else real_path(local_path(path))
