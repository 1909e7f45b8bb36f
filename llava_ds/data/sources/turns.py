"""One turn of a record: its role, its text with marks, and the images and videos of its parts."""

import re

from llava_ds.constants import IMAGE_TOKEN, DataError
from llava_ds.data.sources.fields import checked_text
from llava_ds.data.sources.options import short
from llava_ds.data.sources.source import Source
from llava_ds.data.sources.turn_fields import Turn, call_turn, with_fields

VIDEO_TOKEN = "<video>"
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
_TEXT_KEYS = (("from", "value"), ("role", "content"))  # LLaVA's and ShareGPT's, and OpenAI's

# A mark is (kind, value). value: an image or video from the part of a message, or None for the record's next one.
Mark = tuple[str, object]

_MARK = re.compile(f"{IMAGE_TOKEN}|{VIDEO_TOKEN}")


def read_turn(turn: object, i: int) -> Turn:
    """A turn in the form of LLaVA and ShareGPT, or of OpenAI. Raises DataError for keys that are not read."""
    role = content = None
    if isinstance(turn, dict):
        role, content = turn.get("from"), turn.get("value")
        if role is None:
            role, content = turn.get("role"), turn.get("content")
        if content is None and (turn.get("tool_calls") or turn.get("function_call")):
            content = ""
    if isinstance(content, str):
        try:
            content.encode()
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
        return call_turn(content, turn, i)
    if len(turn) == 2 and isinstance(content, str) and "tool_calls" not in turn and "function_call" not in turn:
        return Turn(known, content)
    _refuse_two_spellings(turn, i)
    return with_fields(known, content, turn, i)


def _refuse_two_spellings(turn: dict, i: int) -> None:
    """Raise DataError for a turn that gives its role or its text twice, and not alike."""
    both = [[turn.get(key) for key in pair] for pair in zip(*_TEXT_KEYS)]
    (one, other), texts = both
    roles_differ = None not in (one, other) and ROLES.get(one) != ROLES.get(other)
    if roles_differ or (None not in texts and texts[0] != texts[1]):
        raise DataError(f"turn {i} is {short(turn)}, which gives its role or its text twice, and not alike")


def with_marks(text: str, marks: list[Mark], named: dict[str, list], source: Source) -> str:
    """The text with every mark as <image>; adds the kinds of the marks to the list."""
    # LLaVA has no <video>: without videos it is text, such as HTML. LLaMA-Factory would count it.
    if VIDEO_TOKEN in text and (named["video"] or source.format != "llava"):
        marks += [("video" if found == VIDEO_TOKEN else "image", None) for found in _MARK.findall(text)]
        return text.replace(VIDEO_TOKEN, IMAGE_TOKEN)
    if IMAGE_TOKEN in text:
        marks += [("image", None)] * text.count(IMAGE_TOKEN)
    return text


def read_parts(parts: list, i: int, marks: list[Mark], named: dict[str, list], source: Source) -> str:
    """The text of a message in parts: texts in order, and images as marks on separate lines."""
    pieces: list[str] = []
    after_mark = False
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("text", "input_text", "output_text"):
            text = checked_text(part.get("text"), f"turn {i} has the part {short(part)}, expected a text under 'text'")
            text = with_marks(text, marks, named, source)
            pieces.append(f"\n{text}" if after_mark and text else text)
            after_mark = after_mark and not text
        elif kind in ("image", "image_url", "input_image", "video", "video_url", "input_video"):
            kind = "video" if "video" in kind else "image"
            keys = (kind, f"{kind}_url", "path", "url")
            marks.append((kind, next((part[key] for key in keys if part.get(key) is not None), None)))
            pieces.append(f"\n{IMAGE_TOKEN}" if pieces and any(pieces) else IMAGE_TOKEN)
            after_mark = True
        else:
            raise DataError(f"turn {i} has the part {short(part)}, expected the type 'text', 'image' or 'image_url'")
    return "".join(pieces)
