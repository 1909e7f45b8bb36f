"""What objectives over pairs of answers share: the mean over the pairs of a step, and sums by data source."""

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
    """An objective over pairs of answers, which stay together in a micro-batch; see Objective.

    loss: of pairs; the loss of a step is its mean over the pairs on all ranks. num_sources: of the data; mesh: whose
    ranks may share the tokens of a pair.
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
    ) -> MicroLoss:
        """The result of forward from the loss of every pair (pairs,). rows: what the engine returned; counted (pairs,)
        float64: what each pair counts in what is logged."""
        sources = batch.sources[: 2 * len(losses) : 2]
        is_from = sources == torch.arange(self.num_sources, device=sources.device)[:, None]  # (sources, pairs)
        logged = losses.detach() * counted, counted
        by_source = torch.stack([torch.where(is_from, numbers, 0.0).sum(1) for numbers in logged])
        # Without pairs too the model takes part in backward, with gradients of zero.
        return MicroLoss(losses.sum() + 0.0 * rows.sum(), by_source, metrics)

    def scales(self, window: Window, counts: torch.Tensor) -> list[torch.Tensor]:
        """Return the factor of each micro-batch: grad_ranks / pairs of the step (see Objective)."""
        return [self.grad_ranks / self.num_units(counts.clamp(min=1))] * len(window.micro_batches)

    def num_units(self, counts):
        """Pairs: what the log's metrics are means over. counts: Counts, or a tensor in its order."""
        return counts[0]
