# n positions, D language-model width
"""The value head: one number per position, from the language model's last hidden state."""

from dataclasses import dataclass

import torch
from torch import nn

from llava_ds.batch import Batch


class ValueHead(nn.Module):
    """A linear layer without bias that computes one number: the score of an answer, or the value of a state.

    Its weights start at zero. It is a module so that ZeRO-3 gathers it when it is called.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden states (n, D) to numbers (n,), computed in float32."""
        return (hidden.float() * self.weight.float()).sum(1)


@dataclass(frozen=True)
class Values:
    """Computes the value head's numbers, (n,) float32. at (n,): ascending positions; None: the supervised positions."""

    at: torch.Tensor | None = None
    shortens = True

    def positions(self, batch: Batch) -> torch.Tensor:
        """Return the positions, (n,)."""
        return batch.target_positions if self.at is None else self.at

    def __call__(self, model: nn.Module, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the numbers, (n,)."""
        return model.value_head(batch.by_target(hidden) if self.at is None else hidden)


def last_targets(batch: Batch) -> torch.Tensor:
    """Return the index of each sample's last position among the S supervised positions, (samples,). Every sample must
    have a supervised position, except in an empty micro-batch."""
    return answer_lengths(batch).cumsum(0) - 1


def answer_ends(batch: Batch) -> torch.Tensor:
    """Return the index into T of each answer's last token, at which its score is computed: (samples,), or (0,)."""
    return batch.target_tokens[last_targets(batch)] if len(batch.targets) else batch.target_positions


def answer_lengths(batch: Batch) -> torch.Tensor:
    """Count the supervised positions of each sample, (samples,)."""
    samples = torch.arange(len(batch.cu_seqlens) - 1, device=batch.targets.device)
    return (batch.target_samples == samples[:, None]).sum(1)
