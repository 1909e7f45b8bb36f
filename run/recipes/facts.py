"""A custom reward for descriptions of generated scenes: --reward_funcs run/recipes/facts.py:facts.

It also works as a metric: run/evaluate.py --metric run/recipes/facts.py:facts.
"""

import re
from collections import Counter

THING = re.compile(r"\b(red|green|blue|yellow|purple) (circle|square|triangle|cross)\b")
PLACE = re.compile(r"\b(?:at|in) the (top left|top right|top|bottom left|bottom right|bottom|left|right|centre)\b")


def facts(prompts, completions, references, ids):
    """Return for each answer the F1 score (0 to 1) of its (colour, shape, place) facts against the reference's."""
    return [f1(named(answer), named(reference)) for answer, reference in zip(completions, references)]


def named(text):
    """Count the (colour, shape, place) facts in a description, in which the n-th place is the n-th thing's."""
    text = text.lower()
    return Counter((*thing, place) for thing, place in zip(THING.findall(text), PLACE.findall(text)))


def f1(found, wanted):
    """Return the harmonic mean of precision and recall."""
    return 2 * (found & wanted).total() / max(1, found.total() + wanted.total())
