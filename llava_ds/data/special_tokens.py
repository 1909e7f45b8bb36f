"""Text that has to stay text: special tokens and <image> that a record spells out, beside those that a template writes.

Noncharacters, which Unicode keeps for a program's own use, tell the two apart. A text that holds one is refused.
"""

import json
import re

from tokenizers import Tokenizer

from llava_ds.constants import IMAGE_TOKEN, ConfigError, DataError

# As long as IMAGE_TOKEN, so that places in a text stay where they are.
LITERAL_IMAGE = "\ufdd0image\ufdd1"  # the characters "<image>" in a message, which show no image
MARKED_IMAGE = "\ufdd2image\ufdd3"  # an image, for a tokenizer that has one token for it
assert len(LITERAL_IMAGE) == len(MARKED_IMAGE) == len(IMAGE_TOKEN)

_NONCHARACTER = re.compile("[\ufdd0-\ufdef]")


def refuse_noncharacters(text: str) -> None:
    """Raise DataError for a message with a character that stands for something else here."""
    found = _NONCHARACTER.search(text.replace(LITERAL_IMAGE, ""))
    if found:
        raise DataError(f"a text holds U+{ord(found[0]):04X}, which is no character in Unicode: take it out")


class SpecialTokens:
    """A tokenizer that finds special tokens where a template writes them, and nowhere in a message.

    backend: a copy that knows them by names which no text holds. Raises ConfigError where it gives other ids.
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
        names.pop(IMAGE_TOKEN, None)  # a mark, wherever it stands
        self._names = names
        self._guards = {content: f"\ufdd6{i}\ufdd7" for i, content in enumerate(names)}
        self._contents = {guard: content for content, guard in self._guards.items()}
        longest_first = sorted(names, key=len, reverse=True)
        self._in_messages = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._in_texts = re.compile("|".join(map(re.escape, [*longest_first, *self._contents])) or "(?!)")

    def guarded(self, message: str) -> str:
        """A message for a template, other strings in the place of special tokens."""
        return self._in_messages.sub(lambda found: self._guards[found[0]], message)

    def named(self, text: str) -> str:
        """Put names in the place of a template's own tokens, and text in that of guarded messages, for the backend."""
        return self._in_texts.sub(lambda found: self._names.get(found[0]) or self._contents[found[0]], text)
