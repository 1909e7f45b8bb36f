"""The places of answers in a rendered conversation: their thoughts, texts and calls with the end marker.

A second rendering, with markers in place of thoughts, texts and names of called functions, has to agree with the first
in everything around them.
"""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from llava_ds.constants import DataError
from llava_ds.data.special_tokens import PART_END
from llava_ds.data.templates import Span

UNSTABLE = (
    "the tokenizer's chat template writes something else around an answer when its text is another, so what is "
    "learned can't be told: mark answers in it by {% generation %}, or, for a model in LLaVA's layout, give --version "
    "one of LLaVA's templates"
)
LEFT_OUT = (
    "the tokenizer's chat template leaves answers out: bring another one (chat_template.jinja), or, for a model in "
    "LLaVA's layout, give --version one of LLaVA's templates"
)
UNWRITTEN_CALLS = (
    "the tokenizer's chat template leaves tool calls or the text beside them out, or writes something else between them"
)
MARKER = re.compile("\ue000([0-9]+)([a-z][0-9]*)\ue001")


class AnswerParts(NamedTuple):
    """The parts of an answer for which markers can stand, by their names: "t" thought, "c" text, "n0", "n1", …: names
    of called functions. A part without a text has no marker. turn: number of the turn among all."""

    turn: int
    values: dict[str, str]

    @property
    def has_calls(self) -> bool:
        """True for an answer that calls a tool."""
        return "n0" in self.values

    def marker(self, part: str) -> str:
        """The marker of a part."""
        return f"\ue000{self.turn}{part}\ue001"


def find_answers(
    text: str,
    marked: str,
    answers: Sequence[AnswerParts],
    marked_up_to: Callable[[int], str],
    special: re.Pattern[str],
) -> list[Span]:
    """Find every answer in a text: from the first of its parts that is written to the end of its end marker.

    marked: the same text with markers; marked_up_to: the same of the first turns alone, by the number of the last;
    special: spaces and the special token that may end an answer. Raises DataError where they don't agree.
    """
    values = {answer.turn: answer.values for answer in answers}
    around, found = _split(marked, values)
    ends: list[tuple[int, int]] = []  # start and end of every part
    place = len(around[0])
    if not text.startswith(around[0]):
        raise DataError(UNSTABLE)
    for (turn, part), after in zip(found, around[1:]):
        written = _written(text, place, values.get(turn, {}).get(part), after)
        ends.append((place, place + len(written)))
        place += len(written) + len(after)
    if place != len(text):
        raise DataError(UNSTABLE)
    spans, k = [], 0
    for answer in answers:
        own = [part for turn, part in found if turn == answer.turn]
        expected = [part for part in answer.values if part != "t" or "t" in own]
        if [turn for turn, _ in found[k : k + len(own)]] != [answer.turn] * len(own) or sorted(own) != sorted(expected):
            raise DataError(UNWRITTEN_CALLS if answer.has_calls else LEFT_OUT)
        last = k + len(own) - 1
        if answer.has_calls:
            length = _length_behind(_split(marked_up_to(answer.turn), values), answer, around, (k, last))
        else:
            end = special.match(around[last + 1])
            length = end.end() if end else 0
        left_out = "t" in answer.values and "t" not in own
        spans.append(Span(ends[k][0], ends[last][1] + length, thought_left_out=left_out))
        k = last + 1
    if k != len(found):
        raise DataError(UNSTABLE)
    return spans


def _split(marked: str, values: dict[int, dict[str, str]]) -> tuple[list[str], list[tuple[int, str]]]:
    """The texts around markers, and the turn and part of each. A name that is written again, such as in front of its
    call's result, is text. values: of the parts by the number of their turn."""
    seen = set()

    def name_again(marker: re.Match) -> str:
        turn, part = int(marker[1]), marker[2]
        if part.startswith("n") and (turn, part) in seen:
            return values.get(turn, {}).get(part, marker[0])
        seen.add((turn, part))
        return marker[0]

    pieces = MARKER.split(MARKER.sub(name_again, marked))
    return pieces[::3], [(int(turn), part) for turn, part in zip(pieces[1::3], pieces[2::3])]


def _written(text: str, place: int, value: str | None, after: str) -> str:
    """What the text has at a place for a value: itself, or without some of its outer spaces, or of those of parts."""
    if value is not None:
        whole = value.replace(PART_END, "")
        if text.startswith(whole + after, place):
            return whole
        ways = [whole.strip(), whole.strip("\n"), whole.lstrip(), whole.rstrip()]
        ways += ["".join(part.strip() for part in value.split(PART_END))] * (PART_END in value)
        for each in ways:
            if text.startswith(each + after, place):
                return each
    raise DataError(UNSTABLE)


def _length_behind(
    alone: tuple[list[str], list[tuple[int, str]]], answer: AnswerParts, around: list[str], parts: tuple[int, int]
) -> int:
    """The number of characters behind the last marker of an answer with calls that are still the answer's.

    alone: the conversation that ends with it, split, whose rest is all its own: what follows there as here. parts:
    numbers of its first and last marker. Raises DataError where something else is between its parts, such as a result.
    """
    alone_around, alone_found = alone
    first, last = parts
    numbers = [i for i, (turn, _) in enumerate(alone_found) if turn == answer.turn]
    if len(numbers) == last - first + 2 and alone_found[numbers[0]][1] == "t":
        del numbers[0]  # a thought that is left out where a question follows
    if not numbers or len(numbers) != last - first + 1 or numbers[-1] + 2 != len(alone_around):
        raise DataError(UNWRITTEN_CALLS)
    if alone_around[numbers[0] + 1 : numbers[-1] + 1] != around[first + 1 : last + 1]:
        raise DataError(UNWRITTEN_CALLS)
    rest, here = alone_around[-1].rstrip(), around[last + 1]
    if not here.startswith(rest):
        raise DataError(
            "the tokenizer's chat template ends an answer with tool calls otherwise where something follows it, so "
            "what is learned can't be told"
        )
    return len(rest)
