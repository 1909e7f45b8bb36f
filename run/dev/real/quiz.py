"""Questions about images of one thing, or of several things together, in LLaVA's format."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from real.pictures import PLACES
from real.things import Thing
from real.wordnet import WordNet

NUMBERS = ("one", "two", "three", "four")
SHARES = {"choice": 0.65, "kind": 0.2, "name": 0.1, "gloss": 0.05}  # share of each kind of training question
WIDEST = 0.2  # share of all things that the wider kind of a thing may have

LONGEST = 70  # characters of a definition

Turn = tuple[str, str]  # question and answer


def record(name: str, image: str | None, turns: Sequence[Turn]) -> dict:
    """Return a record in LLaVA's format: a conversation about an image, or without one."""
    conversation = []
    for question, answer in turns:
        conversation += [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    if image is None:
        return {"id": name, "conversations": conversation}
    conversation[0]["value"] = f"<image>\n{conversation[0]['value']}"
    return {"id": name, "image": image, "conversations": conversation}


def by_group(things: list[Thing]) -> dict[str, list[Thing]]:
    """Return the things of each group, so that a noun with many images isn't drawn more often than others."""
    groups: dict[str, list[Thing]] = {}
    for thing in things:
        groups.setdefault(thing.group, []).append(thing)
    return groups


class Asker:
    """Questions about training things, drawn at random."""

    def __init__(self, things: list[Thing], wordnet: WordNet, seed: int):
        self._groups = list(by_group(things).values())
        self._wordnet = wordnet
        self._rng = np.random.default_rng(seed)
        self._kinds = kinds_of(things, wordnet)

    def turns(self, thing: Thing) -> list[Turn]:
        """Draw questions about a thing: one, or a choice after a question for its kind.

        No answer gives a later one away: with several choices about an image, every later one only trains copying.
        """
        kind = self._rng.choice(list(SHARES), p=list(SHARES.values()))
        return [self.kind(thing), self.choice(thing)] if kind == "kind" else [getattr(self, kind)(thing)]

    def name(self, thing: Thing) -> Turn:
        """Ask for the noun."""
        return "What is it?", thing.noun

    def choice(self, thing: Thing, options: int = 4) -> Turn:
        """Ask which of several nouns it is."""
        nouns = [thing.noun]
        for at in self._rng.permutation(len(self._groups)):
            other = self._groups[at][self._rng.integers(len(self._groups[at]))]
            if len(nouns) < options and other.group != thing.group:
                nouns.append(other.noun)
        return which(nouns, self._rng), thing.noun

    def kind(self, thing: Thing) -> Turn:
        """Ask whether a thing is of a kind: its own, or equally often another thing's kind at the same height."""
        height, is_true = self._rng.integers(2), self._rng.random() < 0.5
        return kind_question(thing, height, is_true, self._kinds, self._wordnet, self._rng)

    def gloss(self, thing: Thing) -> Turn:
        """Ask for WordNet's definition."""
        return "How is it defined?", self._wordnet.gloss(thing.sense)


def defined(wordnet: WordNet, avoided: list[Thing], count: int, seed: int) -> list[Turn]:
    """Ask which of four nouns has a definition. No noun shares its sense or its last word with an avoided thing."""
    words, senses = {each.noun.split()[-1] for each in avoided}, {each.sense for each in avoided}
    known = []
    for noun, key in wordnet.things():
        gloss = wordnet.gloss(key)
        if noun.split()[-1] not in words and key not in senses and noun not in gloss and len(gloss) <= LONGEST:
            known.append((noun, gloss))
    rng, found = np.random.default_rng(seed), []
    for _ in range(count):
        (noun, gloss), *others = (known[i] for i in rng.choice(len(known), 4, replace=False))
        found.append((f"It is {gloss}. {which([noun, *(other for other, _ in others)], rng)}", noun))
    return found


def which(nouns: list[str], rng: np.random.Generator) -> str:
    """Ask which of some nouns it is, in random order."""
    nouns = [nouns[i] for i in rng.permutation(len(nouns))]
    return f"Which is it: {', '.join(nouns[:-1])} or {nouns[-1]}?"


def quadruples(things: list[Thing], rounds: int, seed: int) -> list[tuple[Thing, str]]:
    """Return things, each with a choice among four nouns.

    The four things of a question share it, so an answer that ignores the image is correct for one of four.
    """
    rng, groups, found = np.random.default_rng(seed), list(by_group(things).values()), []
    for _ in range(rounds):
        drawn = [groups[i][rng.integers(len(groups[i]))] for i in rng.permutation(len(groups))]
        for first in range(0, len(drawn) - 3, 4):
            four = drawn[first : first + 4]
            question = which([each.noun for each in four], rng)
            found += [(each, question) for each in four]
    return found


def kinds_of(things: list[Thing], wordnet: WordNet) -> dict[str, tuple[str, str]]:
    """Return two kinds of each sense: the next, and the widest that at most WIDEST of all things have."""
    senses = [wordnet.kinds(thing.sense) for thing in things]
    uses = Counter(kind for chain in senses for kind in chain)
    limit = WIDEST * len(things)
    wide = ([kind for kind in chain[1:] if uses[kind] <= limit] or chain[1:2] for chain in senses)
    return {chain[0]: (chain[1], found[-1]) for chain, found in zip(senses, wide)}


def kind_question(
    thing: Thing,
    height: int,
    is_true: bool,
    kinds: dict[str, tuple[str, str]],
    wordnet: WordNet,
    rng: np.random.Generator,
) -> Turn:
    """Ask whether a thing is of a kind, at one of two heights."""
    own = set(wordnet.kinds(thing.sense))
    others = sorted({pair[height] for pair in kinds.values()} - own)
    kind = kinds[thing.sense][height] if is_true else others[rng.integers(len(others))]
    return f"Is it a kind of {wordnet.name(kind).replace('_', ' ')}?", "yes" if is_true else "no"


def scene(things: list[Thing], rng: np.random.Generator) -> tuple[dict[str, Thing], list[Turn]]:
    """Draw one to four things in places; return them with questions for their number and the place of one."""
    count = int(rng.integers(1, 5))
    places = [PLACES[i] for i in sorted(rng.permutation(4)[:count])]
    drawn: list[Thing] = []
    while len(drawn) < count:
        thing = things[rng.integers(len(things))]
        if all(thing.group != each.group for each in drawn):
            drawn.append(thing)
    asked = rng.integers(count)
    turns = [("How many things are there?", NUMBERS[count - 1]), (f"Where is the {drawn[asked].noun}?", places[asked])]
    return dict(zip(places, drawn)), turns
