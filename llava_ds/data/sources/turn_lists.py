"""Convert the forms of turns in tables to lists of turns: JSON text, objects of lists, pairs of question and answer."""

import json

from llava_ds.constants import DataError
from llava_ds.data.sources.options import short

# Keys of an object with a question and its answer, in the Cauldron, ms-swift, and plain tables.
PAIR_KEYS = (
    ("user", "assistant"),
    ("human", "assistant"),
    ("human", "gpt"),
    ("question", "answer"),
    ("query", "response"),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("instruction", "output"),
)
ROLE_KEYS = ("from", "role")


def as_turns(value: object, name: str) -> list:
    """Convert the value of a record's key to turns. Raises DataError with the problem of the value."""
    value = _decoded(value, name)
    if isinstance(value, dict):
        value = _rows(value, name)
    if not isinstance(value, list):
        raise DataError(f"has {short(value)} under {name!r}, expected a list of turns")
    if not value:
        raise DataError(f"has an empty list under {name!r}")
    if is_turn(value[0]):
        return value
    turns: list = []
    for i, each in enumerate(value):
        is_json = isinstance(each, str) and each.lstrip().startswith("{")
        turns += _turns_of(_decoded(each, name) if is_json else each, i, name)
    return turns


def loose_turns(value: object) -> object:
    """Parse a list of turns from JSON text or an object of lists; other values, such as an answer's text, are returned
    unchanged."""
    found = value
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            return value
    if isinstance(found, dict) and any(isinstance(found.get(key), list) for key in ROLE_KEYS):
        try:
            found = _rows(found, "")
        except DataError:
            return value
    return found if isinstance(found, list) and found and all(map(is_turn, found)) else value


def is_turn(value: object) -> bool:
    """True for an object with a role."""
    return isinstance(value, dict) and (isinstance(value.get("from"), str) or isinstance(value.get("role"), str))


def is_turn_list(value: object) -> bool:
    """True for a list that begins with a turn."""
    return isinstance(value, list) and bool(value) and is_turn(value[0])


def _decoded(value: object, name: str) -> object:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except RecursionError:
        raise DataError(f"has a text under {name!r} that is nested too deeply") from None
    except ValueError as error:
        raise DataError(f"has a text under {name!r} that is not JSON: {error} ({short(value)})") from None


def _rows(value: dict, name: str) -> list[dict]:
    """Convert a table's object of lists, {"from": [...], "value": [...]}, to a list of objects."""
    columns = {key: each for key, each in value.items() if each is not None}
    odd = [key for key, each in columns.items() if not isinstance(each, list)]
    if odd or not columns:
        found = ", ".join(map(short, value)) or "no key"
        raise DataError(f"has one object under {name!r} (with {found}), expected a list of turns")
    lengths = {key: len(each) for key, each in columns.items()}
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{number} under {key!r}" for key, number in lengths.items())
        raise DataError(f"has lists of different lengths in {name!r}: {found}")
    return [dict(zip(columns, cells)) for cells in zip(*columns.values())]


def _turns_of(value: object, i: int, name: str) -> list:
    """Convert an item to one turn, or to the two turns of a pair."""
    if isinstance(value, list) and len(value) == 2 and all(isinstance(each, str) for each in value):
        return [{"from": "human", "value": value[0]}, {"from": "gpt", "value": value[1]}]
    if not isinstance(value, dict):
        raise DataError(f"has {short(value)} as number {i} of {name!r}, expected an object with a role")
    pair = next((keys for keys in PAIR_KEYS if all(value.get(key) is not None for key in keys)), None)
    if pair is None and not is_turn(value):
        roles = [key for key in ROLE_KEYS if key in value]
        found = f"whose {roles[0]!r} is {short(value[roles[0]])}" if roles else "without 'from' or 'role'"
        keys = ", ".join(map(short, value)) or "none"
        raise DataError(
            f"has an object {found} as number {i} of {name!r} (its keys: {keys}), expected {{'from', 'value'}} or "
            "{'role', 'content'}, or a pair such as {'user', 'assistant'}"
        )
    if pair is None:
        return [value]
    more = {key: each for key, each in value.items() if key not in pair and each is not None}
    return [{"from": "human", "value": value[pair[0]]}, {"from": "gpt", "value": value[pair[1]], **more}]
