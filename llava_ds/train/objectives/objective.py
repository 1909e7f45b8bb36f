"""The interface of what training minimises: each micro-batch becomes a summed loss and a factor in its step."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar, NamedTuple, Protocol

import torch

from llava_ds.batch import Batch
from llava_ds.data.loader import Window
from llava_ds.model.heads import Head


class MicroLoss(NamedTuple):
    """The loss of one micro-batch, on the device.

    loss_sum: over its units (supervised tokens, or pairs of answers), a scalar with a gradient; by_source (2, sources)
    float64: summed loss and units of each data source; metrics: further sums over units by name, float64 scalars,
    which the log shows as means per unit of the step; means: numbers of the micro-batch as a whole, which the log shows
    as means weighed by the share that the micro-batch has in the loss of the step.
    """

    loss_sum: torch.Tensor
    by_source: torch.Tensor
    metrics: dict[str, torch.Tensor]
    means: Mapping[str, torch.Tensor] = MappingProxyType({})


class Objective(Protocol):
    """A loss to minimise.

    num_sources: of the data; grad_ranks: of the mesh; logs_means: the log has the mean loss of every micro-batch;
    probe: a head that computes as much as the loss does, for a backward pass without a step.
    """

    num_sources: int
    grad_ranks: int
    probe: ClassVar[Head]

    @property
    def logs_means(self) -> bool: ...

    def num_units(self, counts: Sequence) -> object:
        """Return what the loss and metrics of a step are means over, from its Counts (or a tensor in their order)."""
        ...

    def forward(self, engine, batch: Batch) -> MicroLoss:
        """Run the model forward."""
        ...

    def scales(self, window: Window, counts: torch.Tensor) -> list[torch.Tensor]:
        """Return the factor of each micro-batch's summed loss, scalars on counts' device and of its dtype.

        counts: Window.counts summed over the data group, a tensor in the order of Counts. DeepSpeed averages gradients
        over grad_ranks, so the factor contains grad_ranks where a sum is meant.
        """
        ...
