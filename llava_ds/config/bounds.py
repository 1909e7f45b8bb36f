"""Parse numbers and durations that users give, and check the bounds that are declared with fields and flags."""

import argparse
import json
import math
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Annotated

from llava_ds.constants import ConfigError, in_short

MOST = 2**31 - 1  # largest count that torch, numpy and C all accept
DEFAULT_SHARD_SIZE = "5GB"
_SIZES = {"B": 1, "KB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4}
_UNITS = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


@dataclass(frozen=True)
class Bounds:
    """Allowed values of a number. above: excludes `least`; below: excludes `most`. nan is never allowed."""

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

    @property
    def range(self) -> str:
        """Sentence about the bounds for the help text, like "At least 1."; "" if any whole number is allowed."""
        if self.least <= -MOST:
            return ""
        if self.most >= MOST:
            return f"{'Above' if self.above else 'At least'} {self.least:g}."
        if self.above:
            return f"Above {self.least:g}, at most {self.most:,.10g}."
        return f"{self.least:g} to {'below ' * self.below}{self.most:,.10g}."

    def expected(self, value: float) -> str:
        """Describe the values to give instead of one that is out of bounds, like "1 or more"."""
        if 1 < self.most < value < math.inf:
            return f"{self.most:,} or less"
        if self.least == -math.inf:
            return "a finite number"
        if self.most > 1:
            return f"a value above {self.least:g}" if self.above else f"{self.least:,.10g} or more"
        first = f"above {self.least:g}" if self.above else f"from {self.least:g}"
        return f"a value {first} to {'below ' * self.below}{self.most:g}"


OWN_RANGE = "image"  # value of --image_value_range: each image's own minimum and maximum


def range_of_values(text: object) -> tuple[float, float] | None:
    """Parse --image_value_range. Returns the values that become black and white, or None for each image's own range.

    Raises ConfigError unless the text is "image", or two finite numbers like 0,4095.
    """
    if text == OWN_RANGE:
        return None
    try:
        low, high = (float(number) for number in str(text).split(","))
    except ValueError:
        low = high = math.nan
    if not (low < high and math.isfinite(low) and math.isfinite(high - low)):
        raise ConfigError(
            f"{in_short(repr(text))} is not a range of values: give the values for black and white, the lower one "
            f"first, like 0,4095, or {OWN_RANGE} for each image's own"
        )
    return low, high


Whole = Annotated[int, Bounds(-MOST, MOST)]
NotNegative = Annotated[int, Bounds(0, MOST)]
Count = Annotated[int, Bounds(1, MOST)]
Workers = Annotated[int, Bounds(0, 4096)]  # number of processes; machines fail below their kernel's limit
Seed = Annotated[int, Bounds(0, 2**32 - 1)]  # the largest that numpy accepts
Number = Annotated[float, Bounds()]
AtLeastOne = Annotated[float, Bounds(1)]
Rate = Annotated[float, Bounds(0)]
Positive = Annotated[float, Bounds(0, above=True)]
Seconds = Annotated[float, Bounds(0, 10**9)]  # the system's clocks and waits accept at most 292 years
Part = Annotated[float, Bounds(0, 1)]
PartAboveZero = Annotated[float, Bounds(0, 1, above=True)]
PartBelowOne = Annotated[float, Bounds(0, 1, below=True)]


def bounds_of(section: type) -> dict[str, Bounds]:
    """Return the bounds in the types of a dataclass's fields, by field name. Types like `Count | None` also count."""
    assert is_dataclass(section)
    kinds = typing.get_type_hints(section, include_extras=True)
    return {name: bounds for name, kind in kinds.items() if (bounds := _bounds_in(kind)) is not None}


def out_of_bounds(values: dict[str, object], sections: Iterable[type]) -> list[str]:
    """Return a line for every number that is out of the bounds of its field. Words that some fields accept in place
    of numbers, are not checked."""
    problems = []
    for name, bounds in (pair for section in sections for pair in bounds_of(section).items()):
        value = values[name]
        if isinstance(value, (int, float)) and not bounds.holds(value):
            problems.append(f"--{name} is {in_short(value)}: give {bounds.expected(value)}")
    return problems


def number(kind: type) -> Callable[[str], float]:
    """Return a value for argparse's `type=` that parses one of the number types above, as in number(Count)."""
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


def step_share_problem(name: str, value: float | None) -> Iterator[str]:
    """Yield a line if the value is neither a whole number of steps nor a fraction of all steps."""
    if value is not None and math.isfinite(value) and value >= 1 and value != int(value):
        yield f"--{name} is {value:g}: give a whole number of steps, or a fraction of all steps, below 1"


def seconds_of(text: str) -> int:
    """Parse a duration like 3h50m, 90s, 1d or a plain number of seconds. Raises ConfigError for 0 and any other
    text."""
    if text.isdecimal() and len(text) < 20:
        total = int(text)
    else:
        found = _UNITS.fullmatch(text)
        days, hours, minutes, seconds = (int(part or 0) for part in found.groups()) if found else (0, 0, 0, 0)
        total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if total == 0:
        raise ConfigError(f"{in_short(repr(text))} is not a duration: write it like 3h50m, 45m, 90s or 5400 (seconds)")
    return total


def json_object(text: str) -> dict:
    """Parse a flag's JSON object. Raises ValueError for other text, repeated keys and non-finite numbers."""
    try:
        found = json.loads(text, object_pairs_hook=_each_once, parse_constant=_finite, parse_float=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("expected an object")
    return found


def _each_once(pairs: list[tuple[str, object]]) -> dict:
    keys = [key for key, _ in pairs]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise ValueError(f"{in_short(twice[0])} occurs twice")
    return dict(pairs)


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{in_short(text)} is not a finite number")
    return value


def in_a_line(message: str) -> str:
    """Rewrite an error message of argparse: "argument --limit: is 0: ..." becomes "--limit is 0: ..."; a message in
    argparse's own words becomes "--limit: expected ..."."""
    pattern = r"^argument ([^\s:/]+)[^\s:]*:( (?:invalid|expected|ignored|not allowed) )?"
    return re.sub(pattern, lambda found: f"{found[1]}:{found[2]}" if found[2] else found[1], message)


def takes(action: argparse.Action, value: str) -> bool:
    """True if this flag accepts the value ("": no value), so that a misspelled flag with this value may mean it."""
    if not value or value.startswith("--"):
        return True
    is_switch = action.const is not None or getattr(action.type, "__name__", "") == "string_to_bool"
    if action.nargs == 0 or (value in ("True", "False") and not is_switch):
        return False
    try:
        converted = value if action.type is None else action.type(value)
    except (argparse.ArgumentTypeError, ValueError):
        return False
    return action.choices is None or converted in action.choices


def _bounds_in(kind: object) -> Bounds | None:
    if typing.get_origin(kind) is Annotated:
        return next((each for each in kind.__metadata__ if isinstance(each, Bounds)), None)
    return next((found for each in typing.get_args(kind) if (found := _bounds_in(each)) is not None), None)


def parse_size(text: str) -> int:
    """Parse --max_shard_size, like 5GB, in transformers' units. Returns bytes. Raises ConfigError for other text."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?B)", text.strip().upper())
    if found is None or float(found[1]) <= 0:
        raise ConfigError(f"--max_shard_size {text}: give a size like 5GB or 200MB")
    return int(float(found[1]) * _SIZES[found[2]])


def number_in(environ: Mapping[str, str], name: str, least: int = 1) -> int:
    """Return the whole number in an environment variable, or `least` if it is not set. Raises ConfigError otherwise."""
    text = environ.get(name, str(least))
    if (number := whole_number(text)) is None:
        raise ConfigError(f"{name} is {in_short(text)!r}: expected a whole number")
    return number


def whole_number(text: str) -> int | None:
    """Parse a whole number of at most 20 digits; None for other text."""
    return int(text) if re.fullmatch(r"[0-9]{1,20}", text) else None
