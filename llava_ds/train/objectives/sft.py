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

    A token's loss is multiplied by its weight, and counts as one token in the mean whatever its weight, as ms-swift's
    loss_scale has it: half the weight is half the loss and half the gradient, and other tokens' stay as they are.
    reduction "token": the mean over all supervised tokens of the step, on all ranks. "micro_batch": LLaVA's mean over
    each micro-batch's tokens, then over the micro-batches of all ranks that have any. num_sources: of the data.
    """

    reduction: Literal["token", "micro_batch"] = "token"
    num_sources: int = 1
    grad_ranks: int = field(kw_only=True)
    probe = SUMMED

    @property
    def logs_means(self) -> bool:
        """True where the mean losses of micro-batches are what is averaged."""
        return self.reduction == "micro_batch"

    def num_units(self, counts: Sequence) -> object:
        """Supervised tokens."""
        return counts[2]

    def forward(self, engine, batch: Batch) -> MicroLoss:
        """Run the model, which computes the summed loss."""
        loss_sum, by_source = engine(batch, SummedLoss(self.num_sources))
        return MicroLoss(loss_sum, by_source, {})

    def scales(self, window: Window, counts: torch.Tensor) -> list[torch.Tensor]:
        """Return the factor of each micro-batch (see Objective)."""
        _, _, num_targets, num_micro_batches, *_ = counts.clamp(min=1)
        if self.reduction == "token":
            return [self.grad_ranks / num_targets] * len(window.micro_batches)
        return [self.grad_ranks / (num_micro_batches * max(1, m.num_targets)) for m in window.micro_batches]
