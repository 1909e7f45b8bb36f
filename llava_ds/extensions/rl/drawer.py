# G answers to a prompt
"""Define prompts, answers of several turns, and the interface of extensions that generate answers themselves."""

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
    """A sample up to its last answer. text: the question passed to rewards. reference: the record's answer. columns:
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

    ids, log_probs: only of tokens that the model generated. tokens: all tokens after the prompt. digests: hashes of
    their images. sample: prompt and all tokens, supervised at `ids`. text: the last turn, judged by rewards. columns:
    additional columns for rewards. reward: from the environment, or nan. shown: text of all turns for the log.
    """

    tokens: tuple[int, ...]
    digests: tuple[bytes, ...]
    sample: LoadedSample = field(compare=False)
    text: str = field(compare=False)
    shown: str = field(compare=False)
    columns: Mapping[str, object] = field(compare=False)
    reward: float = field(compare=False, default=math.nan)


class Drawer:
    """Generates the answers of a run. If an extension's plan in Plan.own is a Drawer, it replaces draw_answers.

    columns: names of columns that episodes add for reward functions. reward: the environment's additional reward.
    """

    columns: ClassVar[tuple[str, ...]] = ()
    reward: Reward

    def try_out(self, asked: RolloutPrompt, rules: DrawRules) -> None:
        """Try a prompt with its reference as the answer, before the model is built. Raises DataError if it fails."""

    def draw(
        self, model: LlavaModel, prompts: list[RolloutPrompt], seeds: list[tuple[int, ...]], rules: DrawRules
    ) -> list[tuple[RolloutPrompt, list[Episode]]]:
        """Generate num_answers episodes per prompt; also returns each prompt as the model got it. Not collective.

        seeds: per prompt, the numbers that seed all of its randomness. Raises DataError if the environment fails.
        """
        raise NotImplementedError

    def metrics(self, groups: Sequence[Sequence[Episode]]) -> dict[str, float]:
        """Return metrics by name: means over a prompt's episodes, summed over prompts."""
        raise NotImplementedError


def whole_sample(asked: LoadedSample, answer: Answer) -> LoadedSample:
    """Return a prompt with an answer, supervised at the model's tokens."""
    return answer.sample if isinstance(answer, Episode) else with_answer(asked, answer.ids)
