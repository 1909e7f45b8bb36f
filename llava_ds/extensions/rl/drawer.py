# G answers to a prompt
"""Prompts and answers, and the interface of extensions that draw answers in their own way."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from llava_ds.data.collate import LoadedSample
from llava_ds.extensions.rl.rewards import Reward
from llava_ds.model.llava import LlavaModel
from llava_ds.train.evaluating.sampling import Answer, DrawRules, with_answer


@dataclass(frozen=True)
class RolloutPrompt:
    """A sample up to its last answer. text: the question, as rewards see it; reference: the record's answer; columns:
    the record's other columns."""

    index: int
    id: str
    sample: LoadedSample
    text: str
    reference: str
    columns: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Episode(Answer):
    """An answer with texts and images of others between the model's tokens; ids and log_probs are the model's alone.

    tokens: all after the prompt; digests: of the images among them; sample: the prompt and all tokens, supervised at
    the ids; text: the last turn, which rewards judge; columns: more columns for them; reward: nan for none; shown: all
    turns, for the log.
    """

    tokens: tuple[int, ...]
    digests: tuple[bytes, ...]
    sample: LoadedSample = field(compare=False)
    text: str = field(compare=False)
    shown: str = field(compare=False)
    columns: Mapping[str, object] = field(compare=False)
    reward: float = field(compare=False, default=math.nan)


class Drawer:
    """Draws the answers of a run. An extension's plan of this class (Plan.own) is used in place of draw_answers.

    columns: columns that its episodes add for reward functions; reward: the episodes' own, added to the others.
    """

    columns: ClassVar[tuple[str, ...]] = ()
    reward: Reward

    def try_out(self, asked: RolloutPrompt, rules: DrawRules) -> None:
        """Try a prompt with its reference as the answer, before the model is built. Raises DataError."""

    def draw(
        self, model: LlavaModel, prompts: list[RolloutPrompt], seeds: list[tuple[int, ...]], rules: DrawRules
    ) -> list[tuple[RolloutPrompt, list[Episode]]]:
        """Draw num_answers episodes to every prompt; returns also each prompt as it was asked. A rank calls it alone.

        seeds: numbers for each prompt that all randomness depends on. Raises DataError.
        """
        raise NotImplementedError

    def metrics(self, groups: Sequence[Sequence[Episode]]) -> dict[str, float]:
        """Return sums over prompts, each a mean over its episodes."""
        raise NotImplementedError


def whole_sample(asked: LoadedSample, answer: Answer) -> LoadedSample:
    """Return a prompt with an answer, supervised at the model's tokens."""
    return answer.sample if isinstance(answer, Episode) else with_answer(asked, answer.ids)
