"""The progress of a run, and the results of one step."""

from dataclasses import dataclass, field

import torch

from llava_ds.data.dataset import BrokenSample


@dataclass
class TrainState:
    """The progress of a run."""

    step: int = 0
    stops: bool = False  # a stop was requested: the run ends after this step
    is_over: bool = False  # the run ends after this step, before the planned number of steps


@dataclass(frozen=True)
class StepResult:
    """The results of one optimizer step. Tensors are on the device: reading one waits for the step.

    loss: this rank's part of the step's loss (their sum over ranks); counts: Window.counts summed over ranks,
    (6,); skipped_steps: number so far; num_planned: samples of all ranks, including broken ones; broken: this rank's
    broken samples; by_source (2, sources): this rank's summed loss and number of supervised tokens per data source;
    metrics: this rank's sums of the objective's metrics, by name; means (micro-batches,): this rank's mean losses, with
    --loss_reduction micro_batch only. Losses, metrics and counts are float64. Keeps no reference to a batch.
    """

    step: int
    loss: torch.Tensor
    by_source: torch.Tensor
    counts: torch.Tensor
    grad_norm: object  # a number, a tensor, or None if the engine computes no norm
    skipped_steps: object  # a number or a tensor
    lr: list[float]
    num_planned: int
    broken: list[BrokenSample]
    data_wait_s: float
    step_time_s: float
    means: torch.Tensor | None = None
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    own_loss: float | None = None  # this rank's part of the loss, once read from the device
