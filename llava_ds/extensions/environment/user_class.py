"""Call the user's class (docs/environment.md lists its methods), check its results, and encode its observations."""

import contextlib
import hashlib
import math
import numbers
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from PIL import Image

from llava_ds.constants import IGNORE_INDEX, IMAGE_TOKEN, ConfigError, DataError, in_short
from llava_ds.data.dataset import encoding_options
from llava_ds.data.encode import encoder_of
from llava_ds.data.end_markers import end_markers
from llava_ds.data.sample import Message, Transcript
from llava_ds.files.python_function import attribute_of_file, raised_at
from llava_ds.layouts import ImageText
from llava_ds.train.plan import Plan

FLAG = "--environment"
OBSERVATION = f'the observation as a text without {IMAGE_TOKEN}, or {{"text": such a text, "images": [images of PIL]}}'
EXCHANGE = (Message("human", "x"), Message("gpt", "y"))


class Observation(NamedTuple):
    """Text and images from the environment for the model."""

    text: str
    images: tuple[Image.Image, ...] = ()

    def digests(self) -> list[bytes]:
        """Return a hash of each image's pixels and colours."""
        facts = [(one.mode, one.size, one.getpalette(), one.info.get("transparency")) for one in self.images]
        return [hashlib.sha256(repr(fact).encode() + one.tobytes()).digest() for fact, one in zip(facts, self.images)]


def class_of_file(name: str) -> type:
    """Load the class that --environment names. Raises ConfigError if it is missing, or lacks a method."""
    found = attribute_of_file(FLAG, name, "class")
    for method in ("reset", "step"):
        if not callable(getattr(found, method, None)):
            raise ConfigError(f"{FLAG} {name} has no method {method}: it needs reset(record, seed) and step(answer)")
    return found


@dataclass
class Game:
    """An instance of the user's class. name: the flag's value; record: the record's id; turn: model turns so far."""

    name: str
    record: str
    turn: int = 0
    own: object = None

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Return a context that adds flag, record and turn to the message of a DataError."""
        try:
            yield
        except DataError as error:
            at = raised_at(error.__cause__ or error, self.name)
            raise DataError(f"{FLAG} {self.name}, record {self.record!r}, turn {self.turn}: {error}{at}") from error

    def begin(self, kind: type, record: dict[str, object], seed: int) -> Observation | None:
        """Create the object and reset it. Returns the first observation, None to use the record's question."""
        self.own = _call("the constructor", kind)
        found = _call("reset", self.own.reset, record, seed)
        return None if found is None else _observation("reset", found)

    def step(self, answer: str) -> tuple[Observation | None, list[float], bool]:
        """Pass on the model's turn. Returns the observation (None at the end), the rewards, and True at the end."""
        self.turn += 1
        found = _call("step", self.own.step, answer)
        if not isinstance(found, tuple) or len(found) != 3 or not isinstance(found[2], (bool, np.bool_)):
            raise _wrong("step", found, "an observation, a reward, and True or False")
        observation, reward, is_over = found
        return None if is_over else _observation("step", observation), _rewards("step", reward), bool(is_over)

    def last_reward(self) -> list[float]:
        """Return the reward from get_reward() in a list, empty if the class has no such method or it returns None."""
        return _rewards("get_reward", _call("get_reward", getattr(self.own, "get_reward", lambda: None)))


def _call(what: str, method: Callable, *arguments: object) -> object:
    try:
        return method(*arguments)
    except Exception as error:  # any error of the user's code
        taken = "".join(f", for the answer {in_short(repr(each))}" for each in arguments if isinstance(each, str))
        raise DataError(f"{what} raised {in_short(repr(error))}{taken}") from error


def _wrong(what: str, found: object, expected: str) -> DataError:
    return DataError(f"{what} gave {in_short(repr(found))}, expected {expected}")


def _rewards(what: str, found: object) -> list[float]:
    if found is None:
        return []
    if not isinstance(found, numbers.Real) or not math.isfinite(found):
        raise _wrong(what, found, "a finite number or None as the reward")
    return [float(found)]


def _observation(what: str, found: object) -> Observation:
    parts = found if isinstance(found, dict) else {"text": found}
    text, images = parts.get("text", ""), parts.get("images", ())
    fits = parts.keys() <= {"text", "images"} and isinstance(text, str) and isinstance(images, (list, tuple))
    if not fits or IMAGE_TOKEN in text or not (text.strip() or images):
        raise _wrong(what, found, OBSERVATION)
    if wrong := [image for image in images if not isinstance(image, Image.Image) or not min(image.size)]:
        raise _wrong(what, wrong[0], "an image of PIL with pixels")
    return Observation(text, tuple(images))


class ObservationEncoder:
    """Encodes observations like conversations in training, as the first question or as text between two answers."""

    def __init__(self, plan: Plan) -> None:
        version = plan.args.model.version
        self._encoder = encoder_of(plan.model.tokenizer, encoding_options(plan.args), plan.images)
        ids, start = self._encoded(EXCHANGE)
        ends = np.flatnonzero(np.isin(ids[start:], end_markers(version, plan.model.tokenizer)))
        if not len(ends):
            raise ConfigError(f"{FLAG} can't be used with --version {version}, whose answers end by several tokens")
        self._opened = start + ends[0] + 1  # ids of a question and its answer, up to the end marker
        answer, between = ids[start : self._opened], self.ids(Observation("x"))
        expected = np.concatenate([ids[: self._opened], between, answer, between, answer])
        if not np.array_equal(self._encoded(3 * EXCHANGE)[0][: len(expected)], expected):
            raise ConfigError(
                f"{FLAG} can't be used with this chat template (--version {version}): it writes an answer differently "
                "when a question follows, so that a sampled answer can't be continued"
            )

    def ids(self, shown: Observation, marks: Sequence[int | ImageText] = (), opens: bool = False) -> list[int]:
        """Return the ids from the previous answer's end marker (from the start if `opens`) up to the next answer."""
        question = Message("human", f"{IMAGE_TOKEN}\n" * len(shown.images) + shown.text)
        ids, start = self._encoded((*(() if opens else EXCHANGE), question, EXCHANGE[1]), marks)
        return ids[0 if opens else self._opened : start].tolist()

    def _encoded(self, messages: tuple[Message, ...], marks: Sequence[int | ImageText] = ()) -> tuple[np.ndarray, int]:
        """Return the ids of a conversation, and the position where its last answer starts."""
        self._encoder.refuse_without_rows([message.text for message in messages])
        encoded = self._encoder.encode_whole(Transcript(messages), marks)
        return encoded.input_ids, int(np.flatnonzero(encoded.labels != IGNORE_INDEX)[0])
