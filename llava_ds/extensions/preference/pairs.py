"""Base of objectives over pairs of answers: it averages over a step's pairs, and sums by data source."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from llava_ds.batch import Batch
from llava_ds.data.loader import Window
from llava_ds.model.heads import SUMMED
from llava_ds.runtime.mesh import ALONE, Mesh
from llava_ds.train.objectives.objective import MicroLoss


@dataclass(frozen=True)
class PairObjective:
    """An objective over pairs of answers; a pair's answers are in the same micro-batch. See Objective.

    loss: computes the loss of pairs, averaged over a step's pairs on all ranks. num_sources: number of data sources.
    mesh: its ranks may share the tokens of a pair. Subclasses set metric_names.
    """

    loss: Callable
    num_sources: int
    grad_ranks: int
    mesh: Mesh = ALONE
    logs_means = False
    probe = SUMMED

    def micro_loss(
        self,
        losses: torch.Tensor,
        rows: torch.Tensor,
        batch: Batch,
        metrics: dict[str, torch.Tensor],
        counted: torch.Tensor,
        every: int = 2,
    ) -> MicroLoss:
        """Return forward's result, given the loss of every pair (pairs,).

        rows: the engine's output. counted (pairs,) float64: each pair's weight in the log. every: answers per loss.
        """
        sources = batch.sources[: every * len(losses) : every]
        is_from = sources == torch.arange(self.num_sources, device=sources.device)[:, None]  # (sources, pairs)
        logged = losses.detach() * counted, counted
        by_source = torch.stack([torch.where(is_from, numbers, 0.0).sum(1) for numbers in logged])
        # A rank without pairs still takes part in backward, with zero gradients.
        return MicroLoss(losses.sum() + 0.0 * rows.sum(), by_source, metrics)

    def scales(self, window: Window, counts: torch.Tensor) -> list[torch.Tensor]:
        """Return the factor of each micro-batch: grad_ranks / pairs of the step (see Objective)."""
        return [self.grad_ranks / self.num_units(counts.clamp(min=1))] * len(window.micro_batches)

    def num_units(self, counts):
        """Return the number of pairs, over which the log averages. counts: Counts, or a tensor with its fields."""
        return counts[0]
