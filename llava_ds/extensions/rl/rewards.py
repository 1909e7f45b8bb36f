"""Reward answers with functions of this module, by name, or with functions in a Python file of the user."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from llava_ds.constants import ConfigError, did_you_mean
from llava_ds.data.collate import LoadedSample
from llava_ds.files.python_function import function_of_file
from llava_ds.second_models.frozen import Scorer

MODEL_REWARD = "reward_model"  # the reward model's name in the log
_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
NUMBER_WORDS = {word: i for i, word in enumerate(_WORDS)}
LONG_SHARE = 0.8  # answers longer than this fraction of the maximum length lose reward, up to 1

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_FORMAT = re.compile(r"\s*<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*", re.DOTALL)
_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?%?")
_LETTER = re.compile(r"\(?\b([A-Z])\b\)?")
_COORDINATE = r"\s*(-?\d+(?:\.\d+)?)\s*"
_BOX = re.compile(rf"[\[(]{_COORDINATE},{_COORDINATE},{_COORDINATE},{_COORDINATE}[\])]")


@dataclass(frozen=True)
class Completion:
    """An answer, with all that reward functions may use.

    reference: the record's answer. tokens: length of the answer, at most max_tokens. sample: prompt and answer as
    tokens, with the images. columns: the record's other columns. punished: number of last tokens before max_tokens that
    cost reward. own: a reward from the environment, or nan.
    """

    prompt: str
    text: str
    reference: str
    id: str
    tokens: int
    max_tokens: int
    sample: LoadedSample | None = None
    columns: Mapping[str, object] = field(default_factory=dict)
    punished: int | None = None
    own: float = math.nan


def exact(one: Completion) -> float:
    """Return 1 if the answer is the reference, ignoring case, spaces and a final full stop."""
    return float(_plain(final_answer(one.text)) == _plain(final_answer(one.reference)))


def numeric(one: Completion) -> float:
    """Return 1 if the last numbers in answer and reference are equal (digits, or number words up to ten)."""
    found, wanted = (last_number(final_answer(text)) for text in (one.text, one.reference))
    return float(found is not None and wanted is not None and math.isclose(found, wanted, rel_tol=1e-6, abs_tol=1e-9))


def choice(one: Completion) -> float:
    """Return 1 if answer and reference choose the same option, the first word that is a single capital letter."""
    found, wanted = (_LETTER.search(final_answer(text)) for text in (one.text, one.reference))
    return float(found is not None and wanted is not None and found[1] == wanted[1])


def iou(one: Completion) -> float:
    """Return the intersection over union of the first boxes [x1, y1, x2, y2] of answer and reference."""
    found, wanted = (first_box(final_answer(text)) for text in (one.text, one.reference))
    return 0.0 if found is None or wanted is None else overlap(found, wanted)


def format(one: Completion) -> float:
    """Return 1 for an answer that is exactly <think>...</think> and then <answer>...</answer>."""
    return float(_FORMAT.fullmatch(one.text) is not None)


def length(one: Completion) -> float:
    """Return 0 up to the punished tokens (by default beyond LONG_SHARE of the maximum), falling to -1 at the maximum.

    Source: DAPO (arXiv 2503.14476), equation 13.
    """
    free = LONG_SHARE * one.max_tokens if one.punished is None else one.max_tokens - one.punished
    return -max(0.0, one.tokens - free) / max(1e-9, one.max_tokens - free)


REWARDS: dict[str, Callable[[Completion], float]] = {
    each.__name__: each for each in (exact, numeric, choice, iou, format, length)
}


@dataclass(frozen=True)
class Reward:
    """A reward with its weight in the sum.

    of_all: function from several answers to their rewards, nan for answers to which it does not apply; None until the
    reward model is built. of_user: True for a function from the user's file.
    """

    name: str
    weight: float
    of_all: Callable[[Sequence[Completion]], list[float]] | None
    of_user: bool = False


def open_rewards(names: str | None, weights: str | None, has_model: bool = False) -> tuple[Reward, ...]:
    """Open the rewards of --reward_funcs (names or file.py:function, comma-separated) with --reward_weights.

    has_model: append the reward model. Raises ConfigError for unknown rewards, or if the number of weights differs.
    """
    wanted = [name.strip() for name in (names or "").split(",") if name.strip()]
    if (names is not None and not wanted) or len(set(wanted)) < len(wanted):
        raise ConfigError(f"--reward_funcs {names!r} has to name at least one reward, and none twice")
    functions, wanted = wanted, wanted + [MODEL_REWARD] * has_model
    if not wanted:
        return ()
    try:
        numbers = [1.0] * len(wanted) if weights is None else [float(text) for text in weights.split(",")]
    except ValueError:
        raise ConfigError(f"--reward_weights {weights}: expected numbers separated by commas, like 1,0.5") from None
    if len(numbers) != len(wanted) or not all(map(math.isfinite, numbers)):
        raise ConfigError(
            f"--reward_weights {weights} has {len(numbers)} numbers for {len(wanted)} rewards ({', '.join(wanted)}): "
            "give each a finite weight"
        )
    opened = [_of_file(name) if ":" in name else _own(name) for name in functions] + [None] * has_model
    shown = [name.rpartition(":")[2] for name in wanted]
    if len(set(shown)) < len(shown):
        raise ConfigError(f"--reward_funcs {names}: two rewards have the same name in the log: rename one")
    of_user = [":" in name for name in wanted]
    return tuple(Reward(*each) for each in zip(shown, numbers, opened, of_user))


def try_rewards(rewards: Sequence[Reward], one: Completion) -> None:
    """Call the user's reward functions on two answers to a prompt: its reference, and an empty text.

    one: the prompt with its reference as the answer. Raises DataError if a function fails, before time is spent on
    generating answers.
    """
    answers = [one, replace(one, text="")]
    for reward in rewards:
        if reward.of_user:
            reward.of_all(answers)


def model_rewards(judge: Scorer, answers: Sequence[Completion]) -> list[float]:
    """Return a reward model's score of each answer. Equal answers to a prompt are computed once."""
    keys = [(tuple(one.sample.input_ids.tolist()), *(id(tiles) for tiles, _ in one.sample.media)) for one in answers]
    distinct = dict(zip(keys, (one.sample for one in answers)))
    scores = dict(zip(distinct, judge.scores(list(distinct.values()))))
    return [scores[key] for key in keys]


def _own(name: str) -> Callable[[Sequence[Completion]], list[float]]:
    if name not in REWARDS:
        hint = did_you_mean(name, REWARDS, f"give some of {', '.join(REWARDS)}, or file.py:function")
        raise ConfigError(f"--reward_funcs {name}: unknown reward: {hint}")
    return lambda answers: [REWARDS[name](one) for one in answers]


def _of_file(name: str) -> Callable[[Sequence[Completion]], list[float]]:
    function = function_of_file("--reward_funcs", name, may_skip=True)
    return lambda answers: function(
        [one.prompt for one in answers],
        [one.text for one in answers],
        [one.reference for one in answers],
        [one.id for one in answers],
        _lists_of([one.columns for one in answers]),
    )


def _lists_of(columns: Sequence[Mapping[str, object]]) -> dict[str, list]:
    """Collect the answers' columns into a list per name, with None where a record lacks one."""
    names = dict.fromkeys(name for each in columns for name in each)
    return {name: [each.get(name) for each in columns] for name in names}


def final_answer(text: str) -> str:
    """Return the text within the last <answer>...</answer>, or all of the text if there are no such tags."""
    found = _ANSWER.findall(text)
    return (found[-1] if found else text).strip()


def last_number(text: str) -> float | None:
    """Return the last number in a text. If it has no digits, return the last number word up to ten."""
    if digits := _NUMBER.findall(text):
        return float(digits[-1].replace(",", "").rstrip("%"))
    words = [NUMBER_WORDS[word] for word in re.findall(r"[a-z]+", text.lower()) if word in NUMBER_WORDS]
    return float(words[-1]) if words else None


def first_box(text: str) -> tuple[float, ...] | None:
    """Return the first four numbers in brackets as (x1, y1, x2, y2), the smaller coordinates first."""
    found = _BOX.search(text)
    if found is None:
        return None
    x1, y1, x2, y2 = map(float, found.groups())
    return min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)


def overlap(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    """Return the intersection over union of two boxes."""
    sides = [max(0.0, min(a[i + 2], b[i + 2]) - max(a[i], b[i])) for i in (0, 1)]
    common = sides[0] * sides[1]
    union = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (a, b)) - common
    return common / union if union > 0 else 0.0


def _plain(text: str) -> str:
    return " ".join(text.lower().split()).rstrip(".").strip()
