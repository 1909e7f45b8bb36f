"""Find the answers in a rendered conversation: thoughts, texts and tool calls, each with its end marker.

The conversation is rendered twice. In the second rendering, markers replace the thoughts, texts and names of called
functions; the text around the markers must be the same in both.
"""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from llava_ds.constants import DataError
from llava_ds.data.special_tokens import PART_END
from llava_ds.data.templates import Span

UNSTABLE = (
    "the tokenizer's chat template writes different text around an answer when the answer changes, so its learned "
    "part can't be found: mark answers in it by {% generation %}, or, for a model in LLaVA's layout, give --version "
    "one of LLaVA's templates"
)
LEFT_OUT = (
    "the tokenizer's chat template leaves answers out: use another one (chat_template.jinja), or, for a model in "
    "LLaVA's layout, give --version one of LLaVA's templates"
)
UNWRITTEN_CALLS = (
    "the tokenizer's chat template leaves out tool calls or the text next to them, or writes other text between them"
)
MARKER = re.compile("\ue000([0-9]+)([a-z][0-9]*)\ue001")


class AnswerParts(NamedTuple):
    """Parts of an answer that markers can replace, by name: "t" thought, "c" text, "n0", "n1", … names of called
    functions. An empty part has no marker. turn: index of the turn in the conversation."""

    turn: int
    values: dict[str, str]

    @property
    def has_calls(self) -> bool:
        """True for an answer that calls a tool."""
        return "n0" in self.values

    def marker(self, part: str) -> str:
        """Return the marker that replaces a part."""
        return f"\ue000{self.turn}{part}\ue001"


def find_answers(
    text: str,
    marked: str,
    answers: Sequence[AnswerParts],
    marked_up_to: Callable[[int], str],
    special: re.Pattern[str],
) -> list[Span]:
    """Find the span of every answer: from its first written part to the end of its end marker.

    marked: the same text with markers; marked_up_to: renders the marked text up to and including turn N; special:
    pattern of spaces and the special token that may end an answer. Raises DataError if the two renderings differ around
    the markers.
    """
    values = {answer.turn: answer.values for answer in answers}
    around, found = _split(marked, values)
    ends: list[tuple[int, int]] = []  # start and end of each part
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
            length = _length_after(_split(marked_up_to(answer.turn), values), answer, around, (k, last))
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
    """Split a marked text into the texts around markers and each marker's (turn, part). A function's name that
    occurs again, for example before the result, is text. values: part texts by turn index."""
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
    """Return how a value is written at `place`: unchanged, stripped of outer spaces, or with each part stripped."""
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


def _length_after(
    alone: tuple[list[str], list[tuple[int, str]]], answer: AnswerParts, around: list[str], parts: tuple[int, int]
) -> int:
    """Return the number of characters after the last marker that still belong to an answer with tool calls.

    alone: result of _split for the conversation up to this answer (included). All text after its last marker belongs to
    the answer. parts: indices of the answer's first and last marker. Raises DataError if other text, such as a result,
    is written between the answer's parts.
    """
    alone_around, alone_found = alone
    first, last = parts
    numbers = [i for i, (turn, _) in enumerate(alone_found) if turn == answer.turn]
    if len(numbers) == last - first + 2 and alone_found[numbers[0]][1] == "t":
        del numbers[0]  # a thought that is omitted when a question follows
    if not numbers or len(numbers) != last - first + 1 or numbers[-1] + 2 != len(alone_around):
        raise DataError(UNWRITTEN_CALLS)
    if alone_around[numbers[0] + 1 : numbers[-1] + 1] != around[first + 1 : last + 1]:
        raise DataError(UNWRITTEN_CALLS)
    rest, here = alone_around[-1].rstrip(), around[last + 1]
    if not here.startswith(rest):
        raise DataError(
            "after tool calls, the tokenizer's chat template ends an answer differently when something follows it, so "
            "the answer's learned part can't be found"
        )
    return len(rest)
