"""Which samples an optimizer step takes: the same ones on any number of ranks."""

import math
from collections.abc import Iterator

import torch


def steps_per_epoch(num_samples: int, batch_size: int) -> int:
    """Optimizer steps of one pass; the last one may be smaller."""
    return math.ceil(num_samples / batch_size)


def step_samples(num_samples: int, batch_size: int, seed: int, start_step: int = 0) -> Iterator[list[int]]:
    """Indices of the samples of each optimizer step, from start_step on, without end.

    Every epoch is a new permutation, drawn from the seed and the epoch alone: no state needs saving.
    """
    per_epoch = steps_per_epoch(num_samples, batch_size)
    epoch, step = divmod(start_step, per_epoch)
    while True:
        order = epoch_order(num_samples, seed, epoch)
        for first in range(step * batch_size, num_samples, batch_size):
            yield order[first : first + batch_size]
        epoch, step = epoch + 1, 0


def epoch_order(num_samples: int, seed: int, epoch: int) -> list[int]:
    """The samples' order in one epoch."""
    generator = torch.Generator().manual_seed(seed + epoch)
    return torch.randperm(num_samples, generator=generator).tolist()
