"""The training loop."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from llava_ds.data.loader import Window
from llava_ds.distributed import Ranks, all_sum
from llava_ds.train.loss import loss_scales


@dataclass
class TrainState:
    """How far the run is. All else that a resume needs follows from it or lies in the engine."""

    step: int = 0


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step was. loss is a tensor on the device: reading it waits for the step."""

    step: int
    loss: torch.Tensor
    grad_norm: object  # as the engine gives it: a number, a tensor, or None at stage 0
    lr: list[float]
    window: Window
    step_time_s: float


def train(
    engine,
    windows: Iterator[Window],
    state: TrainState,
    max_steps: int,
    loss_reduction: str,
    ranks: Ranks,
    after_step: Callable[[StepResult], float],
) -> None:
    """Run optimizer steps until max_steps.

    after_step sees every one of them on every rank: it logs and saves, and returns the seconds that are not the
    step's. A step's time runs from the end of the one before, so that work still queued on the device is counted once.
    """
    engine.train()
    started = time.perf_counter()
    while state.step < max_steps:
        window = next(windows)  # this rank's micro-batches of one optimizer step
        lr = [group["lr"] for group in engine.optimizer.param_groups]
        loss = torch.zeros((), device=ranks.device)
        for i, (batch, scale) in enumerate(zip(window.batches, loss_scales(window, loss_reduction, ranks.world_size))):
            loss_sum = engine(batch)  # over this micro-batch's supervised tokens
            engine.set_gradient_accumulation_boundary(i == len(window.batches) - 1)
            engine.backward(loss_sum * scale, scale_wrt_gas=False)
            engine.step()
            loss += loss_sum.detach() * (scale / ranks.world_size)
        state.step += 1
        finished = time.perf_counter()
        grad_norm = engine.get_global_grad_norm()
        result = StepResult(state.step, all_sum(loss), grad_norm, lr, window, finished - started)
        started = finished + after_step(result)
