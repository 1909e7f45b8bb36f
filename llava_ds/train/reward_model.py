"""A reward model at work: the scores of answers, by a model with a value head that does not train."""

from collections.abc import Sequence

import torch

from llava_ds.data.collate import LoadedSample, collate
from llava_ds.engine.frozen import FrozenPlan, open_frozen
from llava_ds.model.heads import LogProbs
from llava_ds.model.value_head import Values
from llava_ds.runtime.ranks import Ranks
from llava_ds.runtime.waiting import waiting
from llava_ds.train.objectives.dpo import sum_by_sample
from llava_ds.train.objectives.reward import answer_ends
from llava_ds.train.rewards import Completion

TOGETHER = 64  # answers in a batch


class RewardModel:
    """A reward model, whole on every rank: each scores its own answers, without waiting for others."""

    def __init__(self, plan: FrozenPlan, dtype: torch.dtype, ranks: Ranks) -> None:
        """All ranks call it together."""
        self._model, self._images, self._device = open_frozen(plan, dtype, ranks), plan.images, ranks.device

    def rewards(self, answers: Sequence[Completion]) -> list[float]:
        """The score of each answer. Equal answers to a prompt are computed once."""
        keys = [
            (tuple(one.sample.input_ids.tolist()), *(id(tiles) for tiles, _ in one.sample.media)) for one in answers
        ]
        distinct = dict(zip(keys, (one.sample for one in answers)))
        scores = dict(zip(distinct, self.scores(list(distinct.values()))))
        return [scores[key] for key in keys]

    @torch.no_grad()
    def scores(self, samples: list[LoadedSample]) -> list[float]:
        """The value head's number at the last token of each sample's answer; without a head, the answer's
        log-probability."""
        found: list[float] = []
        for first in range(0, len(samples), TOGETHER):
            batch = collate(samples[first : first + TOGETHER], self._images)
            with waiting("the reward model's scores"):
                batch = batch.to(self._device)
                if hasattr(self._model, "value_head"):
                    found += self._model(batch, Values(answer_ends(batch))).tolist()
                else:
                    found += sum_by_sample(self._model(batch, LogProbs()), batch)[0].tolist()
        return found
