"""Preference records: a conversation that ends with a question, and a better and a worse answer to it."""

import itertools
import json
import math

from llava_ds.config.arguments import every_objective
from llava_ds.constants import DataError
from llava_ds.data.sources.fields import field_of, keys_of
from llava_ds.data.sources.options import EMPTY, QUESTIONS, REJECTED_IMAGES, Columns, short
from llava_ds.data.sources.record_forms import SAID_BY_MODEL, names_of, present, question_of, said
from llava_ds.data.sources.source import Source
from llava_ds.data.sources.turn_lists import as_turns, is_turn

MODEL_ROLES = ("gpt", "assistant")
FORMS = (
    'LLaVA and LLaMA-Factory: {"image": …, "conversations": [… the question], "chosen": text or message, '
    '"rejected": …}; '
    'TRL: {"images": […], "prompt": text or messages, "chosen": …, "rejected": …}, or chosen and rejected as whole '
    'conversations; RLHF-V: {"image": …, "question": text, "chosen": text, "rejected": text}, or these three as JSON '
    'under "text"; alpaca: "instruction" and "input" for the question; ms-swift: {"query": text, "response": text, '
    '"rejected_response": text}, or messages and a rejected_response'
)

LABELLED_FORMS = (
    'with a label true or false instead: TRL: {"images": […], "prompt": text or messages, "completion": …, '
    '"label": …}; ms-swift: {"messages": [… the answer], "label": …}; LLaMA-Factory: the same with "kto_tag"'
)
LABELS = {"true": 1.0, "1": 1.0, "false": -1.0, "0": -1.0}


def as_conversations(record: dict, source: Source) -> tuple[dict, dict]:
    """Split the record into two conversations that end with the chosen and with the rejected answer.

    Raises DataError with the reason if it is not a preference.
    """
    record, columns = _unpacked(record), source.columns
    if record.get(REJECTED_IMAGES) not in (None, "", []):
        raise DataError(f"has {REJECTED_IMAGES!r}: pairs whose answers have images of their own are not supported")
    question, answers = _question_and_answers(record, columns)
    if question is None or all(len(messages) > 1 for messages in answers):
        # The chosen and the rejected field are whole conversations that differ from the last answer on.
        pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*answers))
        shared = [message for message, _ in pairs]
        if question is None or (shared and _text_of(shared[-1]) == _text_of(question[-1])):
            question = shared
            answers = [messages[len(question) :] for messages in answers]
        if not question:
            raise DataError(f"has no question before its two answers ({keys_of(record)})")
    for name, messages in zip(("chosen", "rejected"), answers):
        if len(messages) != 1:
            raise DataError(f"has {len(messages)} messages under {name!r} after the question, expected one answer")
    used = (*names_of(columns, QUESTIONS), *columns.history, *columns.turns)
    rest = {name: value for name, value in record.items() if name not in used}
    turns = columns.turns[0]
    chosen, rejected = ({**rest, turns: [*question, *messages]} for messages in answers)
    return chosen, rejected


def _question_and_answers(record: dict, columns: Columns) -> tuple[list | None, list[list]]:
    """Return the messages of the question (None if the record has no field for them), and of both answers."""
    question = _question(record, columns)
    chosen_name, chosen = field_of(record, columns.chosen)
    if chosen is None and columns.response:
        response_name, chosen = field_of(record, columns.response)
        chosen_name = chosen_name if chosen is None else response_name
    rejected_name, rejected = field_of(record, columns.rejected)
    if rejected in (None, "", []):
        raise DataError(f"has no answer under {rejected_name!r} ({keys_of(record)}); a preference has both")
    rejected = _messages(rejected, rejected_name)
    if chosen is None and question and _role_of(question[-1]) in MODEL_ROLES:  # ms-swift: the turns end with the answer
        return (question[:-1], [question[-1:], rejected]) if len(rejected) == 1 else (None, [question, rejected])
    if chosen in (None, "", []):
        raise DataError(f"has no answer under {chosen_name!r} ({keys_of(record)}); a preference has both")
    return question, [_messages(chosen, chosen_name), rejected]


def pair_problem(record: dict, columns: Columns) -> str | None:
    """Return why a pair can't be learned as a conversation or caption, as a clause about the record; None if it is not
    a pair. columns: the columns that are read."""
    names = [name for name in Columns().chosen if name not in columns.all() and record.get(name) not in EMPTY]
    if not names and _unpacked(record) is record:
        return None
    name = names[0] if names else "text"
    instead = f", or name it with --data_columns answer={name} (conversations={name}, if it has the question)"
    return (
        f"has {short(record[name])} under {name!r}, part of a pair of answers ({_learned_by()} those); here it would "
        "not be learned as an answer: append it to the conversation" + (instead if names else "")
    )


def _learned_by() -> str:
    """Return the subject and verb of a clause: the objectives that learn pairs."""
    names = [name for name, traits in every_objective().items() if traits.pairs]
    return f"--objective {' or '.join(names)} learns" if names else "no objective learns"


def margin_of(record: dict, columns: Columns) -> float:
    """Return the chosen answer's margin from TRL's column, 0 if missing. Raises DataError."""
    name, margin = field_of(_unpacked(record), columns.margin)
    if margin is None:
        return 0.0
    try:
        number = math.nan if isinstance(margin, (bool, str)) else float(margin)
    except (TypeError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"has {short(margin)} under {name!r}, expected a number")
    return number


def has_label(record: dict, columns: Columns) -> bool:
    """Return True if labels are read and the record has a single answer, not a pair."""
    names = (*columns.chosen, *columns.rejected)
    return bool(columns.label) and _unpacked(record) is record and all(record.get(name) in EMPTY for name in names)


def label_of(record: dict, columns: Columns) -> float:
    """Return 1 for a good answer, -1 for a bad one. Raises DataError."""
    name, label = field_of(record, columns.label)
    number = LABELS.get(str(label).lower())
    if number is None:
        raise DataError(
            f"has {short(label)} under {name!r}, expected true or false for its only answer ({keys_of(record)})"
        )
    return number


def _unpacked(record: dict) -> dict:
    """Unpack RLHF-V's question and answers, stored as JSON in one text."""
    text = record.get("text")
    if "chosen" in record or not isinstance(text, str) or '"chosen"' not in text:
        return record
    try:
        inner = json.loads(text)
    except (ValueError, RecursionError):
        return record
    return {**record, **inner} if isinstance(inner, dict) else record


def _question(record: dict, columns: Columns) -> list | None:
    """Return the messages before the answers; None if no field has them."""
    turns_name, turns = field_of(record, columns.turns)
    asked = question_of(record, columns)
    if turns is None:
        return None if asked is None else [*asked[0], *asked[1]]
    if asked is not None and _text_of(asked[1][-1]) in map(_text_of, as_turns(turns, turns_name)):
        return [*asked[0], *asked[1]]  # the question again, as in UltraFeedback
    if asked is not None:
        names = [name for _, name in present(record, columns, QUESTIONS)]
        raise DataError(f"has both {turns_name!r} and {names[0]!r}: give the question once")
    return as_turns(turns, turns_name)


def _messages(answer: object, name: str) -> list[dict]:
    """Convert an answer (a text, a message, its parts, or a list of messages) to messages."""
    if isinstance(answer, str) and not answer.strip():
        raise DataError(f"has {short(answer)} under {name!r}, expected an answer")
    if not isinstance(answer, (str, dict, list)) or (isinstance(answer, dict) and not is_turn(answer)):
        raise DataError(f"has {short(answer)} under {name!r}, expected text, a message or a list of messages")
    return said(answer, name, SAID_BY_MODEL)


def _role_of(message: object) -> object:
    return message.get("from", message.get("role")) if isinstance(message, dict) else None


def _text_of(message: object) -> object:
    return message.get("value", message.get("content")) if isinstance(message, dict) else message
