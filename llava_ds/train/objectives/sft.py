"""Supervised fine-tuning: the cross-entropy of the supervised tokens."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from llava_ds.batch import Batch
from llava_ds.data.loader import Window


class MicroLoss(NamedTuple):
    """The loss of one micro-batch, on the device.

    loss_sum: over its supervised tokens, a scalar with a gradient; by_source (2, sources) float64: summed loss and
    supervised tokens of each data source; metrics: further sums over supervised tokens by name, float64 scalars, which
    the log shows as means per supervised token of the step.
    """

    loss_sum: torch.Tensor
    by_source: torch.Tensor
    metrics: dict[str, torch.Tensor]


@dataclass(frozen=True)
class SFT:
    """Cross-entropy, averaged over the tokens of a step or over micro-batches.

    reduction "token": the mean over all supervised tokens of the step, on all ranks. "micro_batch": LLaVA's mean over
    each micro-batch's tokens, then over the micro-batches of all ranks that have any. num_sources: of the data.
    grad_ranks: of the mesh.
    """

    reduction: Literal["token", "micro_batch"] = "token"
    num_sources: int = 1
    grad_ranks: int = field(kw_only=True)

    def forward(self, engine, batch: Batch) -> MicroLoss:
        """Run the model forward."""
        loss_sum, by_source = engine(batch, num_sources=self.num_sources)
        return MicroLoss(loss_sum, by_source, {})

    def scales(self, window: Window, counts: torch.Tensor) -> list[torch.Tensor]:
        """Return the factor of each micro-batch's summed loss, scalars on counts' device and of its dtype.

        counts: Window.counts summed over the data group, a tensor in the order of Counts. DeepSpeed averages gradients
        over grad_ranks, so the factor contains grad_ranks where a sum is meant.
        """
        _, _, num_targets, num_micro_batches, *_ = counts.clamp(min=1)
        if self.reduction == "token":
            return [self.grad_ranks / num_targets] * len(window.micro_batches)
        return [self.grad_ranks / (num_micro_batches * max(1, m.num_targets)) for m in window.micro_batches]
