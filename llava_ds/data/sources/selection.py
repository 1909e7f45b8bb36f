"""Select a source's records by a sampling strategy and a weight, in the file's order."""

import math
import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from typing import TypeVar

from llava_ds.constants import ConfigError
from llava_ds.data.sources.options import short

T = TypeVar("T")

DEFAULT_SEED = 42
MAX_WEIGHT = 1000

_STRATEGY = re.compile(r"(first|end|random):(\d{1,12})(\.\d{1,6})?(%?)")


@dataclass(frozen=True)
class Selection:
    """A sampling strategy, and a weight that repeats its records.

    strategy: all, first, end or random; number: records to take; share: fraction to take, rounded up as in LLaVA-NeXT;
    weight: 2 takes every record twice, 1/2 a random half (rounded up), 5/2 every record twice and a random half again.
    """

    strategy: str = "all"
    number: int | None = None
    share: Fraction | None = None
    weight: Fraction = Fraction(1)
    seed: int = DEFAULT_SEED

    def describe(self) -> str:
        """Describe the selection for a person; empty if every record is taken once."""
        parts = []
        if self.strategy != "all":
            amount = f"{self.number:,}" if self.share is None else f"{float(self.share * 100):g}%"
            parts.append({"first": "the first ", "end": "the last ", "random": "random "}[self.strategy] + amount)
        if self.weight != 1:
            parts.append(
                f"{float(self.weight):g} times over" if self.weight > 1 else f"a random {float(self.weight):g}"
            )
        if self.strategy == "random" or self.weight.denominator != 1:
            parts.append(f"seed {self.seed}")
        return ", ".join(parts)

    def num_taken(self, num_records: int) -> int:
        """Number of records that the strategy takes, before the weight."""
        if self.strategy == "all":
            return num_records
        wanted = self.number if self.share is None else math.ceil(self.share * num_records)
        return min(wanted, num_records)

    def apply(self, read: Callable[[], Iterator[T]], count: Callable[[], int]) -> Iterator[T]:
        """Yield the selected records of `read`. `count` is called only if the number of records is needed.

        Records are not held in memory: a repetition reads them again, and a random choice decides record by record.
        """
        if self.weight == 1 and self.strategy == "all":
            return read()
        if self.weight == 1 and self.strategy == "first" and self.share is None:
            return islice(read(), self.number)
        return self._apply(read, count())

    def _apply(self, read: Callable[[], Iterator[T]], num_records: int) -> Iterator[T]:
        taken = self.num_taken(num_records)
        whole, part = divmod(self.weight, 1)
        for _ in range(int(whole)):
            yield from self._strategy(read(), num_records, taken)
        if part:
            again = self._strategy(read(), num_records, taken)
            yield from _random(again, taken, math.ceil(part * taken), f"{self.seed} weight")

    def _strategy(self, records: Iterator[T], num_records: int, taken: int) -> Iterator[T]:
        if self.strategy == "random":
            return _random(records, num_records, taken, str(self.seed))
        if self.strategy == "end":
            return islice(records, num_records - taken, None)
        return islice(records, taken)


def _random(items: Iterable[T], num_items: int, num_wanted: int, seed: str) -> Iterator[T]:
    """Choose num_wanted items in order; every subset is equally likely. Source: Knuth's algorithm S."""
    generator = random.Random(seed)  # a text as seed gives the same numbers in every process
    for left, item in zip(range(num_items, 0, -1), items):
        if generator.random() * left < num_wanted:
            num_wanted -= 1
            yield item


def parse_selection(strategy: object = "all", weight: object = 1, seed: object = DEFAULT_SEED) -> Selection:
    """Parse the values of a mixture's entry. Raises ConfigError."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ConfigError(f"seed is {short(seed)}, expected an integer")
    number_like = isinstance(weight, (int, float)) and not isinstance(weight, bool)
    if not number_like or not 0 < weight <= MAX_WEIGHT:
        raise ConfigError(f"weight is {short(weight)}, expected a number above 0 and up to {MAX_WEIGHT}")
    times = Fraction(str(weight))
    if strategy == "all":
        return Selection(weight=times, seed=seed)
    match = _STRATEGY.fullmatch(strategy) if isinstance(strategy, str) else None
    amount = Fraction(match[2] + (match[3] or "")) if match else Fraction(0)
    if not amount or (match[3] and not match[4]) or (match[4] and amount > 100):
        raise ConfigError(
            f"sampling_strategy is {short(strategy)}, expected all, or first, end or random with a number of "
            "records or a percentage, like first:1000, end:20% or random:5%"
        )
    if match[4]:
        return Selection(match[1], share=amount / 100, weight=times, seed=seed)
    return Selection(match[1], number=int(amount), weight=times, seed=seed)
