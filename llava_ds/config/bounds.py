"""Bounds of numbers that people write: named once beside the field or flag, and checked in one place."""

import argparse
import math
import re
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass, is_dataclass
from typing import Annotated

from llava_ds.constants import in_short

MOST = 2**31 - 1  # of counts: what torch, numpy and C take without a thought, and more than anybody means


@dataclass(frozen=True)
class Bounds:
    """The values that a number may have; above and below: the end itself is not one of them. nan never is."""

    least: float = -math.inf
    most: float = math.inf
    above: bool = False
    below: bool = False

    def holds(self, value: float) -> bool:
        """True for a finite number within the bounds."""
        if isinstance(value, float) and not math.isfinite(value):
            return False
        over = value > self.least if self.above else value >= self.least
        return over and (value < self.most if self.below else value <= self.most)

    def expected(self, value: float) -> str:
        """Return what to give instead of a value outside: "1 or more"."""
        if 1 < self.most < value < math.inf:
            return f"{self.most:,} or less"
        if self.least == -math.inf:
            return "a finite number"
        if self.most > 1:
            return f"a value above {self.least:g}" if self.above else f"{self.least:,.10g} or more"
        first = f"above {self.least:g}" if self.above else f"from {self.least:g}"
        return f"a value {first} to {'below ' * self.below}{self.most:g}"


Whole = Annotated[int, Bounds(-MOST, MOST)]
NotNegative = Annotated[int, Bounds(0, MOST)]
Count = Annotated[int, Bounds(1, MOST)]
Workers = Annotated[int, Bounds(0, 4096)]  # processes; a machine ends before its kernel's limit
Seed = Annotated[int, Bounds(0, 2**32 - 1)]  # numpy takes no other
Number = Annotated[float, Bounds()]
Rate = Annotated[float, Bounds(0)]
Positive = Annotated[float, Bounds(0, above=True)]
Seconds = Annotated[float, Bounds(0, 10**9)]  # the system's clocks and waits take no more than some 292 years
Part = Annotated[float, Bounds(0, 1)]
PartBelowOne = Annotated[float, Bounds(0, 1, below=True)]


def bounds_of(section: type) -> dict[str, Bounds]:
    """The bounds of a dataclass's fields, by name, where their types say some (also in `Count | None`)."""
    assert is_dataclass(section)
    kinds = typing.get_type_hints(section, include_extras=True)
    return {name: bounds for name, kind in kinds.items() if (bounds := _bounds_in(kind)) is not None}


def out_of_bounds(values: dict[str, object], sections: Iterable[type]) -> list[str]:
    """A line for every number that its field does not take; words, which some fields take too, are passed over."""
    problems = []
    for name, bounds in (pair for section in sections for pair in bounds_of(section).items()):
        value = values[name]
        if isinstance(value, (int, float)) and not bounds.holds(value):
            problems.append(f"--{name} is {in_short(value)}: give {bounds.expected(value)}")
    return problems


def number(kind: type) -> Callable[[str], float]:
    """The `type=` of a flag of argparse's that takes one of the numbers above, like number(Count)."""
    base, bounds = typing.get_args(kind)

    def read(text: str) -> base:
        try:
            value = base(text)
        except ValueError:
            words = {int: "a whole number", float: "a number"}
            raise argparse.ArgumentTypeError(f"{in_short(text)} is not {words[base]}") from None
        if not bounds.holds(value):
            raise argparse.ArgumentTypeError(f"is {in_short(text)}: give {bounds.expected(value)}")
        return value

    return read


def in_a_line(message: str) -> str:
    """argparse's "argument --limit: is 0: ..." as "--limit is 0: ...", and its own words behind a colon."""
    pattern = r"^argument ([^\s:/]+)[^\s:]*:( (?:invalid|expected|ignored|not allowed) )?"
    return re.sub(pattern, lambda found: f"{found[1]}:{found[2]}" if found[2] else found[1], message)


def _bounds_in(kind: object) -> Bounds | None:
    if typing.get_origin(kind) is Annotated:
        return next((each for each in kind.__metadata__ if isinstance(each, Bounds)), None)
    return next((found for each in typing.get_args(kind) if (found := _bounds_in(each)) is not None), None)
