# G answers to a prompt
"""Prompts and answers, and the interface of extensions that sample answers in their own way."""

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
    """An answer of several turns, with an environment's texts and images between the model's tokens.

    ids, log_probs: the model's tokens only; tokens: all tokens after the prompt; digests: hashes of the images among
    them; sample: prompt and all tokens, supervised at the ids; text: the last turn, which rewards judge; columns:
    additional columns for rewards; reward: the environment's reward, or nan; shown: all turns, for the log.
    """

    tokens: tuple[int, ...]
    digests: tuple[bytes, ...]
    sample: LoadedSample = field(compare=False)
    text: str = field(compare=False)
    shown: str = field(compare=False)
    columns: Mapping[str, object] = field(compare=False)
    reward: float = field(compare=False, default=math.nan)


class Drawer:
    """Generates the answers of a run. An extension's plan of this class (Plan.own) is used instead of draw_answers.

    columns: columns that its episodes add for reward functions; reward: the environment's additional reward.
    """

    columns: ClassVar[tuple[str, ...]] = ()
    reward: Reward

    def try_out(self, asked: RolloutPrompt, rules: DrawRules) -> None:
        """Try a prompt with its reference as the answer, before the model is built. Raises DataError."""

    def draw(
        self, model: LlavaModel, prompts: list[RolloutPrompt], seeds: list[tuple[int, ...]], rules: DrawRules
    ) -> list[tuple[RolloutPrompt, list[Episode]]]:
        """Generate num_answers episodes for every prompt. Also returns each prompt as it was asked. Not collective.

        seeds: for each prompt, the numbers that seed all of its randomness. Raises DataError.
        """
        raise NotImplementedError

    def metrics(self, groups: Sequence[Sequence[Episode]]) -> dict[str, float]:
        """Return metrics by name: means over a prompt's episodes, summed over prompts."""
        raise NotImplementedError


def whole_sample(asked: LoadedSample, answer: Answer) -> LoadedSample:
    """Return a prompt with an answer, supervised at the model's tokens."""
    return answer.sample if isinstance(answer, Episode) else with_answer(asked, answer.ids)
