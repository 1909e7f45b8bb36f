"""Tokenize texts word by word, with a cache. It gives the same ids as the whole text, several times faster."""

import hashlib
import operator
import random
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain, pairwise, starmap
from typing import NamedTuple

from tokenizers import Tokenizer

Tokenize = Callable[[list[str]], Iterator[tuple[list[int], list[tuple[int, int]]]]]

MAX_WORD = 40  # characters; longer words (a line of Chinese, a URL) rarely repeat
MAX_KNOWN = 300_000
NUM_PROBES = 300

_RULES: dict[tuple[bytes, str], tuple[re.Pattern, str] | None] = {}  # arguments of Words, by tokenizer
_FIRST = "\0"  # marks the first word of a text: its ids may differ from its ids after a space
_SPACES = set("▁Ġ ")

# Beginnings and ends of words that tokenizers treat specially. If tokenizing these word by word gives the ids of the
# whole text, any text is assumed to do so.
_PARTS = (
    "a", "B2", "two", "it's", "don't", "x.", "(y", "z)", "...", "?!", '"q"', "'s", "-", "1", "42", "1,000", "3.14", "#",
    "@me", "a_b", "&amp;", "/", "\\", "<", ">", "<a>", "<0x41>", "</s", "[INST", "USER:", "a\nb", "\nc", "d\n", "\te",
    "f\t", "\u00a0g", "\u200b", "é", "ß", "e\u0301", "\u0301", "猫", "日本。", "🙂", "שלום", "ﬁ", "Ａ", "²", "▁", "Ġ",
)  # fmt: skip


class Words:
    """Cache of words' ids, for tokenizers that give a text the concatenated ids of its words.

    A word ends before a single space between two ordinary characters that are in no added token. joint: prefix that
    gives a single word the same ids as after a space.
    """

    def __init__(self, tokenize: Tokenize, space: re.Pattern, joint: str) -> None:
        self.tokenize, self.space, self.joint = tokenize, space, joint
        self.known: dict[str, _Word] = {}

    def __call__(self, texts: Sequence[str]) -> Iterator["WordRow"]:
        """Tokenize every text."""
        rows = []
        for text in texts:
            first, *rest = self.space.split(text)
            rows.append([_FIRST + first, *map(" ".__add__, rest)])
        words = set().union(*rows)
        unknown = list(words.difference(self.known))
        if len(self.known) + len(unknown) > MAX_KNOWN:
            self.known = {word: self.known[word] for word in words.intersection(self.known)}
        self.known.update(zip(unknown, self._tokenized(unknown)))
        coded = [list(map(self.known.__getitem__, row)) for row in rows]
        for word in unknown:
            if len(word) > MAX_WORD:
                del self.known[word]
        return map(WordRow, coded)

    def _tokenized(self, words: list[str]) -> Iterator["_Word"]:
        shown = [word[1:] if word[0] == _FIRST else self.joint + word[1:] for word in words]
        for word, text, (ids, offsets) in zip(words, shown, self.tokenize(shown)):
            length = len(word) - (word[0] == _FIRST)
            shift = length - len(text)  # the preceding space, if the tokenizer did not see it
            yield _Word(ids, [begin + shift if i else begin for i, (begin, _) in enumerate(offsets)], length)


class _Word(NamedTuple):
    """ids, the first character of each token, and the number of characters, including the preceding space."""

    ids: list[int]
    begins: list[int]
    length: int


class WordRow:
    """The tokens of one text, stored per word."""

    def __init__(self, words: list[_Word]) -> None:
        self.word_ids, self.word_begins, self.lengths = zip(*words)
        self.ids = list(chain.from_iterable(self.word_ids))

    def begins(self) -> list[int]:
        """First character of each token."""
        starts = accumulate(self.lengths, initial=0)
        return [start + begin for start, begins in zip(starts, self.word_begins) for begin in begins]

    def tokens_before(self, places: Sequence[int]) -> list[int]:
        """Number of tokens that begin before each position (in characters)."""
        starts = list(accumulate(self.lengths, initial=0))
        counts = list(accumulate(map(len, self.word_ids), initial=0))
        found = []
        for place in places:
            i = bisect_left(starts, place, 1) - 1
            if i == len(self.lengths):
                found.append(counts[-1])
            else:
                found.append(counts[i] + bisect_left(self.word_begins[i], place - starts[i]))
        return found


class WholeRow:
    """The tokens of one text that was tokenized as a whole."""

    def __init__(self, ids: list[int], offsets: list[tuple[int, int]]) -> None:
        self.ids, self.offsets = ids, offsets

    def tokens_before(self, places: Sequence[int]) -> list[int]:
        """Number of tokens that begin before each position (in characters)."""
        return [bisect_left(self.offsets, (place, -1)) for place in places]


def words_of(tokenize: Tokenize, backend: Tokenizer, more: str = "") -> Words | None:
    """Build a word cache for a tokenizer; None if ids or starts of tokens would differ for some text.

    more: other inputs that `tokenize` depends on. Each process tries each tokenizer once.
    """
    said = backend.to_str()
    tried = hashlib.blake2b(said.encode()).digest(), more
    if tried not in _RULES:
        _RULES[tried] = _rule_of(tokenize, backend, said)
    rule = _RULES[tried]
    return rule and Words(tokenize, *rule)


def _rule_of(tokenize: Tokenize, backend: Tokenizer, said: str) -> tuple[re.Pattern, str] | None:
    """Find `space` and `joint` of Words. said: the backend, serialized."""
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    reaching = any(_SPACES & set(token.lstrip("▁Ġ ")) for token in backend.get_vocab(with_added_tokens=False))
    # A character map may add and remove spaces.
    by_table = '"Precompiled"' in said
    if reaching or by_table or any(re.search(r"\S \S", token) for token in added):
        return None
    before, after = (_ordinary_but({token[i] for token in added if token}) for i in (-1, 0))
    space = re.compile(rf" (?<={before} )(?={after})")  # starts with a fixed character, the fastest to search for
    probes = _probes(sorted(added))
    wholes = [WholeRow(*coded) for coded in tokenize(probes)]
    for joint in ("", " "):
        words = Words(tokenize, space, joint)
        if all(_same(row, whole, len(text)) for text, whole, row in zip(probes, wholes, words(probes))):
            return space, joint
    return None


def _ordinary_but(chars: set[str]) -> str:
    """A character class of letters, digits and ASCII marks, except the given characters."""
    marks = "".join(re.escape(char) for char in map(chr, range(33, 127)) if char not in chars)
    letters = "" if any(re.match(r"\w", char) for char in chars) else r"\w"
    return f"[{marks}{letters}]"


def _probes(added: list[str]) -> list[str]:
    """Build test texts in which each part is next to many other parts."""
    rng = random.Random(0)
    gaps = [" "] * 8 + ["  ", "\n", " \n ", "", "\t"]
    texts = list(_PARTS)
    for _ in range(NUM_PROBES):
        parts = rng.choices(_PARTS, k=12)
        if added:
            parts[rng.randrange(12)] = rng.choice(added)
        texts.append("".join(part + rng.choice(gaps) for part in parts) + rng.choice(_PARTS))
    return texts


def _same(row: WordRow, whole: WholeRow, length: int) -> bool:
    if row.ids != whole.ids:
        return False
    begins = row.begins()
    if begins == [begin for begin, _ in whole.offsets] and all(starmap(operator.le, pairwise(begins))):
        return True
    places = range(length + 1)
    return row.tokens_before(places) == whole.tokens_before(places)
