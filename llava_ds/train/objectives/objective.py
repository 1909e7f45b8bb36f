"""Training objectives: a summed loss per micro-batch, and its factor in the step; and the basic one, SFT."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar, Literal, NamedTuple, Protocol

import torch

from llava_ds.batch import Batch
from llava_ds.constants import ConfigError
from llava_ds.data.loader import Window
from llava_ds.model.heads import SUMMED, Head, SummedLoss


class MicroLoss(NamedTuple):
    """The loss of one micro-batch, on the device.

    loss_sum: scalar with a gradient, summed over units (supervised tokens, or pairs of answers); by_source (2, sources)
    float64: summed loss and units of each data source; metrics: other sums over units by name, float64 scalars (logged
    as means per unit of the step, whatever --loss_reduction says); means: numbers per micro-batch, float64 scalars
    (logged as means, weighted by the micro-batch's share in the step's loss, so they follow --loss_reduction).
    """

    loss_sum: torch.Tensor
    by_source: torch.Tensor
    metrics: dict[str, torch.Tensor]
    means: Mapping[str, torch.Tensor] = MappingProxyType({})


class Objective(Protocol):
    """A loss to minimise.

    num_sources: number of data sources; grad_ranks: the mesh's; logs_means: log the mean loss of every micro-batch;
    probe: a head that computes as much as the loss, for a backward pass before the first step (never read from a
    Wrapped); metric_names: names of a MicroLoss's metrics, in order, needed if another rank may compute the loss.
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


def check_metrics(objective: Objective, seen: Sequence[MicroLoss]) -> None:
    """Raise ConfigError if ranks that don't compute the loss would sum other metrics, and so wait forever."""
    for micro in seen:
        if list(micro.metrics) == list(objective.metric_names):
            continue
        raise ConfigError(
            f"{type(objective).__name__}.forward() returned the metrics {list(micro.metrics)}, but its metric_names "
            f"are {list(objective.metric_names)}, needed by ranks that sum them without computing the loss: list the "
            "same names"
        )


def unseen(objective: Objective, device: torch.device) -> MicroLoss:
    """Return zeros as the result of a micro-batch whose loss another rank computes."""
    zero = torch.zeros((), dtype=torch.float64, device=device)
    return MicroLoss(None, zero.expand(2, objective.num_sources), dict.fromkeys(objective.metric_names, zero))


@dataclass(frozen=True)
class Wrapped:
    """Base of objectives that change another objective's forward(), for SessionPart.training_objective."""

    objective: Objective

    def __getattr__(self, name: str) -> object:
        """Return a member of the other objective that this one lacks."""
        return getattr(self.objective, name)
