"""Tokenizing word by word, every word remembered: the same ids, several times faster than the library's batches."""

import copy
import json
import re
from collections import ChainMap
from collections.abc import Iterator, Sequence

from tokenizers import Tokenizer

from llava_ds.tokenizer import SPACE

MAX_WORDS = 200_000  # remembered, some 60 MB; then it starts anew
MAX_WORD_CHARS = 32  # longer ones, such as a sentence of Chinese, hardly come twice

# A word ends before a space that follows no other white space: there every splitting below begins something new.
_WHITE = r"\s\u180e\u200b\ufeff"
_WORD_END = re.compile(rf"(?<=[^{_WHITE}]) ")
_WHITE_BEFORE_SPACE = re.compile(rf"(?:^|[{_WHITE}]) ")

# Pre-tokenizers of byte-level tokenizers that never reach over a word's end, nor look behind it.
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BYTE_LEVEL_SPLITS = (_LETTERS + _OTHERS, _LETTERS + "{1,3}" + _OTHERS)  # Qwen's, Llama 3's

Coded = tuple[list[int], list[int]]  # ids, and the character at which each token begins
# Before what the memory holds beside words behind a space: what begins a text, and what follows an added token or
# is one.
_FIRST, _INNER = _MARKS = ("\0first ", "\0inner ")


class WordTokenizer:
    """Ids and first characters of texts, as the backend gives them."""

    def __init__(self, backend: Tokenizer) -> None:
        self.backend = backend
        state = json.loads(backend.to_str())
        added = state["added_tokens"]
        later = _behind_a_word(state)
        self.later = None if later is None else Tokenizer.from_str(json.dumps(later))
        if any(token[how] for token in added for how in ("lstrip", "rstrip", "single_word", "normalized")):
            self.later = None  # what surrounds an added token depends on it
        contents = sorted((token["content"] for token in added), key=len, reverse=True)
        self.added = re.compile(f"({'|'.join(map(re.escape, contents)) or '(?!)'})")
        self.added_begin = {content[0] for content in contents}
        self.only_first = "first" in (step.get("prepend_scheme") for step in _steps(state["pre_tokenizer"]))
        self.known: dict[str, tuple[list[int], list[int], int]] = {}  # with the number of characters

    def __call__(self, texts: Sequence[str]) -> Iterator[Coded]:
        """Ids and first characters of every text."""
        if self.later is None:
            yield from _coded(self.backend, texts)
            return
        rows = [self._words(text) for text in texts]
        coded = self._learned({word for row in rows for word in row})
        for row in rows:
            ids: list[int] = []
            starts: list[int] = []
            at = 0
            for word in row:
                more, begins, length = coded[word]
                ids += more
                if len(begins) == 1:
                    starts.append(at + begins[0])
                else:
                    starts += [at + begin for begin in begins]
                at += length
            yield ids, starts

    def _words(self, text: str) -> list[str]:
        """The text in words without the space before them; the first of a section, and added tokens, are marked."""
        if not any(char in text for char in self.added_begin):
            return self._section(text, True)
        words: list[str] = []
        for i, part in enumerate(self.added.split(text)):
            if i % 2:
                words.append(_INNER + part)
            elif part:
                words += self._section(part, not words)
        return words

    def _section(self, text: str, is_first: bool) -> list[str]:
        if not text:
            return []
        words = _WORD_END.split(text) if _WHITE_BEFORE_SPACE.search(text) else text.split(" ")
        words[0] = (_FIRST if is_first or not self.only_first else _INNER) + words[0]
        return words

    def _learned(self, words: set[str]) -> dict[str, tuple[list[int], list[int], int]]:
        """The codes of at least these words, most of which are known."""
        new = sorted(words.difference(self.known))
        if not new:
            return self.known
        texts = [word[len(_FIRST) :] if word.startswith(_MARKS) else f" {word}" for word in new]
        begins = [word.startswith(_FIRST) for word in new]
        firsts = _coded(self.backend, [text for text, first in zip(texts, begins) if first])
        laters = _coded(self.later, [text for text, first in zip(texts, begins) if not first])
        coded = {word: (*next(firsts if first else laters), len(text)) for word, text, first in zip(new, texts, begins)}
        short = {word: code for word, code in coded.items() if len(word) <= MAX_WORD_CHARS}
        if len(self.known) + len(short) > MAX_WORDS:
            coded |= {word: self.known[word] for word in words if word in self.known}
            self.known = short
            return coded
        self.known |= short
        return self.known if len(short) == len(coded) else ChainMap(coded, self.known)


def _coded(backend: Tokenizer, texts: Sequence[str]) -> Iterator[Coded]:
    for encoding in backend.encode_batch(texts, add_special_tokens=False) if texts else ():
        yield encoding.ids, [start for start, _ in encoding.offsets]


def _behind_a_word(state: dict) -> dict | None:
    """The tokenizer for a word that is not a text's first one, which begins with its space.

    None where it is not certain that words never touch each other.
    """
    model, state = state["model"], copy.deepcopy(state)
    if model["type"] != "BPE" or any(model.get(key) for key in ("dropout", "continuing_subword_prefix")):
        return None
    if model.get("end_of_word_suffix"):
        return None
    normalizers, splits = _steps(state["normalizer"]), _steps(state["pre_tokenizer"])
    kinds = [step["type"] for step in splits]
    if "ByteLevel" in kinds:
        splits_words = kinds == ["ByteLevel"] and splits[0]["use_regex"]
        if kinds == ["Split", "ByteLevel"] and splits[0]["behavior"] == "Isolated" and not splits[0]["invert"]:
            splits_words = not splits[1]["use_regex"] and splits[0]["pattern"].get("Regex") in _BYTE_LEVEL_SPLITS
        composes = all(step["type"] == "NFC" for step in normalizers)  # never with a space
        return state if splits_words and composes and not splits[-1]["add_prefix_space"] else None
    # Sentencepiece's way, which tokenizer.copy_of_backend has made to work word by word.
    words = {"type": "Split", "pattern": {"Regex": f"{SPACE}+[^{SPACE}]*"}, "behavior": "Isolated", "invert": False}
    to_space = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prepend = {"type": "Prepend", "prepend": SPACE}
    if not splits or splits[-1] != words or any(step not in (prepend, to_space) for step in normalizers):
        return None
    if kinds not in (["Split"], ["Metaspace", "Split"]) or (kinds == ["Split"] and to_space not in normalizers):
        return None
    for step in splits[:-1]:
        step["prepend_scheme"] = "never"
    rest = [step for step in normalizers if step != prepend]
    state["normalizer"] = {"type": "Sequence", "normalizers": rest} if rest else None
    state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": splits}
    return state


def _steps(part: dict | None) -> list[dict]:
    """The steps of a normalizer or a pre-tokenizer, none, one or a sequence."""
    if part is None:
        return []
    return part.get("normalizers") or part.get("pretokenizers") or [] if part["type"] == "Sequence" else [part]
