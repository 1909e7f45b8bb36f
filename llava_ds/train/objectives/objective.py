"""The interface of a training objective: a summed loss per micro-batch, and its factor in the step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, NamedTuple, Protocol

import torch

from llava_ds.batch import Batch
from llava_ds.data.loader import Window
from llava_ds.model.heads import Head


class MicroLoss(NamedTuple):
    """The loss of one micro-batch, on the device.

    loss_sum: scalar with a gradient, summed over units (supervised tokens, or pairs of answers); by_source (2, sources)
    float64: summed loss and units of each data source; metrics: further sums over units by name, float64 scalars
    (logged as means per unit of the step, whatever --loss_reduction says); means: numbers per micro-batch, float64
    scalars (logged as means, weighted by the micro-batch's share in the step's loss, so they follow --loss_reduction).
    """

    loss_sum: torch.Tensor
    by_source: torch.Tensor
    metrics: dict[str, torch.Tensor]
    means: Mapping[str, torch.Tensor] = MappingProxyType({})


class Objective(Protocol):
    """A loss to minimise.

    num_sources: number of data sources; grad_ranks: the mesh's; logs_means: log the mean loss of every micro-batch;
    probe: a head that computes as much as the loss, for a backward pass before the first step; never a Wrapped's;
    metric_names: of the metrics of a MicroLoss, in order; only for objectives whose loss another rank may compute.
    """

    num_sources: int
    grad_ranks: int
    metric_names: Sequence[str]
    probe: ClassVar[Head]

    @property
    def logs_means(self) -> bool: ...

    def num_units(self, counts: Sequence) -> object:
        """Return the number of units in a step, from its Counts (or a tensor in their order)."""
        ...

    def forward(self, engine, batch: Batch) -> MicroLoss:
        """Run the model forward."""
        ...

    def scales(self, window: Window, counts: torch.Tensor) -> list[torch.Tensor]:
        """Return the factor of each micro-batch's summed loss, scalars with the device and dtype of counts.

        counts: Window.counts summed over the data group, a tensor in the order of Counts. DeepSpeed averages gradients
        over grad_ranks; a factor of grad_ranks turns that into a sum.
        """
        ...


def unseen(objective: Objective, device: torch.device) -> MicroLoss:
    """Return zeros as the result of a micro-batch whose loss another rank computes."""
    zero = torch.zeros((), dtype=torch.float64, device=device)
    return MicroLoss(None, zero.expand(2, objective.num_sources), dict.fromkeys(objective.metric_names, zero))


@dataclass(frozen=True)
class Wrapped:
    """Base of objectives that change another objective's forward(), for SessionPart.of_steps."""

    objective: Objective

    def __getattr__(self, name: str) -> object:
        """Return a member of the other objective that this one lacks."""
        return getattr(self.objective, name)
