"""WordNet's nouns: senses, hypernyms and definitions.

Format of the files: wndb(5WN). A sense's key is the offset of its line in data.noun.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PHYSICAL = "physical_entity"
_ENDINGS = (("ies", "y"), ("ses", "s"), ("xes", "x"), ("ches", "ch"), ("shes", "sh"), ("men", "man"), ("s", ""))
_NOUN, _OTHERS = "1", "2345"  # numbers of parts of speech in cntlist.rev


@dataclass(frozen=True)
class Sense:
    """A meaning. words: its synonyms; parents: keys of the senses that it is a kind of; gloss: its definition."""

    words: tuple[str, ...]
    parents: tuple[str, ...]
    gloss: str
    is_instance: bool  # a single thing: a person, a place


class WordNet:
    """The nouns in a folder of WordNet's files."""

    def __init__(self, folder: Path):
        self._senses = dict(map(_sense, _lines(folder / "data.noun")))
        self._first = {}
        for line in _lines(folder / "index.noun"):
            fields = line.split()
            self._first[fields[0]] = fields[-int(fields[2])]
        self._irregular = dict(line.split()[:2] for line in _lines(folder / "noun.exc"))
        self._uses = Counter()
        for line in _lines(folder / "cntlist.rev"):
            key, _, count = line.split()
            word, _, rest = key.partition("%")
            self._uses[word, rest[0]] += int(count)

    def find(self, words: list[str]) -> tuple[str, str] | None:
        """Return the longest noun, of at most three words, that ends a phrase, and its commonest sense's key.

        None if the phrase ends in no noun, or in one that names no physical thing or is commoner as another part of
        speech.
        """
        words = [word for word in (re.sub(r"[^a-z'-]", "", each.lower()) for each in words) if word]
        for i in range(max(0, len(words) - 3), len(words)):
            *before, last = words[i:]
            noun = "_".join([*before, self._singular("_".join([*before, last]), last)])
            if noun in self._first:
                key = self._first[noun]
                return (noun.replace("_", " "), key) if self._is_thing(noun) and len(last) > 2 else None
        return None

    def things(self) -> Iterator[tuple[str, str]]:
        """Yield each noun that names a physical thing and is used in WordNet's texts, and its commonest sense's key."""
        for noun, key in self._first.items():
            if self._uses[noun, _NOUN] and self._is_thing(noun):
                yield noun.replace("_", " "), key

    def _is_thing(self, noun: str) -> bool:
        """True for a noun that names a kind of physical thing, and isn't commoner as another part of speech."""
        key, uses = self._first[noun], [self._uses[noun, part] for part in _NOUN + _OTHERS]
        is_physical = PHYSICAL in {self.name(each) for each in self.kinds(key)}
        return is_physical and not self._senses[key].is_instance and uses[0] == max(uses)

    def kinds(self, key: str) -> list[str]:
        """Return the keys of a sense and its hypernyms, up to the most general."""
        chain = [key]
        while parents := self._senses[chain[-1]].parents:
            chain.append(parents[0])
        return chain

    def name(self, key: str) -> str:
        """Return the first word of a sense."""
        return self._senses[key].words[0]

    def gloss(self, key: str) -> str:
        """Return a sense's definition, without examples and remarks."""
        return re.sub(r"\s*\([^)]*\)", "", self._senses[key].gloss.partition(";")[0]).strip()

    def _singular(self, noun: str, last: str) -> str:
        """Return the last word of a noun in its singular, if that is needed for the noun to be known."""
        if noun in self._first:
            return last
        known = [self._irregular[last]] if last in self._irregular else []
        known += [last.removesuffix(end) + new for end, new in _ENDINGS if last.endswith(end) and len(last) > 3]
        return next((word for word in known if word in self._first), last)


def _lines(file: Path) -> list[str]:
    """Return a file's lines without its licence, in indented lines."""
    return [line for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith("  ")]


def _sense(line: str) -> tuple[str, Sense]:
    data, _, gloss = line.partition(" | ")
    fields = data.split()
    count = int(fields[3], 16)  # words, each with a number
    words, rest = fields[4 : 4 + 2 * count : 2], fields[4 + 2 * count :]
    pointers = [rest[i : i + 2] for i in range(1, 1 + 4 * int(rest[0]), 4)]  # kind, key, and two more
    parents = [key for kind, key in pointers if kind in ("@", "@i")]
    return fields[0], Sense(tuple(words), tuple(parents), gloss, any(kind == "@i" for kind, _ in pointers))
