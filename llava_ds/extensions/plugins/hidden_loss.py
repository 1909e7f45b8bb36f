# T tokens of a pack, n positions of the loss, n0 positions of the objective's own head, D language-model width
"""Add a loss on the language model's hidden states to the objective's loss. For extensions and plugins."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from llava_ds.batch import Batch
from llava_ds.config.plugin_calls import place, returned
from llava_ds.constants import ConfigError
from llava_ds.model.heads import Head
from llava_ds.train.objectives.objective import MicroLoss, Wrapped

COUNTED = "plugins.counted"  # key in Batch.extra, (samples,) bool: samples that a check counts; default: all
Values = Callable[[nn.Module, torch.Tensor, Batch], torch.Tensor]


@dataclass(frozen=True)
class HiddenLoss(Wrapped):
    """Adds a loss on the last hidden states at some positions, and logs its mean as `name`.

    at: returns positions in a batch, (n,) int64. values: returns the losses (n,) from the model, the hidden states (n,
    D) at these positions, and the batch. It is called in every forward pass, also without positions, and has to run
    modules of the model equally often on every rank. A sample's loss is its mean over positions times its number of
    supervised tokens, so the step's loss grows by weight times the mean and does not depend on packing. The memory
    warm-up does not include this loss. Raises ConfigError if at or values return other shapes or types.
    """

    name: str
    weight: float
    at: Callable[[Batch], torch.Tensor]
    values: Values

    def __post_init__(self) -> None:
        is_right = callable(self.at) and callable(self.values) and isinstance(self.name, str)
        if not (is_right and isinstance(self.weight, (int, float)) and math.isfinite(self.weight)):
            found = f"name {self.name!r:.40} and weight {self.weight!r:.40}"
            raise TypeError(f"HiddenLoss got {found}, expected a text, a finite number, and functions as at and values")

    def forward(self, engine: Callable[[Batch, Head], Any], batch: Batch) -> MicroLoss:
        """Run the objective with both heads in one forward pass."""
        terms = []

        def both(batch: Batch, head: Head) -> Any:
            result, term = engine(batch, _Beside(head, self.at, self.values))
            terms.append(term)
            return result

        micro = self.objective.forward(both, batch)
        term = sum(terms)
        if self.weight and micro.loss_sum.requires_grad and not term.requires_grad:
            raise ConfigError(f"{place(self.values)} returned a loss without a gradient, expected one: don't detach it")
        metrics = {**micro.metrics, self.name: term.detach().double()}
        return micro._replace(loss_sum=micro.loss_sum + self.weight * term, metrics=metrics)


@dataclass(frozen=True)
class _Beside:
    """A head that also returns the sum of an additional loss, a float32 scalar."""

    head: Head
    at: Callable[[Batch], torch.Tensor]
    values: Values
    shortens = False

    def positions(self, batch: Batch) -> torch.Tensor:
        """Return the head's positions, followed by those of the loss: (n0 + n,)."""
        at = self.at(batch)
        if not (isinstance(at, torch.Tensor) and at.dtype == torch.int64 and at.ndim == 1):
            expected = (
                f"positions among the {batch.input_ids.shape[1]} tokens, int64 (n,): of a mask, its nonzero()[:, 0]"
            )
            raise returned(self.at, at, expected)
        return torch.cat([self.head.positions(batch), at])

    def __call__(self, model: nn.Module, hidden: torch.Tensor, batch: Batch) -> tuple[Any, torch.Tensor]:
        """Return the objective's result, and the summed loss. hidden: (n0 + n, D)."""
        at = self.at(batch)
        own = len(hidden) - len(at)
        result, values = self.head(model, hidden[:own], batch), self.values(model, hidden[own:], batch)
        if not (isinstance(values, torch.Tensor) and values.shape == at.shape and values.device == at.device):
            raise returned(self.values, values, f"a loss for each position, ({len(at)},) on {at.device}")
        return result, sum_by_supervised(values.float(), at, batch)


def sum_by_supervised(values: torch.Tensor, at: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Sum each sample's mean of values (n,) at positions (n,), times its number of supervised tokens: a scalar."""
    num_samples = len(batch.cu_seqlens) - 1
    samples = torch.bucketize(at, batch.cu_seqlens[1:].to(at.dtype), right=True)  # (n,)
    counts = torch.bincount(samples, minlength=num_samples).clamp(min=1)
    targets = torch.bincount(batch.target_samples, minlength=num_samples)
    targets = targets * batch.extra.get(COUNTED, 1)
    return (values * (targets / counts).float().index_select(0, samples)).sum()
