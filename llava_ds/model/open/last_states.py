# B samples of a micro-batch, D width of the language model, n positions
"""Objectives on the hidden state of each sample's last token before its answer. The answer itself is not learned."""

from dataclasses import dataclass

import torch
from torch import nn

from llava_ds.batch import Batch
from llava_ds.extensions.base import SessionPart
from llava_ds.model.heads import sum_by_source
from llava_ds.model.llava import LlavaModel
from llava_ds.model.open.value_head import answer_lengths


@dataclass(frozen=True)
class LastStates:
    """Returns the hidden states (B, D) of each sample's last token before its answer. module: name of a module of the
    model to apply to them, or None."""

    module: str | None = None
    shortens = True

    def positions(self, batch: Batch) -> torch.Tensor:
        """Return the positions, (B,); (0,) in a micro-batch without samples."""
        if not len(batch.targets):
            return batch.target_positions
        counts = answer_lengths(batch)
        return batch.target_positions[counts.cumsum(0) - counts]

    def __call__(self, model: nn.Module, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the hidden states, or the module's output for them."""
        return hidden if self.module is None else getattr(model, self.module)(hidden)


@dataclass(frozen=True)
class SampleObjective:
    """Base of objectives with a loss per sample. A step's loss is the mean over the samples of all ranks."""

    num_sources: int
    grad_ranks: int
    logs_means = False
    probe = LastStates()

    def by_source(self, losses: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
        """Sum losses (units,) by data source, and count them: (2, num_sources) float64."""
        return sum_by_source(losses.detach(), sources, self.num_sources)

    def scales(self, window, counts: torch.Tensor) -> list[torch.Tensor]:
        """Return the factor of each micro-batch: grad_ranks / units of the step (see Objective)."""
        return [self.grad_ranks / self.num_units(counts.clamp(min=1))] * len(window.micro_batches)

    def num_units(self, counts):
        """Return the number of samples. counts: Counts, or a tensor in its order."""
        return counts[0]


class FrozenOutputLayer(SessionPart):
    """Freezes the output layer, because these losses don't use it, unless it shares its weight with the embeddings."""

    def built(self, model: LlavaModel) -> None:
        inputs, outputs = model.language_model.get_input_embeddings(), model.language_model.get_output_embeddings()
        if outputs.weight is not inputs.weight:
            outputs.requires_grad_(False)
