"""A reward of one's own, for descriptions of generated scenes: --reward_funcs run/recipes/facts.py:facts, and the same
as a metric: run/evaluate.py --metric run/recipes/facts.py:facts."""

import re
from collections import Counter

THING = re.compile(r"\b(red|green|blue|yellow|purple) (circle|square|triangle|cross)\b")
PLACE = re.compile(r"\b(?:at|in) the (top left|top right|top|bottom left|bottom right|bottom|left|right|centre)\b")


def facts(prompts, completions, references, ids):
    """How well the named things and places are those of the reference, from 0 to 1: F1 of (colour, shape, place)."""
    return [f1(named(answer), named(reference)) for answer, reference in zip(completions, references)]


def named(text):
    """Count (colour, shape, place) in a description, whose n-th place is that of the n-th thing."""
    text = text.lower()
    return Counter((*thing, place) for thing, place in zip(THING.findall(text), PLACE.findall(text)))


def f1(found, wanted):
    """Harmonic mean of the share of what was found that is wanted, and of what is wanted that was found."""
    return 2 * (found & wanted).total() / max(1, found.total() + wanted.total())
