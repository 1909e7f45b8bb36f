"""Convert records of all forms to records with a list of turns.

The fields of a source are detected from its first records (detect.py). If a record has several forms, the first one in
FORM_FIELDS is used: a conversation before texts, texts before a question and answer, and a caption last.
"""

import json
import math
from collections import Counter
from typing import Any

from llava_ds.constants import DataError
from llava_ds.data.sources.fields import checked_text, either, field_of, keys_of
from llava_ds.data.sources.options import ANSWERS, EMPTY, PAIRS, QUESTIONS, Columns, short
from llava_ds.data.sources.turn_lists import as_turns, is_turn, is_turn_list, loose_turns

Turns = list[dict[str, Any]]

ANSWER_KEYS = ("answer", "text", "ground_truth")  # keys of an answer that is an object: VQAv2, SQuAD and verl
CHOICE_KEYS = ("choices", "options")  # lists that an answer's number or letter may refer to
SAID_BY_HUMAN, SAID_BY_MODEL = "human", "gpt"


def as_conversation(record: dict, columns: Columns) -> dict:
    """Convert a record to one with a list of turns. The list, under the first name for turns, replaces other fields.

    Raises DataError with the reason.
    """
    if not columns.texts and not columns.has_questions:
        return _turns(record, columns)
    if any(record.get(name) not in EMPTY for name in columns.turns):
        return _turns(record, columns)
    if columns.texts and (not columns.has_questions or present(record, columns, ("texts",))):
        return _texts(record, columns)
    return _question_answer(record, columns)


def _turns(record: dict, columns: Columns) -> dict:
    name, value = field_of(record, columns.turns)
    if value is None or is_turn_list(value):
        return record  # it needs no conversion, or the reader rejects it
    return {**record, name: as_turns(value, name)}


def _texts(record: dict, columns: Columns) -> dict:
    name, value = field_of(record, columns.texts)
    if value is None:
        raise DataError(f"has no texts under {either(columns.texts)} ({keys_of(record)})")
    return _replaced(record, as_turns(value, name), (*columns.turns, *columns.texts), columns)


def _question_answer(record: dict, columns: Columns) -> dict:
    question, answer = question_of(record, columns), answer_of(record, columns)
    if question is None:
        raise DataError(f"has no question under {either(names_of(columns, QUESTIONS))} ({keys_of(record)})")
    earlier, asked = question
    if answer is None:
        raise DataError(f"has no answer under {either(names_of(columns, ANSWERS))} ({keys_of(record)})")
    used = (*columns.turns, *names_of(columns, (*QUESTIONS, *ANSWERS, "history")))
    return _replaced(record, [*earlier, *map(_not_learned, asked), *answer], used, columns)


def _replaced(record: dict, turns: Turns, used: tuple[str, ...], columns: Columns) -> dict:
    rest = {name: value for name, value in record.items() if name not in used}
    return {**rest, columns.turns[0]: turns}


# Fields of each form in addition to FIELDS_OF_ALL, in order of precedence.
FORM_FIELDS = {
    "llava": ("turns",),
    "sharegpt": ("turns",),
    "messages": ("turns",),
    "texts": ("texts",),
    "question_answer": (*QUESTIONS, *ANSWERS, "history"),
    "caption": ("text",),
    "preference": ("turns", "text", *QUESTIONS, "history", "response", *PAIRS),
}
FIELDS_OF_ALL = ("id", "image", "video", "system")
WITHOUT_TURNS = ("texts", "question_answer")  # forms whose fields become the turns
UNMARKED_FORMS = ("texts",)  # forms without marks, like captions: images always come first


def names_of(columns: Columns, fields: tuple[str, ...]) -> tuple[str, ...]:
    """All names of these fields."""
    return tuple(name for field in fields for name in getattr(columns, field))


def present(record: dict, columns: Columns, fields: tuple[str, ...]) -> list[tuple[str, str]]:
    """Pairs (field, its name in the record), for fields that have a value."""
    found = [(field, name) for field in fields for name in getattr(columns, field)]
    return [(field, name) for field, name in found if record.get(name) is not None]


def question_of(record: dict, columns: Columns) -> tuple[Turns, Turns] | None:
    """Return the turns of the history and of the question in QUESTIONS; None without a question."""
    found = present(record, columns, QUESTIONS)
    if not found:
        return None
    if {field for field, _ in found} == {"instruction", "input"}:
        texts = [_text(record[name], name) for _, name in found]
        asked: Turns = [{"from": SAID_BY_HUMAN, "value": "\n".join(filter(None, texts))}]
    else:
        found = [pair for pair in found if pair[0] != "input" or record[pair[1]] != ""] or found
        _refuse_several(found, "question")
        name = found[0][1]
        asked = said(record[name], name, SAID_BY_HUMAN)
    name, history = field_of(record, columns.history) if columns.history else ("history", None)
    return (as_turns(history, name) if history not in EMPTY else []), asked


def answer_of(record: dict, columns: Columns) -> Turns | None:
    """Return the turns that answer the question, or None. Raises DataError if an answer is not text."""
    found = present(record, columns, ANSWERS)
    if not found:
        return None
    _refuse_several(found, "answer")
    [(field, name)] = found
    value = record[name]
    if field == "answer" and not is_turn(value) and not _holds_turns(value):
        texts = accepted_answers(value, name)
        value = Counter(texts).most_common(1)[0][0]  # the first among equal counts
    if isinstance(value, str) and not value.strip():
        raise DataError(f"has {short(value)} under {name!r}, expected an answer")
    return said(value, name, SAID_BY_MODEL)


def all_answers(record: dict, columns: Columns) -> list[str] | None:
    """All accepted answers of a record that lists several, otherwise None."""
    found = [name for _, name in present(record, columns, ("answer",))]
    texts = accepted_answers(record[found[0]], found[0]) if found else []
    return texts if len(texts) > 1 else None


def accepted_answers(value: object, name: str) -> list[str]:
    """Collect all answers under a name: a text or a number, an object with an answer, or a list of these. Raises
    DataError."""
    if isinstance(value, str) and name.endswith("s") and value.lstrip().startswith("["):
        value = as_answer_list(value, name)  # CSV stores lists as text
    if isinstance(value, dict):
        key = next((key for key in ANSWER_KEYS if value.get(key) is not None), None)
        if key is None:
            raise DataError(f"has {short(value)} under {name!r}, expected an answer")
        return accepted_answers(value[key], name)
    if isinstance(value, list):
        value = [each for each in value if each is not None]
        if not value:
            raise DataError(f"has an empty list under {name!r}, expected an answer")
        return [text for each in value for text in accepted_answers(each, name)]
    return [_text(value, name)]


def as_answer_list(text: str, name: str) -> list:
    """Parse a JSON list of answers. Raises DataError."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"has a text under {name!r} that is not a JSON list: {error} ({short(text)})") from None
    return found if isinstance(found, list) else [text]


def said(value: object, name: str, role: str) -> Turns:
    """Convert a field's value to turns: a text, a message, a list of messages, or a list of parts. Raises DataError."""
    value = loose_turns(value)
    if is_turn(value):
        return [value]
    if is_turn_list(value):
        return value
    if isinstance(value, list) and value and all(map(_is_part, value)):
        return [{"from": role, "value": value}]
    return [{"from": role, "value": _text(value, name)}]


def _holds_turns(value: object) -> bool:
    value = loose_turns(value)
    return is_turn_list(value) or (isinstance(value, list) and bool(value) and _is_part(value[0]))


def _is_part(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("type"), str)


def _not_learned(turn: object) -> object:
    """Exclude a question's message from learning, because TRL learns only the completion. A weight of the message
    itself takes precedence."""
    if not is_turn(turn) or turn.get("from", turn.get("role")) in ("human", "user", "system", "developer", "tool"):
        return turn
    return {"weight": 0, **turn}


def _text(value: object, name: str) -> str:
    if type(value) is int or (isinstance(value, float) and math.isfinite(value)):
        return str(value)
    return checked_text(value, lambda: f"has {short(value)} under {name!r}, expected text")


def _refuse_several(found: list[tuple[str, str]], what: str) -> None:
    if len(found) > 1:
        (field, first), (_, second), *_ = found
        raise DataError(
            f"has both {first!r} and {second!r}, and either could be the {what}: name one with --data_columns "
            f"{field}={first}"
        )
