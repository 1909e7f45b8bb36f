"""Keep special tokens and <image> in a record's text as plain text, and join the parts of a message's text.

Unicode noncharacters replace them while a template's own tokens are recognised. Texts that already contain
noncharacters are refused.
"""

import json
import re
from collections.abc import Sequence

from tokenizers import Tokenizer

from llava_ds.constants import IMAGE_TOKEN, ConfigError, DataError

# As long as IMAGE_TOKEN, so that positions in a text stay the same.
LITERAL_IMAGE = "\ufdd0image\ufdd1"  # the characters "<image>" in a message, without an image
MARKED_IMAGE = "\ufdd2image\ufdd3"  # an image, for a tokenizer that has one token for it
PART_END = "\ufdd8"  # follows each text of a message in parts, if several texts are adjacent
assert len(LITERAL_IMAGE) == len(MARKED_IMAGE) == len(IMAGE_TOKEN)

_NONCHARACTER = re.compile("[\ufdd0-\ufdef]")


def refuse_noncharacters(text: str, of_parts: bool = False) -> None:
    """Raise DataError for a message with a noncharacter. of_parts: its text comes from join_parts."""
    if text.isascii():
        return
    text = text.replace(LITERAL_IMAGE, "")
    found = _NONCHARACTER.search(text.replace(PART_END, "") if of_parts else text)
    if found:
        raise DataError(f"a text contains U+{ord(found[0]):04X}, not a character in Unicode: take it out")


def join_parts(parts: Sequence[str | None]) -> tuple[str, bool]:
    """Join a message's parts to one text, with an <image> mark for each None. Also returns Message.keeps_spaces.

    split_parts is the inverse. A single text without outer spaces is returned unchanged, with keeps_spaces False.
    Raises DataError for a text with a noncharacter.
    """
    for part in parts:
        refuse_noncharacters(part or "")
    if None not in parts and (not any(parts) or (len(parts) == 1 and parts[0] == parts[0].strip())):
        return "".join(parts), False
    runs: list[list[str]] = [[]]
    for part in parts:
        if part is None:
            runs.append([])
        else:
            runs[-1].append(part)
    plain = ["".join(run) if len(run) == 1 and run[0] else "".join(text + PART_END for text in run) for run in runs]
    return IMAGE_TOKEN.join(plain), True


def split_parts(text: str) -> list[str | None]:
    """Split the text of a message into its parts, with None for each <image> mark. text: from join_parts, possibly with
    words replaced."""
    parts: list[str | None] = []
    for i, run in enumerate(text.split(IMAGE_TOKEN)):
        texts = run.split(PART_END)
        parts += [None] * (i > 0) + (texts if texts[-1] else texts[:-1])
    return parts


def in_lines(text: str) -> str:
    """Put every mark of a join_parts text on its own line, as LLaVA writes images."""
    text = text.replace(PART_END, "")
    if IMAGE_TOKEN not in text:
        return text
    before, *behind = text.split(IMAGE_TOKEN)
    lines = [before] * bool(before)
    for piece in behind:
        lines += [IMAGE_TOKEN, piece] if piece else [IMAGE_TOKEN]
    return "\n".join(lines)


def shown_text(text: str) -> str:
    """Format a message's text for display: without marks, and with literal "<image>" characters restored."""
    return text.replace(PART_END, "").replace(IMAGE_TOKEN, "").replace(LITERAL_IMAGE, IMAGE_TOKEN)


class SpecialTokens:
    """A tokenizer that recognises special tokens written by the template, but not those in messages.

    backend: a copy in which special tokens have names that no text contains. Raises ConfigError if its ids would
    differ.
    """

    def __init__(self, backend: Tokenizer) -> None:
        state = json.loads(backend.to_str())
        contents = [token["content"] for token in state["added_tokens"] if token["special"]]
        names = {content: f"\ufdd4{i}\ufdd5" for i, content in enumerate(contents)}
        for token in state["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        model = state["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {names.get(piece, piece): i for piece, i in model["vocab"].items()}
        else:  # Unigram's vocabulary has scores
            model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
        if "unk_token" in model:
            model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
        self.backend = Tokenizer.from_str(json.dumps(state))
        if any(self.backend.token_to_id(name) != backend.token_to_id(content) for content, name in names.items()):
            raise ConfigError("--split_special_tokens can't work with this tokenizer: its tokens would be renumbered")
        names.pop(IMAGE_TOKEN, None)  # <image> is always a mark
        self._names = names
        self._guards = {content: f"\ufdd6{i}\ufdd7" for i, content in enumerate(names)}
        self._contents = {guard: content for content, guard in self._guards.items()}
        longest_first = sorted(names, key=len, reverse=True)
        self._in_messages = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._in_texts = re.compile("|".join(map(re.escape, [*longest_first, *self._contents])) or "(?!)")

    def guarded(self, message: str) -> str:
        """Replace special tokens in a message by placeholder strings, before rendering."""
        return self._in_messages.sub(lambda found: self._guards[found[0]], message)

    def named(self, text: str) -> str:
        """Replace special tokens of a rendered text by their names, and restore the text of guarded messages."""
        return self._in_texts.sub(lambda found: self._names.get(found[0]) or self._contents[found[0]], text)
