"""Add the routers' loss to any objective, and log the load of the experts."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from llava_ds.batch import Batch
from llava_ds.data.loader import Window
from llava_ds.extensions.mixtures.mixture import Gates, Routers
from llava_ds.train.objectives.objective import MicroLoss, Objective


@dataclass(frozen=True)
class Routed:
    """Adds coefficient times the routers' loss to the mean loss of a step.

    The routers' loss of a micro-batch is weighted by the micro-batch's units of the objective, so it depends on which
    samples share a micro-batch. The objective's own loss is logged unchanged.
    """

    objective: Objective
    routers: Routers | Gates
    coefficient: float

    @property
    def num_sources(self) -> int:
        """Same as the objective's."""
        return self.objective.num_sources

    @property
    def grad_ranks(self) -> int:
        return self.objective.grad_ranks

    @property
    def logs_means(self) -> bool:
        """Same as the objective's."""
        return self.objective.logs_means

    def num_units(self, counts: Sequence) -> object:
        """Same as the objective's."""
        return self.objective.num_units(counts)

    def forward(self, engine, batch: Batch) -> MicroLoss:
        """Run the model and record the routers' choices."""
        with self.routers.recording() as seen:
            micro = self.objective.forward(engine, batch)
        with nullcontext() if self.coefficient else torch.no_grad():
            balance = self.routers.balance(seen)
        units = micro.by_source[1].sum().to(micro.loss_sum.dtype)
        return micro._replace(
            loss_sum=micro.loss_sum + self.coefficient * balance.aux_loss * units,
            means={f"experts/{name}": value.detach().double() for name, value in balance._asdict().items()},
        )

    def scales(self, window: Window, counts: torch.Tensor) -> list[torch.Tensor]:
        """Same as the objective's."""
        return self.objective.scales(window, counts)
