"""The progress of a run, and the numbers of one of its steps."""

from dataclasses import dataclass, field

import torch

from llava_ds.data.dataset import BrokenSample


@dataclass
class TrainState:
    """The progress of a run. All else that a resume needs follows from it or lies in the engine."""

    step: int = 0
    stops: bool = False  # the run was asked to stop, and ends at this boundary
    is_over: bool = False  # no step comes after this one, though some were planned


@dataclass(frozen=True)
class StepResult:
    """The numbers of one optimizer step. Tensors are on the device: reading one waits for the step.

    loss: this rank's part, which those of all ranks add up to; counts: Window.counts of all ranks, (6,);
    skipped_steps: so far; num_planned: samples with the broken ones, of all ranks; broken: those of this rank;
    by_source: (2, sources), the summed loss and the supervised tokens that this rank had of each data source;
    metrics: this rank's sums of the objective's other numbers, by name; means: (micro-batches,), this rank's mean
    losses with --loss_reduction micro_batch. Losses, metrics and counts are float64. No batch is kept alive by it.
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
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    own_loss: float | None = None  # this rank's part of the loss, once it has been read from the device
