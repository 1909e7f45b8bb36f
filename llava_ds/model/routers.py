# T tokens that a router sees, E experts, K of them for each token
"""Routers of a mixture of experts: the loss that keeps the load of experts even, and that load."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn


class Balance(NamedTuple):
    """How evenly the experts are used, scalars on the device; all but aux_loss without a gradient.

    aux_loss: transformers' load-balancing loss over all layers together; max_over_mean: tokens of the busiest expert
    by the mean over experts, and entropy: of the shares of tokens, as a part of the largest one; both are means over
    layers.
    """

    aux_loss: torch.Tensor
    max_over_mean: torch.Tensor
    entropy: torch.Tensor


class Routers:
    """The routers of a language model, whose choices can be recorded."""

    def __init__(self, language_model: nn.Module) -> None:
        kind = language_model._can_record_outputs["router_logits"].target_class  # returns logits, weights, choices
        self._seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._records = False
        for module in language_model.modules():
            if isinstance(module, kind):
                module.register_forward_hook(self._record)

    @contextmanager
    def recording(self) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
        """Record logits (T, E) and chosen experts (T, K) of every router that runs inside.

        Layers that are recomputed in backward run their routers again, outside.
        """
        self._seen, self._records = [], True
        try:
            yield self._seen
        finally:
            self._seen, self._records = [], False

    def _record(self, _module: nn.Module, _inputs: tuple, output: tuple[torch.Tensor, ...]) -> None:
        if self._records:
            self._seen.append((output[0], output[2]))


def balance_of(seen: list[tuple[torch.Tensor, torch.Tensor]]) -> Balance:
    """The balance of what was recorded. Source of aux_loss: transformers' load_balancing_loss_func."""
    rows = sum(len(logits) for logits, _ in seen)
    num_experts = seen[0][0].shape[1]
    numbers = torch.arange(num_experts, device=seen[0][0].device)
    probs = sum(logits.float().softmax(-1).sum(0) for logits, _ in seen)  # (E,)
    loads = torch.stack([(chosen.flatten()[:, None] == numbers).sum(0) for _, chosen in seen]).float()  # (layers, E)
    shares = loads / loads.sum(1, keepdim=True)
    return Balance(
        aux_loss=num_experts * (loads.sum(0) / rows).dot(probs / rows),
        max_over_mean=(shares.amax(1) * num_experts).mean(),
        entropy=torch.special.entr(shares).sum(1).mean() / math.log(max(2, num_experts)),
    )
