# T tokens of all samples laid end to end, S supervised positions, n positions, D language-model width, V vocabulary
"""Heads compute the result of a forward pass from the last hidden states at some positions of a micro-batch."""

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from llava_ds.batch import Batch
from llava_ds.model.families.language import final_logits, logits_divisor
from llava_ds.model.output_loss import linear_log_probs


class Head(Protocol):
    """Computes the result of a forward pass. shortens: the last layer may be computed at the head's positions only."""

    shortens: ClassVar[bool]

    def positions(self, batch: Batch) -> torch.Tensor:
        """Return the positions to compute, indices (n,) into T; ascending if `shortens`."""
        ...

    def __call__(self, model: nn.Module, hidden: torch.Tensor, batch: Batch) -> Any:
        """Compute the result from the hidden states (n, D) at the positions. model: a LlavaModel."""
        ...


@dataclass(frozen=True)
class SummedLoss:
    """Computes the weighted sum of the cross-entropy over the supervised positions, a float32 scalar.

    If num_sources is given, it also returns the summed cross-entropy and the number of positions per data source,
    (2, num_sources) float64, without a gradient.
    """

    num_sources: int | None = None
    shortens = True

    def positions(self, batch: Batch) -> torch.Tensor:
        """Return the supervised positions, (S,)."""
        return batch.target_positions

    def __call__(self, model: nn.Module, hidden: torch.Tensor, batch: Batch) -> Any:
        """Return the sum, or the sum and the numbers per source."""
        language_model, hidden = model.language_model, batch.by_target(hidden)
        divisor = logits_divisor(language_model.config)
        hidden = hidden if divisor == 1 else hidden / divisor
        softcap, weights = _softcap(language_model), batch.target_weights
        output_layer = language_model.get_output_embeddings()
        loss, row_losses = output_layer(hidden, targets=batch.targets, softcap=softcap, row_weights=weights)
        if self.num_sources is None:
            return loss
        return loss, sum_by_source(row_losses, batch.sources.index_select(0, batch.target_samples), self.num_sources)


@dataclass(frozen=True)
class LogProbs:
    """Computes the log-probability of every target, with logits divided by temperature: (S,) float64."""

    temperature: float = 1.0
    shortens = True
    by_row = staticmethod(linear_log_probs)

    def positions(self, batch: Batch) -> torch.Tensor:
        """Return the supervised positions, (S,)."""
        return batch.target_positions

    def __call__(self, model: nn.Module, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the log-probabilities, (S,)."""
        language_model, hidden = model.language_model, batch.by_target(hidden)
        divisor = self.temperature * logits_divisor(language_model.config)
        hidden = hidden if divisor == 1 else hidden / divisor
        # c tanh(x / c) / t is (c / t) tanh((x / t) / (c / t)).
        softcap = (cap := _softcap(language_model)) and cap / self.temperature
        return language_model.get_output_embeddings()(
            hidden, targets=batch.targets, softcap=softcap, by_row=self.by_row
        )


@dataclass(frozen=True)
class Logits:
    """Computes logits (n, V). at (n,): the positions."""

    at: torch.Tensor
    shortens = False

    def positions(self, batch: Batch) -> torch.Tensor:
        """Return the given positions, (n,)."""
        return self.at

    def __call__(self, model: nn.Module, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the logits, (n, V)."""
        language_model = model.language_model
        return final_logits(language_model.get_output_embeddings()(hidden), language_model.config)


SUMMED = SummedLoss()


def sum_by_sample(rows: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum values of the supervised positions (S,) over each sample, and count them: (samples,) float64 each.

    The order of summation is fixed, so the same batch gives bit-equal sums.
    """
    num_samples = len(batch.cu_seqlens) - 1
    is_of = batch.target_samples == torch.arange(num_samples, device=rows.device)[:, None]  # (samples, S)
    return torch.where(is_of, rows, 0.0).sum(1), is_of.sum(1).double()


def _softcap(language_model: nn.Module) -> float | None:
    return getattr(language_model.config, "final_logit_softcapping", None)


def sum_by_source(row_losses: torch.Tensor, sources: torch.Tensor, num_sources: int) -> torch.Tensor:
    """Sum losses (S,) by source, and count them: (2, num_sources) float64. The order of summation is fixed."""
    is_from = sources == torch.arange(num_sources, device=sources.device)[:, None]  # (num_sources, S)
    return torch.stack([torch.where(is_from, row_losses, 0.0).sum(1), is_from.sum(1).double()])
