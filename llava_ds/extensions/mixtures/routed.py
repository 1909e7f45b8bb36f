"""Add the routers' loss to any objective, and log the load of the experts."""

from contextlib import nullcontext
from dataclasses import dataclass

import torch

from llava_ds.batch import Batch
from llava_ds.extensions.mixtures.mixture import Gates, Routers
from llava_ds.train.objectives.objective import MicroLoss, Wrapped


@dataclass(frozen=True)
class Routed(Wrapped):
    """Adds coefficient times the routers' loss to the mean loss of a step.

    The routers' loss of a micro-batch is weighted by the objective's units in it, so it depends on which samples share
    a micro-batch. The objective's own loss is logged unchanged.
    """

    routers: Routers | Gates
    coefficient: float

    def forward(self, engine, batch: Batch) -> MicroLoss:
        """Run the model and record the routers' choices."""
        with self.routers.recording() as seen:
            micro = self.objective.forward(engine, batch)
        with nullcontext() if self.coefficient else torch.no_grad():
            balance = self.routers.balance(seen)
        units = micro.by_source[1].sum().to(micro.loss_sum.dtype)
        shown = {f"experts/{name}": value.detach().double() for name, value in balance._asdict().items()}
        return micro._replace(
            loss_sum=micro.loss_sum + self.coefficient * balance.aux_loss * units,
            means={**micro.means, **shown},
        )
