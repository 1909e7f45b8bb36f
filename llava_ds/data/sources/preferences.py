"""Preference records: a conversation that ends with a question, and two answers to it, one better than the other."""

import itertools
import json
import math

from llava_ds.constants import DataError
from llava_ds.data.sources.fields import field_of, is_text, keys_of
from llava_ds.data.sources.options import short
from llava_ds.data.sources.source import Source

QUESTIONS = ("prompt", "question")  # TRL's and RLHF-V's names of a question that is a text, or TRL's list of messages
FORMS = (
    'LLaVA and LLaMA-Factory: {"image": …, "conversations": [… the question], "chosen": text or message, '
    '"rejected": …}; '
    'TRL: {"images": […], "prompt": text or messages, "chosen": …, "rejected": …}, or chosen and rejected as whole '
    'conversations; RLHF-V: {"image": …, "question": text, "chosen": text, "rejected": text}, or these three as JSON '
    'under "text"'
)


def as_conversations(record: dict, source: Source) -> tuple[dict, dict]:
    """Return the record twice, as conversations that end with the chosen and with the rejected answer.

    Raises DataError with the reason where it is no preference.
    """
    record = _unpacked(record)
    for name in ("chosen", "rejected"):
        if record.get(name) in (None, "", []):
            raise DataError(f"has no answer under {name!r} ({keys_of(record)}); a preference has both")
    answers = [_messages(record[name], name) for name in ("chosen", "rejected")]
    question = _question(record, source)
    if question is None:  # both are whole conversations, which part at the last answer
        pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*answers))
        question = [message for message, _ in pairs]
        answers = [messages[len(question) :] for messages in answers]
        if not question:
            raise DataError(f"has no question before its two answers ({keys_of(record)})")
    for name, messages in zip(("chosen", "rejected"), answers):
        if len(messages) != 1:
            raise DataError(f"has {len(messages)} messages under {name!r} after the question, expected one answer")
    rest = {name: value for name, value in record.items() if name not in (*QUESTIONS, *source.columns.turns)}
    turns = source.columns.turns[0]
    chosen, rejected = ({**rest, turns: [*question, *messages]} for messages in answers)
    return chosen, rejected


def margin_of(record: dict) -> float:
    """By how much the chosen answer is better, as TRL's column says it; 0 without one. Raises DataError."""
    margin = _unpacked(record).get("margin")
    if margin is None:
        return 0.0
    if isinstance(margin, bool) or not isinstance(margin, (int, float)) or not math.isfinite(margin):
        raise DataError(f"has {short(margin)} under 'margin', expected a number")
    return float(margin)


def _unpacked(record: dict) -> dict:
    """RLHF-V keeps question and answers as JSON in one text."""
    text = record.get("text")
    if "chosen" in record or not isinstance(text, str) or '"chosen"' not in text:
        return record
    try:
        inner = json.loads(text)
    except (ValueError, RecursionError):
        return record
    return {**record, **inner} if isinstance(inner, dict) else record


def _question(record: dict, source: Source) -> list | None:
    """The messages before the answers, or None where the record has no field for them."""
    _, turns = field_of(record, source.columns.turns)
    name, prompt = field_of(record, QUESTIONS)
    if turns is not None and prompt is not None:
        raise DataError(f"has both {source.columns.turns[0]!r} and {name!r}: give the question once")
    found = turns if prompt is None else prompt
    if found is None:
        return None
    if isinstance(found, str):
        return [{"from": "human", "value": found}]
    if not isinstance(found, list) or not found:
        raise DataError(f"has {short(found)} for its question, expected a text or a list of messages")
    return found


def _messages(answer: object, name: str) -> list[dict]:
    """An answer that is a text, a message or a list of messages."""
    if isinstance(answer, str):
        if not is_text(answer) or not answer.strip():
            raise DataError(f"has {short(answer)} under {name!r}, expected an answer")
        return [{"from": "gpt", "value": answer}]
    messages = answer if isinstance(answer, list) else [answer]
    if not all(isinstance(message, dict) for message in messages):
        raise DataError(f"has {short(answer)} under {name!r}, expected a text, a message or a list of messages")
    return messages
