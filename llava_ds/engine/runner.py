"""Run micro-batches through the model: one by one on this rank, or in the schedule that a mesh axis requires."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import deepspeed
import torch

from llava_ds.batch import Batch

Forward = Callable[[Any, Batch], Any]  # (model or its engine, micro-batch) -> result


class Runner(Protocol):
    """Runs micro-batches through the engine's model. Every method is collective.

    every_rank_sees: False if some ranks get no results.
    """

    engine: deepspeed.DeepSpeedEngine
    every_rank_sees: bool

    def train(
        self, batches: Sequence[Batch], forward: Forward, loss_of: Callable[[int, Any], tuple[torch.Tensor, Any]]
    ) -> list[Any]:
        """Run forward, backward and engine step for every micro-batch of one optimizer step.

        loss_of: maps a micro-batch's index and forward's result to (scalar for backward, detached result). The result
        must be detached, because a graph would keep the activations in memory. Returns the detached results; [] on
        ranks that see no results.
        """
        ...

    def warm_up(self, batch: Batch, forward: Forward, accumulates: bool) -> None:
        """Run forward and backward of a micro-batch with weight zero, without a step.

        forward: must return a scalar; accumulates: True if a step has several micro-batches.
        """
        ...

    def forward(self, model: Any, batch: Batch, forward: Forward) -> Any | None:
        """Run a micro-batch without backward. Returns forward's result; None on ranks that don't see it.

        model: the engine, or its LlavaModel.
        """
        ...

    def agree(self, value: torch.Tensor) -> torch.Tensor:
        """Broadcast a tensor from a rank that sees results. Other ranks pass a tensor of that shape to overwrite."""
        ...


class Direct:
    """Runner of a rank that computes the whole model (ZeRO may shard it). engine: an engine or a plain model."""

    every_rank_sees = True

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def train(
        self, batches: Sequence[Batch], forward: Forward, loss_of: Callable[[int, Any], tuple[torch.Tensor, Any]]
    ) -> list[Any]:
        """See Runner.train."""
        kept = []
        for i, batch in enumerate(batches):
            loss, rest = loss_of(i, forward(self.engine, batch))
            self.engine.set_gradient_accumulation_boundary(i == len(batches) - 1)
            self.engine.backward(loss, scale_wrt_gas=False)
            self.engine.step()
            kept.append(rest)
        return kept

    def warm_up(self, batch: Batch, forward: Forward, accumulates: bool) -> None:
        """See Runner.warm_up."""
        for is_last in (False, True) if accumulates else (True,):
            backward_with_weight_zero(self.engine, forward(self.engine, batch), is_last)

    def forward(self, model: Any, batch: Batch, forward: Forward) -> Any:
        """See Runner.forward."""
        return forward(model, batch)

    def agree(self, value: torch.Tensor) -> torch.Tensor:
        """See Runner.agree. Every rank sees results, so it returns the tensor."""
        return value


def backward_with_weight_zero(engine, loss_sum: torch.Tensor, is_last: bool) -> None:
    """Run backward on zero times the loss. is_last: True for the step's last micro-batch."""
    engine.set_gradient_accumulation_boundary(is_last)
    engine.backward(loss_sum * 0, scale_wrt_gas=False)
