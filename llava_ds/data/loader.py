"""From the plan of an optimizer step to this rank's micro-batches, decoded ahead by worker processes."""

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from llava_ds.batch import Batch
from llava_ds.constants import DataError
from llava_ds.data.collator import collate
from llava_ds.data.dataset import EncodedDataset
from llava_ds.data.packing import plan_by_count, plan_by_tokens
from llava_ds.data.sampler import step_samples


@dataclass(frozen=True)
class Layout:
    """How the samples of a step are laid out on ranks and micro-batches."""

    rank: int
    world_size: int
    micro_batch_size: int
    num_micro_batches: int
    tokens_per_micro_batch: int | None

    @property
    def batch_size(self) -> int:
        """Samples of an optimizer step over all ranks."""
        return self.world_size * self.micro_batch_size * self.num_micro_batches

    def plan(self, samples: list[int], lengths: list[int]) -> list[list[list[int]]]:
        """[rank][micro-batch] -> samples; lengths are those of the whole data set."""
        if self.tokens_per_micro_batch is None:
            return plan_by_count(samples, self.world_size, self.num_micro_batches, self.micro_batch_size)
        return plan_by_tokens(samples, [lengths[i] for i in samples], self.world_size, self.tokens_per_micro_batch)


@dataclass(frozen=True)
class Window:
    """This rank's micro-batches of one optimizer step, and the step's counts over all ranks.

    num_targets: supervised tokens of each of this rank's micro-batches; data_wait_s: time spent waiting for them.
    """

    batches: list[Batch]
    num_targets: list[int]
    num_targets_all_ranks: int
    num_samples_all_ranks: int
    num_tokens_all_ranks: int
    data_wait_s: float


def windows(
    dataset: EncodedDataset,
    layout: Layout,
    *,
    seed: int,
    start_step: int,
    num_steps: int,
    num_workers: int,
    device: torch.device,
) -> Iterator[Window]:
    """This rank's window of every optimizer step from start_step to num_steps, on the device.

    Any step can be started from at once, for its samples follow from the seed and its number.
    """
    plans = _PlannedSteps(dataset, layout, seed, start_step, num_steps)
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_sampler=_MicroBatches(plans),
        num_workers=num_workers,
        collate_fn=partial(
            collate, image_size=dataset.pictures.size, num_image_tokens=dataset.pictures.num_image_tokens
        ),
        generator=torch.Generator(),  # the loader draws a seed, by default from the global one
        pin_memory=device.type == "cuda",
    )
    batches = iter(loader)
    for samples, plan in plans:
        started = time.perf_counter()
        mine = [_next(batches).to(device) for _ in plan[layout.rank]]
        waited = time.perf_counter() - started
        yield Window(
            batches=mine,
            num_targets=[sum(dataset.num_targets[i] for i in micro) for micro in plan[layout.rank]],
            num_targets_all_ranks=sum(dataset.num_targets[i] for i in samples),
            num_samples_all_ranks=len(samples),
            num_tokens_all_ranks=sum(dataset.lengths[i] for i in samples),
            data_wait_s=waited,
        )


def _next(batches: Iterator[Batch]) -> Batch:
    try:
        return next(batches)
    except DataError as error:
        # torch wraps what a worker raised into the same type, with the worker's traceback as its text.
        raise DataError(str(error).rsplit("DataError: ", 1)[-1].strip()) from error


@dataclass(frozen=True)
class _PlannedSteps:
    """The samples and the plan of every step, made anew each time it is iterated: the loader runs ahead of the loop."""

    dataset: EncodedDataset
    layout: Layout
    seed: int
    start_step: int
    num_steps: int

    def __iter__(self) -> Iterator[tuple[list[int], list[list[list[int]]]]]:
        steps = step_samples(len(self.dataset), self.layout.batch_size, self.seed, self.start_step)
        for samples in itertools.islice(steps, self.num_steps - self.start_step):
            yield samples, self.layout.plan(samples, self.dataset.lengths)


@dataclass(frozen=True)
class _MicroBatches:
    """This rank's micro-batches of all steps in a row, as lists of indices: a batch sampler for torch's DataLoader."""

    plans: _PlannedSteps

    def __iter__(self) -> Iterator[list[int]]:
        for _, plan in self.plans:
            yield from plan[self.plans.layout.rank]
