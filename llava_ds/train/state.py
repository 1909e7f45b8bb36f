"""A run's progress, and the numbers of one step."""

from dataclasses import dataclass, field

import torch

from llava_ds.data.dataset import BrokenSample


@dataclass
class TrainState:
    """A run's progress. A resume needs only this and the engine's state."""

    step: int = 0
    stops: bool = False  # a stop was requested: the run ends after this step
    is_over: bool = False  # the run ends after this step, before the planned number of steps


@dataclass(frozen=True)
class StepResult:
    """The numbers of one optimizer step. Tensors are on the device: reading one waits for the step.

    loss: this rank's part; the parts of all ranks add up to the step's loss; counts: Window.counts summed over ranks,
    (6,); skipped_steps: so far; num_planned: samples of all ranks, broken ones included; broken: this rank's broken
    samples; by_source: (2, sources), this rank's summed loss and supervised tokens per data source; metrics: this
    rank's sums of the objective's other numbers, by name; means: (micro-batches,), this rank's mean losses with
    --loss_reduction micro_batch. Losses, metrics and counts are float64. Holds no reference to a batch.
    """

    step: int
    loss: torch.Tensor
    by_source: torch.Tensor
    counts: torch.Tensor
    grad_norm: object  # the engine's: a number, a tensor, or None
    skipped_steps: object  # a number or a tensor
    lr: list[float]
    num_planned: int
    broken: list[BrokenSample]
    data_wait_s: float
    step_time_s: float
    means: torch.Tensor | None = None
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    own_loss: float | None = None  # this rank's part of the loss, once read from the device
