"""The training loop."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from llava_ds.data.dataset import BrokenSample
from llava_ds.data.loader import Window
from llava_ds.engine.non_finite import skipped_steps
from llava_ds.runtime.ranks import Ranks, all_sum
from llava_ds.train.loss import loss_scales


@dataclass
class TrainState:
    """How far the run is. All else that a resume needs follows from it or lies in the engine."""

    step: int = 0
    stops: bool = False  # the run was asked to, and ends at this boundary


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step was. Tensors are on the device: reading one waits for the step.

    loss: this rank's part, which those of all ranks add up to; counts: Window.counts of all ranks, (6,);
    skipped_steps: so far; num_planned: samples with the broken ones, of all ranks; broken: those of this rank;
    by_source: (2, sources), the summed loss and the supervised tokens that this rank had of each data source;
    means: (micro-batches,), this rank's mean losses, where those are what is averaged. Losses and counts are float64.
    No batch is kept alive by it.
    """

    step: int
    loss: torch.Tensor
    by_source: torch.Tensor
    counts: torch.Tensor
    grad_norm: object  # as the engine gives it: a number, a tensor, or None
    skipped_steps: object  # a number or a tensor
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
    num_sources: int,
    ranks: Ranks,
    after_step: Callable[[StepResult], float],
) -> None:
    """Run optimizer steps until max_steps, or until state.stops is set, without ever waiting for the device.

    after_step sees every one of them on every rank: it logs and saves, and returns the seconds that are not the
    step's. A step's time runs from the end of the one before, so that work still queued on the device is counted once.
    """
    engine.train()
    started = time.perf_counter()
    while state.step < max_steps and not state.stops:
        window = next(windows)  # this rank's micro-batches of one optimizer step
        lr = [group["lr"] for group in engine.optimizer.param_groups]
        # A picture may break after it was checked: what counts is what the ranks really have, not what was planned.
        counts = all_sum(_on_device(window.counts, ranks.device))
        scales = loss_scales(window, loss_reduction, counts, ranks.world_size)
        by_source = []  # of each micro-batch
        for i, (batch, scale) in enumerate(zip(window.batches, scales)):
            loss_sum, of_sources = engine(batch, num_sources=num_sources)  # over this micro-batch's supervised tokens
            engine.set_gradient_accumulation_boundary(i == len(scales) - 1)
            engine.backward(loss_sum * scale.float(), scale_wrt_gas=False)
            engine.step()
            by_source.append(of_sources)
        state.step += 1
        finished = time.perf_counter()
        sums = torch.stack(by_source)  # (micro-batches, 2, sources)
        losses = sums[:, 0].sum(1)  # each what backward began with, but added up in float64
        result = StepResult(
            step=state.step,
            loss=losses.dot(torch.stack(scales)) / ranks.world_size,
            by_source=sums.sum(0),
            counts=counts,
            grad_norm=engine.get_global_grad_norm(),
            skipped_steps=skipped_steps(engine),
            lr=lr,
            num_planned=window.num_planned,
            broken=window.broken,
            data_wait_s=window.data_wait_s,
            step_time_s=finished - started,
            means=_means(losses, window) if loss_reduction == "micro_batch" else None,
        )
        started = finished + after_step(result)


def _on_device(numbers: tuple, device: torch.device) -> torch.Tensor:
    """(n,) float64. From pageable memory a copy would wait for all that is queued on the device."""
    values = torch.tensor(numbers, dtype=torch.float64)
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


def _means(losses: torch.Tensor, window: Window) -> torch.Tensor:
    """(micro-batches,) from the summed losses."""
    return torch.stack([total / max(1, micro.num_targets) for total, micro in zip(losses, window.micro_batches)])
