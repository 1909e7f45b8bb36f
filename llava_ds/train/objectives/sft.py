"""Supervised fine-tuning: the cross-entropy of the supervised tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from llava_ds.batch import Batch
from llava_ds.data.loader import Window
from llava_ds.model.heads import SUMMED, SummedLoss
from llava_ds.train.objectives.objective import MicroLoss


@dataclass(frozen=True)
class SFT:
    """Cross-entropy, averaged over the tokens of a step or over micro-batches.

    A token's loss is multiplied by its weight; the mean divides by the number of tokens, not by their weights, like
    ms-swift's loss_scale: half the weight is half the loss and half the gradient, and other tokens don't change.
    reduction "token": the mean over all supervised tokens of the step, on all ranks. "micro_batch": LLaVA's mean over
    each micro-batch's tokens, then over all ranks' micro-batches that have any. num_sources: number of data sources.
    """

    reduction: Literal["token", "micro_batch"] = "token"
    num_sources: int = 1
    grad_ranks: int = field(kw_only=True)
    probe = SUMMED
    metric_names = ()

    @property
    def logs_means(self) -> bool:
        """True if the step averages the mean losses of micro-batches."""
        return self.reduction == "micro_batch"

    def num_units(self, counts: Sequence) -> object:
        """Number of supervised tokens."""
        return counts[2]

    def forward(self, engine, batch: Batch) -> MicroLoss:
        """Run the model with the summed loss as its head."""
        loss_sum, by_source = engine(batch, SummedLoss(self.num_sources))
        return MicroLoss(loss_sum, by_source, {})

    def scales(self, window: Window, counts: torch.Tensor) -> list[torch.Tensor]:
        """Return the factor of each micro-batch (see Objective)."""
        _, _, num_targets, num_micro_batches, *_ = counts.clamp(min=1)
        if self.reduction == "token":
            return [self.grad_ranks / num_targets] * len(window.micro_batches)
        return [self.grad_ranks / (num_micro_batches * max(1, m.num_targets)) for m in window.micro_batches]
