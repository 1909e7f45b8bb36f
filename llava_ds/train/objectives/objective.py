"""Training objectives: a summed loss per micro-batch, and its factor in the step's loss. SFT is the default one."""

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
    float64: summed loss and number of units per data source; metrics: float64 scalars by name, summed over units, and
    logged divided by the step's number of units, independent of --loss_reduction; means: float64 scalars by name, one
    value per micro-batch, logged as an average with the weights that the micro-batches have in the step's loss.
    """

    loss_sum: torch.Tensor
    by_source: torch.Tensor
    metrics: dict[str, torch.Tensor]
    means: Mapping[str, torch.Tensor] = MappingProxyType({})


class Objective(Protocol):
    """A loss to minimise.

    num_sources: number of data sources; grad_ranks: Mesh.grad_ranks; logs_means: True to log the mean loss of every
    micro-batch; probe: a head that needs as much memory as the loss, for the warm-up before the first step (not read
    from a Wrapped); metric_names: names of MicroLoss.metrics, in order, required if another rank may compute the loss.
    """

    num_sources: int
    grad_ranks: int
    metric_names: Sequence[str]
    probe: ClassVar[Head]

    @property
    def logs_means(self) -> bool: ...

    def num_units(self, counts: Sequence) -> object:
        """Return the number of units in a step. counts: its Counts, or a tensor in the order of Counts."""
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

    A token's loss is multiplied by its weight. As with ms-swift's loss_scale, the mean divides by the number of tokens,
    not by the sum of weights, so half the weight halves the token's gradient and changes no other token's.
    reduction: "token" for the mean over the step's supervised tokens on all ranks; "micro_batch" for LLaVA's mean over
    each micro-batch's tokens, averaged over the micro-batches of all ranks that have supervised tokens.
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
        """Return the number of supervised tokens (see Objective)."""
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
    """Raise ConfigError if the metrics differ from metric_names: ranks without the loss would then wait forever."""
    for micro in seen:
        if list(micro.metrics) == list(objective.metric_names):
            continue
        raise ConfigError(
            f"{type(objective).__name__}.forward() returned the metrics {list(micro.metrics)}, but its metric_names "
            f"are {list(objective.metric_names)}, needed by ranks that sum them without computing the loss: list the "
            "same names"
        )


def unseen(objective: Objective, device: torch.device) -> MicroLoss:
    """Return a MicroLoss of zeros, for a micro-batch whose loss another rank computes."""
    zero = torch.zeros((), dtype=torch.float64, device=device)
    return MicroLoss(None, zero.expand(2, objective.num_sources), dict.fromkeys(objective.metric_names, zero))


@dataclass(frozen=True)
class Wrapped:
    """Base class of objectives that change forward() of a wrapped objective. See SessionPart.training_objective."""

    objective: Objective

    def __getattr__(self, name: str) -> object:
        """Look up members that this class lacks in the wrapped objective."""
        return getattr(self.objective, name)
