"""Special tokens and <image> in the text of a record, which have to stay text.

Noncharacters, which Unicode reserves for a program's own use, distinguish them from those of a template. Texts with
noncharacters are refused.
"""

import json
import re

from tokenizers import Tokenizer

from llava_ds.constants import IMAGE_TOKEN, ConfigError, DataError

# As long as IMAGE_TOKEN, so that positions in a text stay the same.
LITERAL_IMAGE = "\ufdd0image\ufdd1"  # the characters "<image>" in a message, without an image
MARKED_IMAGE = "\ufdd2image\ufdd3"  # an image, for a tokenizer that has one token for it
assert len(LITERAL_IMAGE) == len(MARKED_IMAGE) == len(IMAGE_TOKEN)

_NONCHARACTER = re.compile("[\ufdd0-\ufdef]")


def refuse_noncharacters(text: str) -> None:
    """Raise DataError for a message with a noncharacter."""
    found = _NONCHARACTER.search(text.replace(LITERAL_IMAGE, ""))
    if found:
        raise DataError(f"a text holds U+{ord(found[0]):04X}, which is no character in Unicode: take it out")


class SpecialTokens:
    """A tokenizer that recognises special tokens of a template, but none in messages.

    backend: a copy in which they have names that no text contains. Raises ConfigError if it would give other ids.
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
        else:  # Unigram's, with scores
            model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
        if "unk_token" in model:
            model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
        self.backend = Tokenizer.from_str(json.dumps(state))
        if any(self.backend.token_to_id(name) != backend.token_to_id(content) for content, name in names.items()):
            raise ConfigError(
                "--split_special_tokens can't be had with this tokenizer, whose tokens would be renumbered"
            )
        names.pop(IMAGE_TOKEN, None)  # always a mark
        self._names = names
        self._guards = {content: f"\ufdd6{i}\ufdd7" for i, content in enumerate(names)}
        self._contents = {guard: content for content, guard in self._guards.items()}
        longest_first = sorted(names, key=len, reverse=True)
        self._in_messages = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._in_texts = re.compile("|".join(map(re.escape, [*longest_first, *self._contents])) or "(?!)")

    def guarded(self, message: str) -> str:
        """Replace special tokens in a message by other strings, before it is rendered."""
        return self._in_messages.sub(lambda found: self._guards[found[0]], message)

    def named(self, text: str) -> str:
        """Replace special tokens of a rendered text by their names, and restore the text of guarded messages."""
        return self._in_texts.sub(lambda found: self._names.get(found[0]) or self._contents[found[0]], text)
