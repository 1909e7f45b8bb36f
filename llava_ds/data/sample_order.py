"""Which samples an optimizer step takes: the same ones on any number of ranks."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

BUCKET_STEPS = 64  # optimizer steps whose samples are sorted by length together, in the order by buckets


@dataclass(frozen=True)
class SampleOrder:
    """The order of all samples, epoch by epoch, cut into optimizer steps.

    Every epoch is drawn from the seed and its number alone: no state needs saving, and any step can be started from.
    "random" and those of LLaVA's and LLaVA-NeXT's sampler give, for a seed, the order of their Trainer in one process,
    on any number of ranks; on several, their own draws do not depend on the seed alone.
    how: "random"; "file", as the files have it; "modality" (LLaVA), "length", "modality_auto" and "varlen"
    (LLaVA-NeXT); "bucket", every step from samples of like length. lengths: above 0; for "modality" and
    "modality_auto" those of samples without pictures are negative. micro_batch_size: LLaVA spreads a step's lengths
    over micro-batches. accumulation: micro-batches of a rank in a step, which "varlen" groups by.
    """

    num_samples: int
    batch_size: int
    seed: int
    how: Literal["random", "file", "modality", "modality_auto", "length", "varlen", "bucket"] = "random"
    lengths: Sequence[int] = ()
    micro_batch_size: int = 1
    accumulation: int = 1

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one pass; the last one may be smaller."""
        return math.ceil(self.num_samples / self.batch_size)

    def steps(self, start_step: int = 0) -> Iterator[list[int]]:
        """Indices of the samples of each optimizer step, from start_step on, without end."""
        epoch, step = divmod(start_step, self.steps_per_epoch)
        while True:
            order = self.epoch(epoch)
            for first in range(step * self.batch_size, self.num_samples, self.batch_size):
                yield order[first : first + self.batch_size]
            epoch, step = epoch + 1, 0

    def epoch(self, epoch: int) -> list[int]:
        """The samples' order in one epoch."""
        if self.how == "file":
            return list(range(self.num_samples))
        if self.how == "bucket":
            return by_length_bucket(self.lengths, self.batch_size, torch.Generator().manual_seed(self.seed + epoch))
        # One generator goes on from epoch to epoch, and gives the data loader a number before each.
        # Source: transformers' Trainer (4.37) and torch's DataLoader and RandomSampler.
        generator = torch.Generator().manual_seed(self.seed)
        num_chunks = math.ceil(self.batch_size / self.micro_batch_size)
        for _ in range(epoch):
            _number(generator)
            self._draw(generator, self.micro_batch_size * num_chunks)
        _number(generator)
        if self.how == "random":
            own = torch.Generator().manual_seed(_number(generator))
            return torch.randperm(self.num_samples, generator=own).tolist()
        if self.how == "varlen":
            return by_varying_length(self.lengths, self.batch_size, self.accumulation, generator)
        if self.how == "length":
            return by_length_next(self.lengths, self.micro_batch_size, num_chunks, generator)
        group = by_length if self.how == "modality" else by_length_next
        return by_modality_length(self.lengths, self.micro_batch_size, num_chunks, generator, group)

    def _draw(self, generator: torch.Generator, step_size: int) -> None:
        """Leave the generator as an epoch's order would, without the sorting, which takes seconds of large data."""
        if self.how == "random":
            _number(generator)
            return
        with_images = sum(length > 0 for length in self.lengths)
        kinds = [with_images, self.num_samples - with_images]
        if self.how in ("length", "varlen") or 0 in kinds:
            kinds = [self.num_samples]
        group_size = step_size * (self.accumulation if self.how == "varlen" else 1)
        for count in kinds:
            torch.randperm(count, generator=generator)
            if self.how != "modality":
                torch.randperm(math.ceil(count / group_size), generator=generator)
        if len(kinds) > 1:
            torch.randperm(sum(math.ceil(count / step_size) - 1 for count in kinds), generator=generator)


def _number(generator: torch.Generator) -> int:
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator))


def by_length(
    lengths: Sequence[int], micro_batch_size: int, num_micro_batches: int, generator: torch.Generator
) -> list[int]:
    """Random steps, whose samples are spread over the micro-batches so that these are of like total length.

    Source: LLaVA's get_length_grouped_indices.
    """
    order = torch.randperm(len(lengths), generator=generator).tolist()
    return _joined(_evened_steps(order, lengths, micro_batch_size, num_micro_batches))


def by_length_next(
    lengths: Sequence[int], micro_batch_size: int, num_micro_batches: int, generator: torch.Generator
) -> list[int]:
    """Steps of like length, in random order, spread over the micro-batches as by_length has it.

    Source: LLaVA-NeXT's get_length_grouped_indices_auto_single, over transformers' get_length_grouped_indices, which
    sorts up to 50 steps together and exchanges the longest sample with the first.
    """
    step_size = micro_batch_size * num_micro_batches
    order = torch.randperm(len(lengths), generator=generator).tolist()
    sorted_together = step_size * max(1, min(len(lengths) // (4 * step_size), 50))
    parts = [sorted(part, key=lambda i: -lengths[i]) for part in _cut(order, sorted_together)]
    longest = max(parts, key=lambda part: lengths[part[0]])
    parts[0][0], longest[0] = longest[0], parts[0][0]
    steps = _evened_steps(_joined(parts), lengths, micro_batch_size, num_micro_batches)
    return _joined([steps[i] for i in torch.randperm(len(steps), generator=generator)])


def by_varying_length(
    lengths: Sequence[int], step_size: int, accumulation: int, generator: torch.Generator
) -> list[int]:
    """Groups of like length in random order, random within.

    Source: LLaVA-NeXT's get_variable_length_grouped_indices and its sampler, which counts accumulation twice.
    """
    places = torch.randperm(len(lengths), generator=generator).tolist()
    longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    size = step_size * accumulation
    mixed = [sorted(part, key=lambda i: -places[i]) for part in _cut(longest_first, 8 * size)]
    groups = _cut(_joined(mixed), size)
    return _joined([groups[i] for i in torch.randperm(len(groups), generator=generator)])


def by_modality_length(
    lengths: Sequence[int],
    micro_batch_size: int,
    num_micro_batches: int,
    generator: torch.Generator,
    group: Callable[[Sequence[int], int, int, torch.Generator], list[int]] = by_length,
) -> list[int]:
    """Steps of one kind (images: positive lengths; text only: negative), of like length within a step.

    num_micro_batches: of a step over all ranks; group: makes the order of each kind. What remains of both kinds is the
    last step, in the files' order.
    Source: LLaVA's get_modality_length_grouped_indices, and with by_length_next LLaVA-NeXT's
    get_modality_length_grouped_indices_auto. They draw from torch's global generator: seeded like the one given here,
    it gives the same order.
    """
    with_images = [i for i, length in enumerate(lengths) if length > 0]
    text_only = [i for i, length in enumerate(lengths) if length <= 0]
    if not with_images or not text_only:
        return group(lengths, micro_batch_size, num_micro_batches, generator)  # text only: shortest first, as LLaVA
    batch_size = micro_batch_size * num_micro_batches
    steps, rest = [], []
    for indices in (with_images, text_only):
        own = group([abs(lengths[i]) for i in indices], micro_batch_size, num_micro_batches, generator)
        mine = _cut([indices[i] for i in own], batch_size)
        rest += mine.pop()  # LLaVA takes the last one out even when it is whole
        steps += mine
    shuffled = [steps[i] for i in torch.randperm(len(steps), generator=generator)]
    return _joined([*shuffled, sorted(rest)])


def by_length_bucket(lengths: Sequence[int], batch_size: int, generator: torch.Generator) -> list[int]:
    """Steps of samples of nearly one length, in random order; a step that is not whole comes last.

    The samples are shuffled, sorted by length within BUCKET_STEPS steps' worth, and cut into steps.
    """
    order = torch.randperm(len(lengths), generator=generator).tolist()
    whole = len(order) - len(order) % batch_size
    buckets = _cut(order[:whole], BUCKET_STEPS * batch_size)
    steps = [step for bucket in buckets for step in _cut(sorted(bucket, key=lambda i: lengths[i]), batch_size)]
    shuffled = [steps[i] for i in torch.randperm(len(steps), generator=generator)]
    return _joined([*shuffled, order[whole:]])


def _evened_steps(
    order: list[int], lengths: Sequence[int], micro_batch_size: int, num_micro_batches: int
) -> list[list[int]]:
    """The order cut into steps, each spread over its micro-batches."""
    steps = _cut(order, micro_batch_size * num_micro_batches)
    longest_first = [sorted(step, key=lambda i: -lengths[i]) for step in steps]
    return [_joined(_even_chunks(step, lengths, num_micro_batches)) for step in longest_first]


def _even_chunks(indices: list[int], lengths: Sequence[int], num_chunks: int) -> list[list[int]]:
    """The indices in chunks of one size, each going to the shortest chunk that has room (LLaVA's split)."""
    if len(indices) % num_chunks:
        return [indices[i::num_chunks] for i in range(num_chunks)]
    size = len(indices) // num_chunks
    chunks: list[list[int]] = [[] for _ in range(num_chunks)]
    totals = [0.0] * num_chunks
    for index in indices:
        shortest = totals.index(min(totals))
        chunks[shortest].append(index)
        totals[shortest] = math.inf if len(chunks[shortest]) == size else totals[shortest] + lengths[index]
    return chunks


def _cut(indices: list[int], size: int) -> list[list[int]]:
    return [indices[i : i + size] for i in range(0, len(indices), size)]


def _joined(parts: list[list[int]]) -> list[int]:
    return [index for part in parts for index in part]
