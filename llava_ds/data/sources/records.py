"""Convert one record's JSON text to a sample. Records are untrusted, so structure, types and paths are checked.

These functions run for every record, in worker processes. They raise only DataError with the reason, and make system
calls only for images and videos.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace

from llava_ds.constants import IMAGE_TOKEN, DataError
from llava_ds.data.sample import (
    BOX_MARK,
    IMAGE_LEFT_OUT,
    IMAGE_PREPENDED,
    MARK_AS_TEXT,
    REF_MARK,
    Message,
    Sample,
)
from llava_ds.data.sources.embedded import REJECTED
from llava_ds.data.sources.fields import (
    MAX_FILES_PER_RECORD,
    checked_text,
    either,
    field_of,
    is_text,
    json_of,
    keys_of,
    listed,
    to_media,
    videos,
)
from llava_ds.data.sources.media_parts import Mark
from llava_ds.data.sources.objects import MARKS, OBJECTS, fill_marks, objects_of
from llava_ds.data.sources.options import (
    ANY_RECORD_WEIGHT,
    EMPTY,
    GOOD_ANSWER_KEYS,
    RECORD_WEIGHT_KEYS,
    TEMPLATE_KWARGS,
    TOOLS,
    short,
)
from llava_ds.data.sources.preferences import as_conversations, has_label, label_of, margin_of, pair_problem
from llava_ds.data.sources.record_forms import UNMARKED_FORMS, as_conversation
from llava_ds.data.sources.source import Source
from llava_ds.data.sources.turn_fields import gives_weights, join_calls, read_tools, to_json, weigh
from llava_ds.data.sources.turn_lists import is_turn_list
from llava_ds.data.sources.turns import VIDEO_TOKEN, is_call, marks_videos, read_turn, with_marks
from llava_ds.data.special_tokens import LITERAL_IMAGE

AUDIO_TOKEN, AUDIO_KEYS = "<audio>", ("audio", "audios")  # names in LLaMA-Factory and ms-swift
MAX_ID = 1000  # characters of an id; a longer one is truncated and gets a hash

_DECODER = json.JSONDecoder()
_UNMARKED = ": make them equal, or see --on_unmarked_image"
_SHOWN = {"image": "images", "video": "videos"}


def to_sample(text: str, source: Source, index: int) -> Sample:
    """Convert a record of the source to a sample. Raises DataError with the reason if it can't be used."""
    try:
        record = _DECODER.decode(text)
    except RecursionError:
        raise DataError("is nested too deeply") from None
    except ValueError as error:  # JSONDecodeError, or a number with too many digits for Python
        raise DataError(f"can't be read as JSON: {error}") from None
    if not isinstance(record, dict):
        raise DataError(f"is a {type(record).__name__}, expected an object with {source.columns.turns[0]!r}")
    if REJECTED in record:
        raise DataError(str(record[REJECTED]) if isinstance(record[REJECTED], str) else "has keys reserved for readers")
    if source.format != "preference":
        return _sample(record, source, index)
    if has_label(record, source.columns):
        return replace(_sample(record, source, index), margin=label_of(record, source.columns))
    chosen, rejected = (_sample(each, source, index) for each in as_conversations(record, source))
    if chosen.messages == rejected.messages:
        raise DataError("its chosen and rejected answers are the same")
    return replace(chosen, rejected=rejected.messages, margin=margin_of(record, source.columns))


def _sample(record: dict, source: Source, index: int) -> Sample:
    """Convert a record with one conversation, or a caption."""
    unmarked = ""
    if source.format == "caption":
        messages, marks, named = _caption(record, source)
    else:
        _refuse_bad_answer(record, source)
        messages, marks, named = _conversation(record, source)
        unmarked = _settle_unmarked(messages, marks, named, source)
    media = tuple(to_media(mark, source) for mark in _matched(marks, named, source)) if marks else ()
    if sum(len(each.refs) for each in media) > MAX_FILES_PER_RECORD:
        raise DataError(f"names more than {MAX_FILES_PER_RECORD:,} images")
    refs, boxes = (), ()
    if any([BOX_MARK in each.text or REF_MARK in each.text for each in messages]):
        refs, boxes = objects_of(record, messages, sum(each.kind == "image" for each in media), source.bbox_type)
        if not refs and not boxes:  # every mark is plain text
            messages = [each.with_text(fill_marks(each.text, str)) for each in messages]
    kind = record.get("kind")
    return Sample(
        _id(record, source, index),
        tuple(messages),
        media,
        kind if is_text(kind) else "",
        unmarked,
        refs=refs,
        boxes=boxes,
        tools=to_json(read_tools(record[TOOLS])) if TOOLS in record else "",
        template_kwargs=json_of(record[TEMPLATE_KWARGS], TEMPLATE_KWARGS) if TEMPLATE_KWARGS in record else "",
        unread=unread_keys(record, source),
        other_columns=_other_columns(record, source) if source.other_columns else "",
    )


def _refuse_bad_answer(record: dict, source: Source) -> None:
    """Raise DataError for a record marked as a bad answer."""
    if source.format == "preference":
        return
    for key in GOOD_ANSWER_KEYS:
        if key in record and str(record[key]).lower() == "false" and key not in source.columns.all():
            raise DataError(
                f"has {short(record[key])} under {key!r}, so its answer is a bad one, as in data for KTO: leave such "
                "records out, or the key if it means something else"
            )


def unread_keys(record: dict, source: Source) -> tuple[str, ...]:
    """List the keys of a record, and columns of its table, that have a value and are not read. Raises DataError if the
    record holds a pair of answers."""
    known, found = source.read_keys, source.unread_columns
    if not record.keys() <= known:
        found += tuple(key for key in record if key not in known and record[key] not in EMPTY)
        if problem := pair_problem(record, source.columns):
            raise DataError(problem)
    if source.other_columns:
        return ()
    if "weight" in known and not record.keys().isdisjoint(ANY_RECORD_WEIGHT):
        values = [(key, record.get(key)) for key in RECORD_WEIGHT_KEYS]
        found += tuple(key for key, value in values if value not in (None, "", []) and not gives_weights(key, value))
    return found


def _other_columns(record: dict, source: Source) -> str:
    """Serialize a record without its id, conversation and media."""
    columns = source.columns
    left_out = {*columns.id, *columns.turn_lists, *columns.prompt, *columns.completion, *columns.image, *columns.video}
    return json.dumps({key: value for key, value in record.items() if key not in left_out})


def _conversation(record: dict, source: Source) -> tuple[list[Message], list[Mark], dict[str, list]]:
    """Return the messages, their marks, and the images and videos that the record lists."""
    columns = source.columns
    _, turns = field_of(record, columns.turns)
    if not is_turn_list(turns):
        record = as_conversation(record, columns)
        _, turns = field_of(record, columns.turns)
    if not isinstance(turns, list) or not turns:
        raise DataError(f"has no list under {either(columns.turns)} ({keys_of(record)})")
    named = {"image": listed(record, columns.image), "video": videos(record, columns.video)}
    has_videos = marks_videos(named, source)
    messages: list[Message] = []
    marks: list[Mark] = []
    name, system = field_of(record, columns.system)
    if system is not None and system != "":
        text = checked_text(system, lambda: f"has {short(system)} under {name!r}, expected text")
        messages.append(Message("system", with_marks(text, marks, has_videos=False)))
    said = [read_turn(turn, i, marks, has_videos) for i, turn in enumerate(turns)]
    weigh(said, turns, record)
    for i, message in enumerate(said):
        if message.role == "system" and messages:
            raise DataError(f"turn {i} is from 'system': expected that once, at the beginning")
        if message.role == "tool" and not any(message.role == "gpt" for message in messages):
            raise DataError(f"turn {i} is the result of a tool, but no answer before it calls one")
        if message.tool_calls and messages and messages[-1].role == "gpt" and is_call(turns[i]):
            _add_calls(messages[-1], message, i)
        else:
            messages.append(message)
    if record.get(OBJECTS) and any(MARKS.search(f"{each.thought} {each.tool_calls}") for each in messages):
        raise DataError(f"has marks for {OBJECTS!r} in a thought or a tool call: marks are only for texts")
    for key in AUDIO_KEYS:
        if record.get(key) and any(AUDIO_TOKEN in message.text for message in messages):
            raise DataError(
                f"names sounds under {key!r}, and has {AUDIO_TOKEN} marks for them: sounds are not supported"
            )
    if messages[0].role == "system" and IMAGE_TOKEN in messages[0].text:
        raise DataError(
            f"has an {IMAGE_TOKEN} mark in its system message, where images can't be (\\{IMAGE_TOKEN} is the word)"
        )
    return messages, marks, named


def _add_calls(answer: Message, message: Message, i: int) -> None:
    """Add the calls of turn i to the answer before it."""
    if message.thought is not None or message.weight != answer.weight:
        raise DataError(f"turn {i} continues the answer before it, but has another weight or its own thought")
    answer.tool_calls = join_calls(answer.tool_calls, message.tool_calls)


def _settle_unmarked(messages: list[Message], marks: list[Mark], named: dict[str, list], source: Source) -> str:
    """Apply --on_unmarked_image to images without any marks, or marks without any images; return the outcome.

    Raises DataError if the flag says to refuse.
    """
    choice, images = source.on_unmarked_image, bool(named["image"] or named["video"])
    if bool(marks) == images:
        return ""
    if images and (choice == "prepend" or source.format in UNMARKED_FORMS):
        _prepend_marks(messages, marks, named)
        return IMAGE_PREPENDED
    if images and choice == "text":
        named |= {"image": [], "video": []}
        return IMAGE_LEFT_OUT
    if choice == "text" and all(mark.value is None for mark in marks):
        messages[:] = [each.with_text(each.text.replace(IMAGE_TOKEN, LITERAL_IMAGE)) for each in messages]
        marks.clear()
        return MARK_AS_TEXT
    if images or all(mark.value is None for mark in marks):
        _matched(marks, named, source)  # raises
    return ""


def _caption(record: dict, source: Source) -> tuple[list[Message], list[Mark], dict[str, list]]:
    columns = source.columns
    name, caption = field_of(record, columns.text)
    if caption is None:
        raise DataError(f"has no caption under {either(columns.text)} ({keys_of(record)})")
    text = checked_text(caption, lambda: f"has {short(caption)} under {name!r}, expected text")
    if text.startswith("{") and (problem := pair_problem(record, columns)):
        raise DataError(problem)
    marks: list[Mark] = []
    text = with_marks(text, marks, has_videos=False)
    if marks:
        raise DataError(f"has an {IMAGE_TOKEN} mark in its caption (\\{IMAGE_TOKEN} is the word)")
    named = {"image": listed(record, columns.image), "video": videos(record, columns.video)}
    messages = [Message("human", ""), Message("gpt", text)]
    _prepend_marks(messages, marks, named)
    if not marks:
        raise DataError(f"has no image under {either(columns.image)} ({keys_of(record)})")
    return messages, marks, named


def _prepend_marks(messages: list[Message], marks: list[Mark], named: dict[str, list]) -> None:
    """Put a mark for every image and video at the start of the first question."""
    marks += [Mark("image")] * len(named["image"]) + [Mark("video")] * len(named["video"])
    for i, message in enumerate(messages):
        if message.role == "human":
            line = "" if message.keeps_spaces else "\n"
            shown = line.join([IMAGE_TOKEN] * len(marks))
            messages[i] = message.with_text(f"{shown}{line}{message.text}" if message.text else shown)
            return
    raise DataError("has images, but no question to show them in")


def _matched(marks: list[Mark], named: dict[str, list], source: Source) -> Iterator[Mark]:
    """Assign images and videos to the marks. Raises DataError if the numbers differ."""
    if named["video"] and not named["image"] and not any(m.kind == "video" and m.value is None for m in marks):
        # LLaVA-NeXT marks videos with <image> as well.
        marks = [mark._replace(kind="video") if mark.value is None else mark for mark in marks]
    hint = "" if marks and (named["image"] or named["video"]) else _UNMARKED
    rest: dict[str, Iterator] = {}
    for kind, token in (("image", IMAGE_TOKEN), ("video", VIDEO_TOKEN)):
        asking = [mark for mark in marks if mark.kind == kind and mark.value is None]
        if len(asking) != len(named[kind]):
            names = getattr(source.columns, kind)
            words = f"\\{token}"
            if kind == "video" and not named["image"]:
                token, words = IMAGE_TOKEN, f"{words} or \\{IMAGE_TOKEN}"
            hint += f"; {words} is the word alone" if len(asking) > len(named[kind]) else ""
            raise DataError(
                f"names {len(named[kind])} {_SHOWN[kind]} under {either(names)}, but its text has {len(asking)} "
                f"{token} marks{hint}"
            )
        rest[kind] = iter(_in_order(named[kind], asking))
    return iter([m if m.value is not None else Mark(m.kind, next(rest[m.kind]), m.settings) for m in marks])


def _in_order(values: list, marks: list[Mark]) -> list:
    """Order the record's images or videos by the indices of their marks. Raises DataError unless the indices name each
    exactly once."""
    if not any([mark.index is not None for mark in marks]):
        return values
    indices = [mark.index for mark in marks]
    if sorted(-1 if index is None else index for index in indices) != list(range(len(marks))):
        raise DataError(
            f"has parts with 'index' {short(indices)} for its {len(marks)} {_SHOWN[marks[0].kind]}, expected each "
            "number from 0 once: fix them, or leave 'index' out to use the order of the parts"
        )
    return [values[index] for index in indices]


def _id(record: dict, source: Source, index: int) -> str:
    value = field_of(record, source.columns.id)[1]
    if value is None:
        return str(index)
    if isinstance(value, (int, float)):
        return str(value)
    text = checked_text(value, lambda: f"has {short(value)} for an id, expected text or a number")
    return text if len(text) <= MAX_ID else f"{text[: MAX_ID - 17]}…{hashlib.sha256(text.encode()).hexdigest()[:16]}"
