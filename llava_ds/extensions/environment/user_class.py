"""The user's class (docs/environment.md has its methods), and the checks of everything that it returns."""

import contextlib
import math
import numbers
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from PIL import Image

from llava_ds.constants import IMAGE_TOKEN, ConfigError, DataError, in_short
from llava_ds.files.python_function import attribute_of_file, raised_at

FLAG = "--environment"
OBSERVATION = f'the observation as a text without {IMAGE_TOKEN}, or {{"text": such a text, "images": [images of PIL]}}'


class Observation(NamedTuple):
    """A text and images that the model is shown."""

    text: str
    images: tuple[Image.Image, ...] = ()


def class_of_file(name: str) -> type:
    """Load the flag's class. Raises ConfigError if it is missing, or lacks a method."""
    found = attribute_of_file(FLAG, name, "class")
    for method in ("reset", "step"):
        if not callable(getattr(found, method, None)):
            raise ConfigError(f"{FLAG} {name} has no method {method}: it needs reset(record, seed) and step(answer)")
    return found


@dataclass
class Game:
    """An object of the user's class. name: the flag's value; record: its id; turn: turns of the model so far."""

    name: str
    record: str
    turn: int = 0
    own: object = None

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Add flag, record and turn to the message of a DataError."""
        try:
            yield
        except DataError as error:
            at = raised_at(error.__cause__ or error, self.name)
            raise DataError(f"{FLAG} {self.name}, record {self.record!r}, turn {self.turn}: {error}{at}") from error

    def begin(self, kind: type, record: dict[str, object], seed: int) -> Observation | None:
        """Make the object and reset it. Returns the first observation, None for the record's question."""
        with self.named():
            self.own = _call("the constructor", kind)
            found = _call("reset", self.own.reset, record, seed)
            return None if found is None else _observation("reset", found)

    def step(self, answer: str) -> tuple[Observation | None, float, bool]:
        """Pass on the model's turn. Returns the observation (None at the end), the reward (nan for none), and True at
        the end."""
        self.turn += 1
        with self.named():
            found = _call("step", self.own.step, answer)
            if not isinstance(found, tuple) or len(found) != 3 or not isinstance(found[2], (bool, np.bool_)):
                raise _wrong("step", found, "an observation, a reward, and True or False")
            observation, reward, is_over = found
            return None if is_over else _observation("step", observation), _reward("step", reward), bool(is_over)

    def last_reward(self) -> float:
        """Return the reward of get_reward, nan for none."""
        method = getattr(self.own, "get_reward", lambda: None)
        with self.named():
            return _reward("get_reward", _call("get_reward", method))


def _call(what: str, method: Callable, *arguments: object) -> object:
    try:
        return method(*arguments)
    except Exception as error:  # any error of the user's code
        taken = "".join(f", for the answer {in_short(repr(each))}" for each in arguments if isinstance(each, str))
        raise DataError(f"{what} raised {in_short(repr(error))}{taken}") from error


def _wrong(what: str, found: object, expected: str) -> DataError:
    return DataError(f"{what} gave {in_short(repr(found))}, expected {expected}")


def _reward(what: str, found: object) -> float:
    if found is None:
        return math.nan
    if not isinstance(found, numbers.Real) or not math.isfinite(found):
        raise _wrong(what, found, "a finite number or None as the reward")
    return float(found)


def _observation(what: str, found: object) -> Observation:
    parts = found if isinstance(found, dict) else {"text": found}
    text, images = parts.get("text", ""), parts.get("images", ())
    fits = parts.keys() <= {"text", "images"} and isinstance(text, str) and isinstance(images, (list, tuple))
    if not fits or IMAGE_TOKEN in text or not (text.strip() or images):
        raise _wrong(what, found, OBSERVATION)
    for image in images:
        if not isinstance(image, Image.Image) or not min(image.size):
            raise _wrong(what, image, "an image of PIL with pixels")
    return Observation(text, tuple(images))
