"""How micro-batches go through the model: one after the other on this rank, or as an axis of the mesh has it."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import deepspeed
import torch

from llava_ds.batch import Batch

Forward = Callable[[Any, Batch], Any]  # of a model, or of the engine over it, and a micro-batch


class Runner(Protocol):
    """Runs micro-batches through the engine's model. All ranks call every method together."""

    engine: deepspeed.DeepSpeedEngine

    def train(
        self, batches: Sequence[Batch], forward: Forward, loss_of: Callable[[int, Any], tuple[torch.Tensor, Any]]
    ) -> list[Any]:
        """Run forward, backward and step of every micro-batch of one optimizer step.

        loss_of: from a micro-batch's number and what forward returned, the scalar to run backward on, and what to
        return of it, without its graph, which would keep the micro-batch's activations. Returns all of these; nothing
        on ranks that don't see the results.
        """
        ...

    def warm_up(self, batch: Batch, forward: Forward, accumulates: bool) -> None:
        """Run forward and backward of a micro-batch with weight zero, without a step.

        forward: returns a scalar; accumulates: a step has several micro-batches.
        """
        ...

    def forward(self, model: Any, batch: Batch, forward: Forward) -> Any | None:
        """Run a micro-batch without backward. Returns what forward returned; None on ranks that don't see it.

        model: the engine, or the LlavaModel in it.
        """
        ...

    def agree(self, value: torch.Tensor) -> torch.Tensor:
        """Return the tensor of a rank that sees results on all ranks; others give one of its shape to overwrite."""
        ...


class Direct:
    """The runner of a rank that has the whole model, but for what ZeRO shards."""

    def __init__(self, engine: deepspeed.DeepSpeedEngine) -> None:
        self.engine = engine

    def train(
        self, batches: Sequence[Batch], forward: Forward, loss_of: Callable[[int, Any], tuple[torch.Tensor, Any]]
    ) -> list[Any]:
        """As Runner.train."""
        kept = []
        for i, batch in enumerate(batches):
            loss, rest = loss_of(i, forward(self.engine, batch))
            self.engine.set_gradient_accumulation_boundary(i == len(batches) - 1)
            self.engine.backward(loss, scale_wrt_gas=False)
            self.engine.step()
            kept.append(rest)
        return kept

    def warm_up(self, batch: Batch, forward: Forward, accumulates: bool) -> None:
        """As Runner.warm_up."""
        for is_last in (False, True) if accumulates else (True,):
            backward_with_weight_zero(self.engine, forward(self.engine, batch), is_last)

    def forward(self, model: Any, batch: Batch, forward: Forward) -> Any:
        """As Runner.forward."""
        return forward(model, batch)

    def agree(self, value: torch.Tensor) -> torch.Tensor:
        """As Runner.agree: every rank has its own."""
        return value


def backward_with_weight_zero(engine, loss_sum: torch.Tensor, is_last: bool) -> None:
    """Run backward of a loss times zero. is_last: of a step's micro-batches."""
    engine.set_gradient_accumulation_boundary(is_last)
    engine.backward(loss_sum * 0, scale_wrt_gas=False)
