"""Fields of a turn besides its role and content: a thought, tool calls, the weight of the loss."""

import json
import re
from collections.abc import Sequence

from llava_ds.constants import IMAGE_TOKEN, DataError
from llava_ds.data.sample import Message
from llava_ds.data.sources.fields import checked_text, from_json, is_text
from llava_ds.data.sources.media_parts import refuse_unknown
from llava_ds.data.sources.options import ANY_RECORD_WEIGHT, EMPTY, RECORD_WEIGHT_KEYS, WEIGHT_KEYS, nearest, short
from llava_ds.data.special_tokens import LITERAL_IMAGE

THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
THOUGHT_PARTS = ("thinking", "reasoning")  # types of parts
SWITCHES = ("train", "training", "trainable", "loss_mask")  # keys that always give a weight
CALL_KEYS = ("tool_calls", "function_call")
MAX_WEIGHT = 1_000  # maximum loss weight: a larger one is a mistake, and 3e38 overflows float32
# Keys of turns in public data sets (WildChat, OpenAssistant, the Cauldron, ShareGPT) that give their origin and don't
# affect learning. `kind` is read elsewhere, for scored answers.
IGNORED_KEYS = (
    "id", "index", "turn", "turn_id", "turn_identifier", "message_id", "uuid", "parent_id", "source", "timestamp",
    "created_at", "language", "country", "hashed_ip", "header", "redacted", "toxic", "state", "model", "num_tokens",
    "kind",
)  # fmt: skip
_READ_KEYS = (
    "from", "value", "role", "content", *THOUGHT_KEYS, *CALL_KEYS, "name", "tool_call_id", *WEIGHT_KEYS,
)  # fmt: skip
_KNOWN = frozenset((*_READ_KEYS, *IGNORED_KEYS))
_CALL = '{"name": text, "arguments": an object, or one as JSON text}'
_LEADING_THOUGHT = re.compile(r"\s*<think>(.*?)</think>(.*)", re.DOTALL)


def refuse_unknown_keys(turn: dict, i: int) -> None:
    """Raise DataError for a key that is not read. The message names the most similar key that is read."""
    unknown = next((key for key, value in turn.items() if key not in _KNOWN and value not in EMPTY), None)
    if unknown is not None:
        raise DataError(f"turn {i} has the key {short(unknown)}: it is not read, {nearest(unknown, _READ_KEYS)}")


def read_fields(role: str, content: str | list, turn: dict, i: int) -> tuple[Message, str | list]:
    """Read a turn's fields, except its text and weight, into a message. Also returns the content without thoughts.
    role: as in Message. Raises DataError."""
    refuse_unknown_keys(turn, i)
    thought, content = _thought(turn, content, i)
    calls = [call for key in CALL_KEYS if turn.get(key) not in EMPTY for call in read_calls(turn[key], i)]
    if role != "gpt" and (thought is not None or calls):
        what = "a thought" if thought is not None else "tool calls"
        raise DataError(f"turn {i} has {what}, allowed in answers only, but is from {short(speaker(turn))}")
    name, call_id = (_short_text(turn, key, i) for key in ("name", "tool_call_id"))
    return Message(role, "", _as_words(thought), to_json(calls), name=name, call_id=call_id), content


def read_call(text: str, turn: dict, i: int) -> Message:
    """Read an answer without text. text: the turn's content, the JSON of one or more calls, possibly after a
    thought."""
    found = _LEADING_THOUGHT.match(text)
    thought, text = (found[1].strip("\n"), found[2]) if found else (None, text)
    rest = {key: value for key, value in turn.items() if key not in ("value", "content")}
    message, _ = read_fields("gpt", "", rest, i)
    if thought is not None:
        if message.thought is not None:
            raise DataError(f"turn {i} has two thoughts, one of them in its text: leave one out")
        message.thought = _as_words(thought)
    message.tool_calls = join_calls(message.tool_calls, to_json(read_calls(text, i)))
    return message


def join_calls(one: str, other: str) -> str:
    """Concatenate the calls of two answers in the form of Message.tool_calls."""
    return json.dumps([call for calls in (one, other) if calls for call in json.loads(calls)], ensure_ascii=False)


def to_json(values: Sequence[object]) -> str:
    """Serialize calls or tools to JSON, "" for none. Image marks inside become plain text."""
    if not values:
        return ""
    text = json.dumps(values, ensure_ascii=False)
    return _as_words(checked_text(text, lambda: "has tools or calls that are not valid Unicode"))


def _as_words(text: str | None) -> str | None:
    """Replace image marks by the characters <image>."""
    return text and text.replace(IMAGE_TOKEN, LITERAL_IMAGE)


def read_calls(value: object, i: int) -> list[dict]:
    """Normalize calls to OpenAI's form, with arguments as an object. value: one call or a list, or either as JSON
    text."""
    if isinstance(value, str):
        value = from_json(value, f"turn {i} has {short(value)} for its tool calls")
    calls = value if isinstance(value, list) else [value]
    return [_call(from_json(call, f"turn {i} has {short(call)} for a tool call"), i) for call in calls]


def _call(call: object, i: int) -> dict:
    outer = {k: v for k, v in call.items() if v not in EMPTY} if isinstance(call, dict) else {}
    inner = outer.get("function", {k: v for k, v in outer.items() if k in ("name", "arguments")})
    allowed = ("type", "id", "index", "function") if "function" in outer else ("type", "id", "index", *inner)
    inner_keys = ("name", "arguments")
    if (
        not isinstance(inner, dict)
        or not is_text(inner.get("name"))
        or any(key not in allowed for key in outer)
        or any(key not in inner_keys for key, value in inner.items() if value not in EMPTY)
        or outer.get("type", "function") != "function"
    ):
        raise DataError(f"turn {i} has the tool call {short(call)}, expected {_CALL}, alone or under 'function'")
    arguments = inner.get("arguments")
    if arguments in EMPTY:
        arguments = {}
    arguments = from_json(arguments, f"turn {i} has the arguments {short(arguments)} in a tool call")
    if not isinstance(arguments, dict):
        raise DataError(f"turn {i} has the arguments {short(arguments)} in a tool call, expected an object")
    more = {"id": str(outer["id"])} if "id" in outer else {}
    return {"type": "function", **more, "function": {"name": inner["name"], "arguments": arguments}}


def read_tools(value: object) -> list[dict]:
    """Normalize a record's tools to OpenAI's form. value: None, a list, or a list as JSON text; an item may be JSON
    text as well, and may omit {"type": "function", "function": …} around it."""
    if value in EMPTY:
        return []
    found = from_json(value, f"has {short(value)} under 'tools'")
    tools = []
    for tool in found if isinstance(found, list) else [None]:
        tool = from_json(tool, f"has the tool {short(tool)}")
        own = tool if not isinstance(tool, dict) or isinstance(tool.get("function"), dict) else _wrapped(tool)
        if not isinstance(own, dict) or not is_text(own["function"].get("name")):
            raise DataError(
                f"has {short(tool if isinstance(found, list) else value)} under 'tools', expected a list of "
                '{"type": "function", "function": {"name": text, "description": text, "parameters": schema}}'
            )
        tools.append(own)
    return tools


def _wrapped(tool: dict) -> dict:
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def weigh(messages: Sequence[Message], turns: Sequence[dict], record: dict) -> None:
    """Set the weight of each message from the fields of its turn and record. Raises DataError for contradictory
    weights, and if a question has a weight."""
    if record.keys().isdisjoint(ANY_RECORD_WEIGHT) and not any([len(turn) > 2 for turn in turns]):
        return
    listed = _listed_weights(record, messages)
    for i, (message, turn, own) in enumerate(zip(messages, turns, listed, strict=True)):
        given = [_weight(turn[key], f"turn {i} has", key) for key in WEIGHT_KEYS if turn.get(key) not in EMPTY]
        weight = _agreed_weight([*given, *([] if own is None else [own])], i)
        if weight and message.role != "gpt":
            raise DataError(
                f"turn {i} is not an answer and has the weight {weight:g}, but only answers are learned: give it "
                "weight 0, or none"
            )
        if weight is not None and message.role == "gpt":
            message.weight = weight


def _listed_weights(record: dict, messages: Sequence[Message]) -> list[float | None]:
    """Read the weight of each message from the record's fields, None if they don't give it.

    A list has an entry per turn, or per answer; true or false applies to all answers. Raises DataError for a list of
    another length.
    """
    found: list[float | None] = [None] * len(messages)
    answers = [i for i, message in enumerate(messages) if message.role == "gpt"]
    for key in RECORD_WEIGHT_KEYS:
        values = record.get(key)
        if not gives_weights(key, values):
            continue
        if isinstance(values, str):
            values = from_json(values, f"has {short(values)} under {key!r}")
        if not isinstance(values, list):
            values = [values] * len(answers)
        if len(values) not in (len(messages), len(answers)):
            raise DataError(
                f"has {len(values)} values under {key!r} for {len(messages)} turns with {len(answers)} answers, "
                "expected one for each turn, or for each answer"
            )
        for i, value in zip(range(len(messages)) if len(values) == len(messages) else answers, values):
            own = None if value is None else _weight(value, "has", key)
            found[i] = _agreed_weight([each for each in (found[i], own) if each is not None], i)
    return found


def gives_weights(key: str, value: object) -> bool:
    """True if the value of a key of RECORD_WEIGHT_KEYS is read as weights: a list, perhaps as JSON text, or a switch
    for all answers. Other numbers, under names such as "loss", may mean anything: they are reported as unread."""
    if isinstance(value, str):
        return value.startswith("[")
    if isinstance(value, list):
        return bool(value)
    return isinstance(value, bool) or (key in SWITCHES and isinstance(value, (int, float)))


def _agreed_weight(weights: list[float], i: int) -> float | None:
    """Return the weight that all fields agree on; None without a weight."""
    if len(set(weights)) > 1:
        raise DataError(
            f"turn {i} has the weights {' and '.join(f'{each:g}' for each in weights)}: they contradict each other"
        )
    return weights[0] if weights else None


def _weight(value: object, where: str, key: str) -> float:
    if not isinstance(value, (bool, int, float)) or not 0 <= value <= MAX_WEIGHT:
        raise DataError(
            f"{where} {short(value)} under {key!r}, expected true, false or a weight from 0 to {MAX_WEIGHT:,}"
        )
    return float(value)


def _thought(turn: dict, content: str | list, i: int) -> tuple[str | None, str | list]:
    """Return the thought in a turn's fields or parts, and the content without these parts."""
    found = [turn[key] for key in THOUGHT_KEYS if turn.get(key) not in EMPTY]
    if isinstance(content, list):
        thoughts = [part for part in content if isinstance(part, dict) and part.get("type") in THOUGHT_PARTS]
        if thoughts and (len(thoughts) > 1 or content[0] is not thoughts[0]):
            raise DataError(f"turn {i} has thoughts between its parts, expected one thought before the answer")
        found += [_text_of_part(part, i) for part in thoughts]
        content = content[len(thoughts) :]
    for each in found:
        if not is_text(each):
            raise DataError(f"turn {i} has {short(each)} for a thought, expected text")
    if len(set(found)) > 1:
        raise DataError(f"turn {i} has two thoughts, {short(found[0])} and {short(found[1])}: give it once")
    return (found[0] if found else None), content


def _text_of_part(part: dict, i: int) -> object:
    names = (*THOUGHT_KEYS, "text", "content")
    refuse_unknown(part, ("type", *names, "signature"), f"turn {i} has a part of type {part['type']!r}")
    texts = [part[key] for key in names if part.get(key) not in EMPTY]
    if len(texts) != 1:
        raise DataError(f"turn {i} has the part {short(part)}, expected text under {part['type']!r}")
    return texts[0]


def _short_text(turn: dict, key: str, i: int) -> str:
    value = turn.get(key)
    if value in EMPTY:
        return ""
    if not is_text(value):
        raise DataError(f"turn {i} has {short(value)} under {key!r}, expected text")
    return value


def speaker(turn: dict) -> object:
    """Return the role that a turn gives."""
    return turn.get("from") if turn.get("from") is not None else turn.get("role")
