"""Plan of all optimizer steps: their samples, and the rank and micro-batch that computes each."""

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from llava_ds.config.arguments import Arguments, TrainingArguments, steps_go_across_epochs
from llava_ds.config.data_flags import GROUPINGS
from llava_ds.data.dataset import EncodedDataset
from llava_ds.data.sample_order import SampleOrder
from llava_ds.extensions.base import Axis


class StepLayout(NamedTuple):
    """One optimizer step: its samples in order, and the micro-batches ([rank][micro-batch] -> samples)."""

    samples: list[int]
    of_ranks: list[list[list[int]]]


def plan_by_count(samples: list[int], dp: int, num_micro_batches: int, micro_size: int) -> list[list[list[int]]]:
    """Assign micro-batches of micro_size samples to the ranks in turn, in the samples' order.

    Returns [rank][micro-batch] -> samples. A last, smaller step leaves some micro-batches short or empty.
    """
    plan = [[[] for _ in range(num_micro_batches)] for _ in range(dp)]
    # A short step is spread evenly, so that no rank idles while another does all the work.
    slots = dp * num_micro_batches
    base, extra = divmod(min(len(samples), slots * micro_size), slots)
    first = 0
    for slot in range(slots):
        micro, rank = divmod(slot, dp)
        size = base + (slot < extra)
        plan[rank][micro] = samples[first : first + size]
        first += size
    return plan


@dataclass(frozen=True)
class Packing:
    """Layout of a step's samples on ranks and micro-batches.

    dp: number of rank groups with separate samples; axes: axes that split samples among the ranks of a group.
    tokens_per_micro_batch: maximum tokens of a pack; packs are balanced by cost. None: micro-batches have
    micro_batch_size samples. across_epochs: True if a step may continue into the next epoch, as in LLaVA's trainer.
    pair_cost, other_costs: as in packing.sample_costs.
    """

    dp: int
    micro_batch_size: int
    num_micro_batches: int
    tokens_per_micro_batch: int | None
    across_epochs: bool = False
    pair_cost: float = 0.0
    other_costs: tuple[float, float, float] = (0.0, 0.0, 0.0)
    axes: tuple[Axis, ...] = ()

    @classmethod
    def of(cls, args: Arguments, dp: int, tokens: int | None, *costs: float | tuple) -> "Packing":
        """Build the packing from the flags. tokens: resolved --tokens_per_micro_batch, per rank; None without it.
        costs: pair_cost and other_costs."""
        training, axes = args.training, args.axes
        size, accumulation = training.per_device_train_batch_size, training.gradient_accumulation_steps
        bound = None if tokens is None else tokens * args.ranks_per_token
        return cls(dp, size, accumulation, bound, steps_go_across_epochs(training), *costs, axes=axes)

    @property
    def shared(self) -> int:
        """Number of ranks with the same samples."""
        return math.prod(axis.size for axis in self.axes)

    def dp_rank(self, rank: int) -> int:
        """Data-parallel index of a global rank (as in Mesh)."""
        return rank // math.prod(axis.size for axis in self.axes if axis.order > 0) % self.dp

    @property
    def batch_size(self) -> int:
        """Samples of an optimizer step over all ranks."""
        return self.dp * self.micro_batch_size * self.num_micro_batches

    def ends_epochs_within_steps(self, num_samples: int) -> bool:
        """True if an epoch has at most a step's micro-batches, and therefore ends it (see plans_across_epochs)."""
        return self.across_epochs and self.micro_batches_per_epoch(num_samples) <= self.num_micro_batches

    def micro_batches_per_epoch(self, num_samples: int) -> int:
        """Micro-batches of each rank in one pass over the data."""
        return math.ceil(num_samples / (self.dp * self.micro_batch_size))

    def steps(self, order: SampleOrder, dataset: EncodedDataset, done: int) -> Iterator[StepLayout]:
        """Lay out all steps after `done`, endlessly. Waits until a step's samples are encoded."""
        if not self.across_epochs:
            for samples in order.steps(done):
                dataset.wait_for(samples)
                yield StepLayout(samples, self.lay_out(samples, dataset))
            return
        from llava_ds.data.packing import plans_across_epochs

        # Steps are cut from one stream of micro-batches, so the first one after `done` can be computed. If epochs end
        # steps early, it can't: then earlier steps are planned and skipped.
        per_epoch = self.micro_batches_per_epoch(order.num_samples)
        first, begun, passed = 0, 0, done
        if not self.ends_epochs_within_steps(order.num_samples):
            first, begun = divmod(done * self.num_micro_batches, per_epoch)
            passed = 0
        epochs = map(order.epoch, itertools.count(first))
        plans = plans_across_epochs(epochs, self.dp, self.num_micro_batches, self.micro_batch_size, begun)
        for of_ranks in itertools.islice(plans, passed, None):
            in_turn = itertools.chain.from_iterable(zip(*of_ranks))  # ordered by micro-batch, then rank
            samples = [sample for micro_batch in in_turn for sample in micro_batch]
            dataset.wait_for(samples)
            yield StepLayout(samples, of_ranks)

    def lay_out(self, samples: list[int], dataset: EncodedDataset) -> list[list[list[int]]]:
        """Lay out the samples of one step: [rank][micro-batch] -> samples."""
        if self.tokens_per_micro_batch is None:
            return plan_by_count(samples, self.dp, self.num_micro_batches, self.micro_batch_size)
        tokens, *others = (np.asarray(each)[samples].astype(np.int64) for each in dataset.sizes)
        return dataset.packs(samples, tokens, self.dp, self.tokens_per_micro_batch, self.costs(tokens, *others))

    def costs(self, tokens: np.ndarray, *others: np.ndarray) -> np.ndarray:
        """Cost of each sample of a step in tokens, int64. others: the remaining EncodedDataset.sizes, if any."""
        from llava_ds.data.packing import sample_costs

        return sample_costs(tokens, others, self.pair_cost, self.other_costs)

    def lay_out_all(self, dataset: EncodedDataset) -> list[list[list[int]]]:
        """Lay out a whole data set as one step, with equally many micro-batches on every rank."""
        samples = list(range(len(dataset.lengths)))
        if self.tokens_per_micro_batch is not None:
            return self.lay_out(samples, dataset)
        return plan_by_count(samples, self.dp, self.micro_batches_per_epoch(len(samples)), self.micro_batch_size)


@dataclass(frozen=True)
class StepPlan:
    """Data set, order and packing of a run. It depends on data and flags alone, so every rank builds the same plan.

    Steps are numbered from 1, as in the log.
    """

    dataset: EncodedDataset
    order: SampleOrder
    packing: Packing
    num_steps: int

    @property
    def batch_size(self) -> int:
        """Samples of an optimizer step over all ranks."""
        return self.packing.batch_size

    @property
    def samples_per_step(self) -> int:
        """Samples in most optimizer steps: fewer than the batch size if an epoch is shorter and ends the step."""
        num_samples = len(self.dataset)
        is_short = not self.packing.across_epochs or self.packing.ends_epochs_within_steps(num_samples)
        return min(self.batch_size, num_samples) if is_short else self.batch_size

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps that count as one pass over the data."""
        return steps_per_epoch(self.order, self.packing)

    def after(self, done: int) -> Iterator[StepLayout]:
        """Yield the steps that remain after `done`."""
        return itertools.islice(self._from(done), self.num_steps - done)

    def step(self, step: int) -> StepLayout:
        """Lay out one step."""
        return next(self._from(step - 1))

    def _from(self, done: int) -> Iterator[StepLayout]:
        return self.packing.steps(self.order, self.dataset, done)

    def samples(self, step: int) -> list[int]:
        """Samples of one step, in order."""
        return self.step(step).samples

    def of_rank(self, step: int, rank: int) -> list[list[int]]:
        """Micro-batches of one global rank in a step, as lists of samples."""
        return self.of_ranks(step, [rank])

    def of_ranks(self, step: int, ranks: Iterable[int] | None = None) -> list[list[int]]:
        """Micro-batches of some ranks (default: all), without duplicates."""
        layout = self.step(step)
        own = range(self.packing.dp) if ranks is None else sorted(set(map(self.packing.dp_rank, ranks)))
        return [micro_batch for dp_rank in own for micro_batch in layout.of_ranks[dp_rank]]


def sample_order(args: Arguments, dataset: EncodedDataset, dp: int) -> SampleOrder:
    """Build the sample order selected by the flags."""
    data, training = args.data, args.training
    drawn, together = dataset.drawn
    how = next((GROUPINGS[name] for name in GROUPINGS if getattr(data, name)), drawn if data.shuffle else "file")
    return SampleOrder(
        num_samples=len(dataset),
        batch_size=dp * training.per_device_train_batch_size * training.gradient_accumulation_steps,
        seed=training.seed if training.data_seed is None else training.data_seed,
        how=how,
        lengths=dataset.lengths_for(how),
        micro_batch_size=training.per_device_train_batch_size,
        accumulation=training.gradient_accumulation_steps,
        folder=dataset.order_folder,
        shuffled_together=together,
    )


def largest_share(order: SampleOrder, lengths: np.ndarray, dp: int) -> int:
    """Tokens per rank that let every step fit in one micro-batch: an even share of the largest step, plus the
    longest sample, because balanced packs may differ by one sample."""
    lengths = np.asarray(lengths)
    steps = order.scan(order.batch_size, 0, order.steps_per_epoch)
    return math.ceil(max(int(lengths[rows].sum(1).max()) for _, rows in steps) / dp) + int(lengths.max())


def steps_per_epoch(order: SampleOrder, packing: Packing) -> int:
    """Optimizer steps that count as one pass over the data."""
    if not packing.across_epochs:
        return order.steps_per_epoch
    return max(1, packing.micro_batches_per_epoch(order.num_samples) // packing.num_micro_batches)


def total_steps(args: TrainingArguments, steps_per_epoch: int) -> int:
    """Optimizer steps of the whole run."""
    return args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * steps_per_epoch)


def with_steps_of_epochs(args: Arguments, steps_per_epoch: int) -> Arguments:
    """Resolve --save_strategy and --eval_strategy to --save_steps and --eval_steps in optimizer steps. --eval_steps may
    remain a fraction of all steps: see steps_between.

    For eval_strategy "steps" without eval_steps, logging_steps is used. Source: transformers' TrainingArguments.
    """
    training = args.training
    if training.save_strategy == "epoch":
        args = args.replaced(save_steps=steps_per_epoch)
    eval_steps = {
        None: training.eval_steps,
        "no": None,
        "steps": training.eval_steps or training.logging_steps,
        "epoch": steps_per_epoch,
    }
    return args.replaced(eval_steps=eval_steps[training.eval_strategy])


def steps_between(every: float | None, num_steps: int) -> int | None:
    """Optimizer steps between measurements; None for None or 0: measure only at the end.

    every: steps; below 1, a fraction of num_steps, rounded up. Source: transformers' TrainerState.compute_steps.
    """
    if not every:
        return None
    return math.ceil(every * num_steps) if every < 1 else int(every)
