"""The plan of all optimizer steps: the samples of each, and the rank and micro-batch that computes which."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from llava_ds.config.arguments import Arguments, TrainingArguments, steps_go_across_epochs
from llava_ds.config.data_flags import GROUPINGS
from llava_ds.data.dataset import EncodedDataset
from llava_ds.data.packing import plan_by_count, plan_by_tokens, plans_across_epochs
from llava_ds.data.sample_order import SampleOrder
from llava_ds.extensions.base import Axis

# Samples of the steps that are left, up to which the heaviest micro-batch is found exactly: packing takes about 3 us a
# sample, an order 0.2 to 0.7 us.
PLANNED_SAMPLES, SCANNED_SAMPLES = 2_000_000, 100_000_000


class StepLayout(NamedTuple):
    """One optimizer step: its samples in their order, and the micro-batches ([rank][micro-batch] -> samples)."""

    samples: list[int]
    of_ranks: list[list[list[int]]]


@dataclass(frozen=True)
class Packing:
    """The rule that lays the samples of a step out on ranks and micro-batches.

    dp: groups of ranks with samples of their own; axes: over which the ranks of a group share these.
    tokens_per_micro_batch: packs of at most this many tokens, evened out by cost; None: micro-batches by count.
    across_epochs: steps of whole micro-batches that run on into the next epoch, as in LLaVA's trainer. pair_cost: a
    sample of L tokens costs L + pair_cost * L**2, the second part for attention.
    """

    dp: int
    micro_batch_size: int
    num_micro_batches: int
    tokens_per_micro_batch: int | None
    across_epochs: bool = False
    pair_cost: float = 0.0
    axes: tuple[Axis, ...] = ()

    @classmethod
    def of(cls, args: Arguments, dp: int, tokens: int | None, pair_cost: float) -> "Packing":
        """Read the flags. tokens: the number that --tokens_per_micro_batch auto has become, for each rank."""
        training, axes = args.training, args.axes
        size, accumulation = training.per_device_train_batch_size, training.gradient_accumulation_steps
        bound = None if tokens is None else tokens * args.ranks_per_token
        return cls(dp, size, accumulation, bound, steps_go_across_epochs(training), pair_cost, axes)

    @property
    def shared(self) -> int:
        """Ranks with the same samples."""
        return math.prod(axis.size for axis in self.axes)

    def dp_rank(self, rank: int) -> int:
        """The place of a rank's samples among all (Mesh). rank: among all."""
        return rank // math.prod(axis.size for axis in self.axes if axis.order > 0) % self.dp

    @property
    def batch_size(self) -> int:
        """Samples of an optimizer step over all ranks."""
        return self.dp * self.micro_batch_size * self.num_micro_batches

    def ends_epochs_within_steps(self, num_samples: int) -> bool:
        """True if an epoch is shorter than a step, and ends it (see plans_across_epochs)."""
        return self.across_epochs and self.micro_batches_per_epoch(num_samples) <= self.num_micro_batches

    def micro_batches_per_epoch(self, num_samples: int) -> int:
        """Micro-batches of each rank in one pass over the data."""
        return math.ceil(num_samples / (self.dp * self.micro_batch_size))

    def steps(
        self,
        order: SampleOrder,
        lengths: Sequence[int],
        done: int,
        wait_for: Callable[[Sequence[int]], None] = lambda samples: None,
    ) -> Iterator[StepLayout]:
        """Lay out step after step, from the one after `done`, without end. lengths: of the whole data set.

        wait_for: returns when samples can be loaded and their lengths are known (EncodedDataset.wait_for).
        """
        if not self.across_epochs:
            for samples in order.steps(done):
                wait_for(samples)
                yield StepLayout(samples, self.lay_out(samples, lengths))
            return
        # Steps are cut from one stream of micro-batches, so that any of them can be started from at once; except for
        # epochs that are shorter than a step.
        per_epoch = self.micro_batches_per_epoch(order.num_samples)
        first, begun, passed = 0, 0, done
        if not self.ends_epochs_within_steps(order.num_samples):
            first, begun = divmod(done * self.num_micro_batches, per_epoch)
            passed = 0
        epochs = map(order.epoch, itertools.count(first))
        plans = plans_across_epochs(epochs, self.dp, self.num_micro_batches, self.micro_batch_size, begun)
        for of_ranks in itertools.islice(plans, passed, None):
            in_turn = itertools.chain.from_iterable(zip(*of_ranks))  # the first micro-batch of every rank, and so on
            samples = [sample for micro_batch in in_turn for sample in micro_batch]
            wait_for(samples)
            yield StepLayout(samples, of_ranks)

    def lay_out(self, samples: list[int], lengths: Sequence[int]) -> list[list[list[int]]]:
        """Lay out the samples of one step: [rank][micro-batch] -> samples."""
        if self.tokens_per_micro_batch is None:
            return plan_by_count(samples, self.dp, self.num_micro_batches, self.micro_batch_size)
        tokens = np.asarray(lengths)[samples].astype(np.int64)
        return plan_by_tokens(samples, tokens, self.dp, self.tokens_per_micro_batch, self.costs(tokens))

    def costs(self, tokens: np.ndarray) -> np.ndarray:
        """The costs of samples of so many tokens, int64."""
        return tokens + (self.pair_cost * tokens**2).astype(np.int64)

    def lay_out_all(self, lengths: Sequence[int]) -> list[list[list[int]]]:
        """Lay out a whole data set as one step, with as many micro-batches on every rank. lengths: its own."""
        samples = list(range(len(lengths)))
        if self.tokens_per_micro_batch is not None:
            return self.lay_out(samples, lengths)
        return plan_by_count(samples, self.dp, self.micro_batches_per_epoch(len(samples)), self.micro_batch_size)


@dataclass(frozen=True)
class StepPlan:
    """Data set, order and packing of a run. It follows from data and flags alone, so every rank makes the same one.

    Steps are counted as the log counts them: step 1 is the first.
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
    def steps_per_epoch(self) -> int:
        """Optimizer steps that count as one pass over the data."""
        return steps_per_epoch(self.order, self.packing)

    def after(self, done: int) -> Iterator[StepLayout]:
        """The steps that are left when `done` are done."""
        return itertools.islice(self._from(done), self.num_steps - done)

    def step(self, step: int) -> StepLayout:
        """The layout of one step."""
        return next(self._from(step - 1))

    def _from(self, done: int) -> Iterator[StepLayout]:
        return self.packing.steps(self.order, self.dataset.lengths, done, self.dataset.wait_for)

    def samples(self, step: int) -> list[int]:
        """The samples of one step, in their order."""
        return self.step(step).samples

    def of_rank(self, step: int, rank: int) -> list[list[int]]:
        """The micro-batches of one rank in a step, as lists of samples. rank: among all."""
        return self.of_ranks(step, [rank])

    def of_ranks(self, step: int, ranks: Iterable[int] | None = None) -> list[list[int]]:
        """The micro-batches of some ranks, or of all, each once."""
        layout = self.step(step)
        own = range(self.packing.dp) if ranks is None else sorted(set(map(self.packing.dp_rank, ranks)))
        return [micro_batch for dp_rank in own for micro_batch in layout.of_ranks[dp_rank]]

    def heaviest(self, done: int) -> list[int]:
        """Samples of a micro-batch with as many tokens as any that is left on any rank has.

        It is the first of these itself, and empty if no step is left; but where finding it would take long, samples
        that no micro-batch can surpass: the longest ones by count, and a pack of _most_tokens() or slightly more.
        While the data are being encoded, it is made up of the shards that the next step needs.
        """
        packing, lengths = self.packing, self.dataset.lengths
        if not self.dataset.is_whole:
            if done >= self.num_steps:
                return []
            self.step(done + 1)  # whose lengths are known then
            return self.dataset.heaviest_known(packing.micro_batch_size, packing.tokens_per_micro_batch)
        left = (self.num_steps - done) * self.batch_size
        if packing.tokens_per_micro_batch is not None:
            if left > PLANNED_SAMPLES:
                return pack_of(lengths, self._most_tokens(done))
        elif left > SCANNED_SAMPLES:
            number = min(packing.micro_batch_size, len(lengths))
            longest = np.argpartition(lengths, -number)[-number:]
            return np.resize(longest, packing.micro_batch_size).tolist()
        elif not packing.ends_epochs_within_steps(len(lengths)):
            return self._heaviest_of(itertools.islice(self.after(self._heaviest_step(done)), min(1, left)))
        return self._heaviest_of(self.after(done))

    def _heaviest_of(self, layouts: Iterable[StepLayout]) -> list[int]:
        micro_batches = (micro for layout in layouts for rank in layout.of_ranks for micro in rank)
        return max(micro_batches, key=self._tokens, default=[])

    def _tokens(self, samples: list[int]) -> int:
        return int(self.dataset.lengths[samples].sum()) if samples else 0

    def _heaviest_step(self, done: int) -> int:
        """The steps before the first one with the heaviest micro-batch by count."""
        packing, lengths = self.packing, self.dataset.lengths
        unit, per_step = self.batch_size, 1
        if packing.across_epochs:
            unit, per_step = packing.dp * packing.micro_batch_size, packing.num_micro_batches
        found, most = done, -1
        for first, rows in self.order.scan(unit, done * per_step, self.num_steps * per_step):
            if rows.shape[1] == unit:
                by_unit = lengths[rows].reshape(len(rows), -1, packing.micro_batch_size).sum(2).max(1)
                step = (first + int(by_unit.argmax())) // per_step
                tokens = int(by_unit.max())
            else:  # the last samples of an epoch
                step = first // per_step
                tokens = self._tokens(self._heaviest_of([self.step(step + 1)]))
            if tokens > most:
                found, most = step, tokens
        return found

    def _most_tokens(self, done: int) -> int:
        """Tokens that no pack of the steps that are left surpasses.

        plan_by_tokens puts the heaviest sample first into the lightest pack, whose cost is at most the mean then, and
        no exchange makes the heaviest pack heavier. Packs that this leaves too long are cut to the bound, which is
        lower. Samples cost at least their tokens.
        """
        packing, lengths, longest = self.packing, self.dataset.lengths, int(self.dataset.lengths.max())
        cost_of_longest = int(packing.costs(np.array([longest]))[0])
        if (self.num_steps - done) * self.batch_size > SCANNED_SAMPLES:
            step_cost = self.batch_size * cost_of_longest
        else:
            scan = self.order.scan(self.batch_size, done, self.num_steps)
            step_cost = max(int(packing.costs(lengths[rows].astype(np.int64)).sum(1).max()) for _, rows in scan)
        evened = math.ceil(step_cost / packing.dp) + cost_of_longest
        return max(longest, min(packing.tokens_per_micro_batch, evened))


def pack_of(lengths: np.ndarray, num_tokens: int) -> list[int]:
    """The longest samples that make up a number of tokens, or slightly more; all samples if they have fewer."""
    left = np.bincount(lengths)  # samples of each length
    taken = np.zeros_like(left)
    for length in np.flatnonzero(left)[::-1].tolist():
        taken[length] = min(left[length], num_tokens // length)
        num_tokens -= length * int(taken[length])
    left -= taken
    if num_tokens > 0 and left[num_tokens:].any():  # a gap shorter than what is left: close it with the shortest
        taken[num_tokens + int(np.argmax(left[num_tokens:] > 0))] += 1
    wanted = np.flatnonzero(taken)
    return [int(i) for length in wanted for i in np.flatnonzero(lengths == length)[: taken[length]]]


def sample_order(args: Arguments, dataset: EncodedDataset, dp: int) -> SampleOrder:
    """The order of the samples that the flags ask for."""
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
    """Tokens with which every step is one micro-batch on each rank: an even share of the largest step, and one sample
    more, by which balanced packs may differ."""
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
    """Return the flags with --save_steps and --eval_steps in optimizer steps, as --save_strategy and --eval_strategy
    ask. --eval_steps may still be a part of all steps: see steps_between.

    Source: transformers' TrainingArguments, where eval_strategy "steps" without eval_steps takes logging_steps.
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
    """Optimizer steps from one measurement to the next; None for None and 0: there is none before the end.

    every: steps, or below 1 a part of num_steps, which is rounded up. Source: transformers' TrainerState.compute_steps.
    """
    if not every:
        return None
    return math.ceil(every * num_steps) if every < 1 else int(every)
