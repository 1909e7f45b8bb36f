"""Read one turn of a record: its role, its text with marks, and the images and videos of its parts."""

import re

from llava_ds.constants import IMAGE_TOKEN, DataError
from llava_ds.data.sample import Message
from llava_ds.data.sources.fields import is_text
from llava_ds.data.sources.media_parts import INDEX, KINDS, SOUNDS, Mark, read_mark, refuse_unknown
from llava_ds.data.sources.options import short
from llava_ds.data.sources.source import Source
from llava_ds.data.sources.turn_fields import read_call, read_fields, speaker
from llava_ds.data.special_tokens import LITERAL_IMAGE, join_parts

VIDEO_TOKEN = "<video>"
TEXTS = ("text", "input_text", "output_text")  # types of text parts
ROLES = {
    "human": "human",
    "user": "human",
    "gpt": "gpt",
    "assistant": "gpt",
    "chatgpt": "gpt",
    "bard": "gpt",
    "bing": "gpt",
    "model": "gpt",
    "system": "system",
    "developer": "system",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "tool_response": "tool",
    "function_response": "tool",
    "ipython": "tool",
    "function_call": "call",
    "tool_call": "call",
}
_TEXT_KEYS = (("from", "value"), ("role", "content"))  # in LLaVA's and ShareGPT's form; in OpenAI's form

IMAGE_MARK = Mark("image")
# A mark and the backslashes before it. An odd number of them makes it plain text; each pair is one backslash.
_MARK = re.compile(rf"(\\*)({IMAGE_TOKEN}|{VIDEO_TOKEN})")


def read_turn(turn: object, i: int, marks: list[Mark], has_videos: bool) -> Message:
    """Read a message from a turn in the form of LLaVA and ShareGPT, or of OpenAI. Appends its marks to `marks`.

    turn_fields.weigh sets its weight later. Raises DataError for keys that are not read.
    """
    role = content = None
    if isinstance(turn, dict):
        role, content = turn.get("from"), turn.get("value")
        if role is None:
            role, content = turn.get("role"), turn.get("content")
    is_plain = isinstance(content, str) and len(turn) == 2
    if content is None and isinstance(turn, dict) and (turn.get("tool_calls") or turn.get("function_call")):
        content = ""
    if isinstance(content, str):
        try:
            content.isascii() or content.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"turn {i} is not valid Unicode: {error}") from None
    elif not isinstance(content, list) or role is None:
        expected = "{'from': 'human' or 'gpt', 'value': text} or {'role': 'user' or 'assistant', 'content': text}"
        raise DataError(f"turn {i} is {short(turn)}, expected {expected}")
    known = ROLES.get(role) if isinstance(role, str) else None
    if known is None:
        expected = "expected 'human' or 'gpt', or 'user' or 'assistant', or 'tool'"
        raise DataError(f"turn {i} is from {short(role)}, {expected}")
    if known == "call":
        if not isinstance(content, str):
            raise DataError(f"turn {i}, from {short(role)}, has {short(content)}, expected the JSON of a call")
        return read_call(content, turn, i)
    if is_plain:
        return Message(known, with_marks(content, marks, has_videos) if "<" in content else content)
    _refuse_two_spellings(turn, i)
    message, content = read_fields(known, content, turn, i)
    if isinstance(content, str):
        message.text = with_marks(content, marks, has_videos)
    else:
        message.text, message.keeps_spaces = read_parts(content, i, marks, has_videos)
    return message


def is_call(turn: dict) -> bool:
    """True for a turn whose role marks its content as calls. They belong to the answer before it, as in ms-swift."""
    return ROLES[speaker(turn)] == "call"


def _refuse_two_spellings(turn: dict, i: int) -> None:
    """Raise DataError for a turn that gives its role or its text twice, with different values."""
    both = [[turn.get(key) for key in pair] for pair in zip(*_TEXT_KEYS)]
    (one, other), texts = both
    roles_differ = None not in (one, other) and ROLES.get(one) != ROLES.get(other)
    if roles_differ or (None not in texts and texts[0] != texts[1]):
        raise DataError(f"turn {i} is {short(turn)}: it gives its role or its text twice, with different values")


def marks_videos(named: dict[str, list], source: Source) -> bool:
    """True if <video> in a record's text is a mark. In a LLaVA record without videos it is text, such as HTML, because
    LLaVA has no such mark."""
    return bool(named["video"]) or source.format != "llava"


def with_marks(text: str, marks: list[Mark], has_videos: bool) -> str:
    """Write every mark as <image>, unescape marks that are plain text, and append the marks to the list. has_videos:
    <video> is also a mark."""
    has_videos = has_videos and VIDEO_TOKEN in text
    if "\\<" not in text and not has_videos:
        marks += [IMAGE_MARK] * text.count(IMAGE_TOKEN)
        return text

    def read(found: re.Match) -> str:
        backslashes, mark = found.groups()
        if mark == VIDEO_TOKEN and not has_videos:
            return found[0]
        half = backslashes[: len(backslashes) // 2]
        if len(backslashes) % 2:
            return half + (LITERAL_IMAGE if mark == IMAGE_TOKEN else mark)
        marks.append(Mark("video") if mark == VIDEO_TOKEN else IMAGE_MARK)
        return half + IMAGE_TOKEN

    return _MARK.sub(read, text)


def read_parts(parts: list, i: int, marks: list[Mark], has_videos: bool) -> tuple[str, bool]:
    """Join the parts of a message: texts in order, and a mark for each image and video. Also returns
    Message.keeps_spaces.

    If a text contains image marks itself, the message takes LLaVA's form: every image on a separate line.
    """
    pieces: list[str | None] = []
    has_marks = False
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        kind = kind if isinstance(kind, str) else None
        where = f"turn {i} has a part of type {kind!r}"
        if kind in TEXTS:
            refuse_unknown(part, ("type", "text", INDEX), where)
            text = part.get("text")
            if not is_text(text):
                raise DataError(f"turn {i} has the part {short(part)}, expected text under 'text'")
            pieces.append(with_marks(text, marks, has_videos))
            has_marks = has_marks or IMAGE_TOKEN in pieces[-1]
        elif kind in KINDS:
            marks.append(read_mark(part, where))
            pieces.append(None)
        elif kind in SOUNDS:
            raise DataError(f"{where}: sounds are not supported, so take the record out")
        else:
            raise DataError(f"turn {i} has the part {short(part)}, expected the type 'text', 'image' or 'image_url'")
    if not has_marks:
        return join_parts(pieces)
    return "\n".join(_runs(pieces)), False


def _runs(pieces: list[str | None]) -> list[str]:
    """Join the texts between images; drops empty texts."""
    runs = [""]
    for piece in pieces:
        runs += [IMAGE_TOKEN, ""] if piece is None else []
        runs[-1] += piece or ""
    return [run for run in runs if run]
