"""From the plan of an optimizer step to this rank's micro-batches, decoded ahead by worker processes."""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from llava_ds.batch import Batch
from llava_ds.config.arguments import Arguments, TrainingArguments, steps_go_across_epochs
from llava_ds.config.data_flags import GROUPINGS
from llava_ds.data.collate import LoadedSample, collate
from llava_ds.data.dataset import BrokenSample, EncodedDataset
from llava_ds.data.packing import plan_by_count, plan_by_tokens, plans_across_epochs
from llava_ds.data.sample_order import SampleOrder
from llava_ds.geometry import ImageOptions
from llava_ds.runtime.processes import obey_only_parent
from llava_ds.runtime.ranks import Ranks


@dataclass(frozen=True)
class Layout:
    """How the samples of a step are laid out on ranks and micro-batches.

    tokens_per_micro_batch: packs of at most this many, evened out by cost; None: micro-batches by count.
    across_epochs: steps of whole micro-batches, on into the next epoch, as LLaVA's trainer has them.
    pair_cost: a sample of L tokens costs L + pair_cost * L**2, the second part for attention.
    """

    rank: int
    world_size: int
    micro_batch_size: int
    num_micro_batches: int
    tokens_per_micro_batch: int | None
    across_epochs: bool = False
    pair_cost: float = 0.0

    @classmethod
    def of(cls, training: TrainingArguments, ranks: Ranks, tokens: int | None, pair_cost: float) -> "Layout":
        """As the flags say. tokens: what --tokens_per_micro_batch came to."""
        return cls(
            ranks.rank,
            ranks.world_size,
            training.per_device_train_batch_size,
            training.gradient_accumulation_steps,
            tokens,
            steps_go_across_epochs(training),
            pair_cost,
        )

    @property
    def batch_size(self) -> int:
        """Samples of an optimizer step over all ranks."""
        return self.world_size * self.micro_batch_size * self.num_micro_batches

    def steps_per_epoch(self, order: SampleOrder) -> int:
        """Optimizer steps that count as one pass over the data."""
        if not self.across_epochs:
            return order.steps_per_epoch
        micro_batches = math.ceil(order.num_samples / (self.world_size * self.micro_batch_size))
        return max(1, micro_batches // self.num_micro_batches)

    def steps(
        self, order: SampleOrder, lengths: list[int], start_step: int
    ) -> Iterator[tuple[list[int], list[list[list[int]]]]]:
        """The samples of every step from start_step on, and their plan ([rank][micro-batch] -> samples), without end.

        lengths: those of the whole data set.
        """
        if not self.across_epochs:
            planned = self._planner(lengths)
            yield from ((samples, planned(samples)) for samples in order.steps(start_step))
            return
        # Steps are cut from one stream of micro-batches, so that any of them can be started from at once; but for
        # epochs that are shorter than a step.
        per_epoch = math.ceil(order.num_samples / (self.world_size * self.micro_batch_size))
        first, begun, passed = 0, 0, start_step
        if per_epoch > self.num_micro_batches:
            first, begun = divmod(start_step * self.num_micro_batches, per_epoch)
            passed = 0
        epochs = map(order.epoch, itertools.count(first))
        plans = plans_across_epochs(epochs, self.world_size, self.num_micro_batches, self.micro_batch_size, begun)
        for plan in itertools.islice(plans, passed, None):
            in_turn = itertools.chain.from_iterable(zip(*plan))  # the first micro-batch of every rank, and so on
            yield [sample for micro_batch in in_turn for sample in micro_batch], plan

    def plan_all(self, lengths: list[int]) -> list[list[list[int]]]:
        """The plan of a step that takes a whole data set: as many micro-batches on every rank. lengths: its own."""
        samples = list(range(len(lengths)))
        if self.tokens_per_micro_batch is not None:
            return self._planner(lengths)(samples)
        rounds = math.ceil(len(samples) / (self.world_size * self.micro_batch_size))
        return plan_by_count(samples, self.world_size, rounds, self.micro_batch_size)

    def heaviest(self, order: SampleOrder, lengths: list[int], start_step: int, num_steps: int) -> list[int]:
        """The samples of the micro-batch with most tokens, over all ranks and the steps from start_step to num_steps.

        The first one of several; none if no step is left.
        """
        plans = itertools.islice(self.steps(order, lengths, start_step), num_steps - start_step)
        micro_batches = (micro for _, plan in plans for rank in plan for micro in rank)
        return max(micro_batches, key=lambda micro: sum([lengths[i] for i in micro]), default=[])

    def _planner(self, lengths: list[int]) -> Callable[[list[int]], list[list[list[int]]]]:
        """From the samples of a step to its plan."""
        world_size, bound = self.world_size, self.tokens_per_micro_batch
        if bound is None:
            return lambda samples: plan_by_count(samples, world_size, self.num_micro_batches, self.micro_batch_size)
        tokens = np.array(lengths)
        costs = tokens + (self.pair_cost * tokens**2).astype(np.int64)
        return lambda samples: plan_by_tokens(
            [(sample,) for sample in samples], tokens[samples], world_size, bound, costs[samples]
        )


def sample_order(args: Arguments, dataset: EncodedDataset, world_size: int) -> SampleOrder:
    """The order that the flags ask for."""
    data, training = args.data, args.training
    how = next((GROUPINGS[name] for name in GROUPINGS if getattr(data, name)), "random" if data.shuffle else "file")
    return SampleOrder(
        num_samples=len(dataset),
        batch_size=world_size * training.per_device_train_batch_size * training.gradient_accumulation_steps,
        seed=training.seed if training.data_seed is None else training.data_seed,
        how=how,
        lengths=dataset.lengths_for(how),
        micro_batch_size=training.per_device_train_batch_size,
        accumulation=training.gradient_accumulation_steps,
    )


class Counts(NamedTuple):
    """What a rank, or all of them, compute in an optimizer step. Broken samples, and the blank picture of a batch that
    has none, don't count.

    targets: supervised tokens; micro_batches: those that have any; pairs: of tokens of which one sees the other, the
    sum of L (L + 1) / 2 over samples of L tokens; tiles: squares that the vision tower sees.
    """

    samples: int
    tokens: int
    targets: int
    micro_batches: int
    pairs: int
    tiles: int


@dataclass(frozen=True)
class MicroBatch:
    """A batch, and what it holds, as Counts has it; broken samples are not in it."""

    batch: Batch
    num_samples: int
    num_tokens: int
    num_targets: int
    num_pairs: int
    num_tiles: int
    broken: tuple[BrokenSample, ...]

    def pin_memory(self) -> "MicroBatch":
        """The same in page-locked memory (torch's DataLoader calls this)."""
        return dataclasses.replace(self, batch=self.batch.pin_memory())


@dataclass(frozen=True)
class Window:
    """This rank's micro-batches of one optimizer step, on the device.

    num_planned: samples of the step over all ranks, broken ones included; data_wait_s: time spent waiting for them.
    """

    micro_batches: list[MicroBatch]
    num_planned: int
    data_wait_s: float

    @property
    def batches(self) -> list[Batch]:
        """The tensors alone."""
        return [micro.batch for micro in self.micro_batches]

    @property
    def counts(self) -> Counts:
        """What this rank really has."""
        rows = (
            (m.num_samples, m.num_tokens, m.num_targets, int(m.num_targets > 0), m.num_pairs, m.num_tiles)
            for m in self.micro_batches
        )
        return Counts(*map(sum, zip(*rows)))

    @property
    def broken(self) -> list[BrokenSample]:
        """The samples of this rank that could not be shown."""
        return [broken for micro in self.micro_batches for broken in micro.broken]


def windows(
    dataset: EncodedDataset,
    layout: Layout,
    order: SampleOrder,
    *,
    start_step: int,
    num_steps: int,
    num_workers: int,
    device: torch.device,
) -> Iterator[Window]:
    """This rank's window of every optimizer step from start_step to num_steps, on the device.

    Any step can be started from at once, for its samples follow from the order and its number.
    """
    planned = itertools.islice(layout.steps(order, dataset.lengths, start_step), num_steps - start_step)
    plans, ahead = itertools.tee(planned)  # planned once, though the loader runs ahead of the loop
    mine = micro_batches(
        dataset, (micro_batch for _, plan in ahead for micro_batch in plan[layout.rank]), num_workers, device
    )
    for samples, plan in plans:
        started = time.perf_counter()
        yield Window([next(mine) for _ in plan[layout.rank]], len(samples), data_wait_s=time.perf_counter() - started)


def micro_batches(
    dataset: EncodedDataset, batches: Iterable[list[int]], num_workers: int, device: torch.device
) -> Iterator[MicroBatch]:
    """Micro-batches of these samples on the device, decoded ahead of their turn."""
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=num_workers,
        collate_fn=partial(_micro_batch, options=dataset.image_options),
        worker_init_fn=obey_only_parent,
        generator=torch.Generator(),  # the loader draws a seed, by default from the global one
        pin_memory=device.type == "cuda",
    )
    for micro in loader:
        yield dataclasses.replace(micro, batch=micro.batch.to(device))


def _micro_batch(samples: list[LoadedSample | BrokenSample], options: ImageOptions) -> MicroBatch:
    shown = [sample for sample in samples if isinstance(sample, LoadedSample)]
    batch = collate(shown, options)
    lengths = [len(sample.input_ids) for sample in shown]
    return MicroBatch(
        batch=batch,
        num_samples=len(shown),
        num_tokens=sum(lengths),
        num_targets=len(batch.targets),
        num_pairs=sum(length * (length + 1) // 2 for length in lengths),
        num_tiles=sum(len(tiles) for sample in shown for tiles, _ in sample.media),
        broken=tuple(sample for sample in samples if isinstance(sample, BrokenSample)),
    )
