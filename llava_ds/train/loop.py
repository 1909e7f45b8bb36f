"""The training loop."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from llava_ds.data.dataset import BrokenSample
from llava_ds.data.loader import Window
from llava_ds.distributed import Ranks, all_sum
from llava_ds.train.loss import loss_scales


@dataclass
class TrainState:
    """How far the run is. All else that a resume needs follows from it or lies in the engine."""

    step: int = 0


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step was. loss and counts are on the device: reading them waits for the step.

    counts: samples, tokens, supervised tokens and micro-batches of all ranks (see Window.counts), without broken
    samples; num_planned: samples with them; broken: those of this rank; means: (ranks, micro-batches), each one's mean
    loss, where those are what is averaged. No batch is kept alive by it.
    """

    step: int
    loss: torch.Tensor
    counts: torch.Tensor
    grad_norm: object  # as the engine gives it: a number, a tensor, or None at stage 0
    lr: list[float]
    num_planned: int
    broken: list[BrokenSample]
    data_wait_s: float
    step_time_s: float
    means: torch.Tensor | None = None


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
        # A picture may break after it was checked: what counts is what the ranks really have, not what was planned.
        counts = all_sum(torch.tensor(window.counts, dtype=torch.float64, device=ranks.device))
        scales = loss_scales(window, loss_reduction, counts, ranks.world_size)
        loss = torch.zeros((), device=ranks.device)
        means = torch.zeros(ranks.world_size, len(scales), device=ranks.device)
        for i, (batch, scale) in enumerate(zip(window.batches, scales)):
            loss_sum = engine(batch)  # over this micro-batch's supervised tokens
            engine.set_gradient_accumulation_boundary(i == len(scales) - 1)
            engine.backward(loss_sum * scale, scale_wrt_gas=False)
            engine.step()
            loss += loss_sum.detach() * (scale / ranks.world_size)
            means[ranks.rank, i] = loss_sum.detach() / max(1, window.micro_batches[i].num_targets)
        state.step += 1
        finished = time.perf_counter()
        grad_norm = engine.get_global_grad_norm()
        result = StepResult(
            step=state.step,
            loss=all_sum(loss),
            counts=counts,
            grad_norm=grad_norm,
            lr=lr,
            num_planned=window.num_planned,
            broken=window.broken,
            data_wait_s=window.data_wait_s,
            step_time_s=finished - started,
            means=all_sum(means) if loss_reduction == "micro_batch" else None,
        )
        started = finished + after_step(result)
