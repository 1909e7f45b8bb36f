"""Order of samples over optimizer steps, the same on any number of ranks."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from llava_ds.data.fingerprint import digest_of
from llava_ds.data.mapped_arrays import Mapped, mapped, remove_unused
from llava_ds.data.spreading import spread

BUCKET_STEPS = 64  # optimizer steps sorted by length together, in the order by buckets
VERSION = 1  # version of saved orders; raise it when the same settings would give another order
SHARED_SAMPLES = 200_000  # from this size on, an epoch's order is computed once per machine and mapped by its ranks
SORTED_TOGETHER = 1 << 20  # samples sorted at once: bounds the memory of sorting


@dataclass(frozen=True)
class SampleOrder:
    """The order of all samples, epoch by epoch, split into optimizer steps.

    Each epoch depends on the seed and its number alone: no state needs saving, and training can start from any step.
    For a given seed, "random" and the orders of LLaVA's and LLaVA-NeXT's samplers match their Trainer in one process,
    on any number of ranks; on several ranks, the originals' draws depend on more than the seed.
    how: "random"; "file", the files' order; "modality" (LLaVA), "length", "modality_auto" and "varlen" (LLaVA-NeXT);
    "bucket", steps of samples of similar length; "shards", by_shards with shuffled_together shards. lengths: above 0;
    for "modality" and "modality_auto" negative for samples without images; for "shards" the number of samples per
    shard. micro_batch_size: LLaVA spreads a step's lengths over micro-batches. accumulation: micro-batches of a rank in
    a step, used by "varlen". folder: the lengths' index folder; large orders are saved next to it for all processes.
    None: in memory only.
    """

    num_samples: int
    batch_size: int
    seed: int
    how: Literal["random", "file", "modality", "modality_auto", "length", "varlen", "bucket", "shards"] = "random"
    lengths: Sequence[int] = ()
    micro_batch_size: int = 1
    accumulation: int = 1
    folder: Path | None = None
    shuffled_together: int = 1

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps per epoch; the last one may be smaller."""
        return math.ceil(self.num_samples / self.batch_size)

    def steps(self, start_step: int = 0) -> Iterator[list[int]]:
        """Yield the sample indices of each optimizer step from start_step on, endlessly."""
        epoch, step = divmod(start_step, self.steps_per_epoch)
        while True:
            order = self.epoch(epoch)
            for first in range(step * self.batch_size, self.num_samples, self.batch_size):
                yield order[first : first + self.batch_size].tolist()
            epoch, step = epoch + 1, 0

    def scan(self, unit: int, first: int, last: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield samples in units of one size, many units at a time, from unit `first` up to but not including `last`,
        counted over all epochs.

        Yields the index of the first unit, and (units, samples) int32. A shorter last unit of an epoch is yielded
        alone.
        """
        per_epoch = math.ceil(self.num_samples / unit)
        while first < last:
            epoch, begin = divmod(first, per_epoch)
            end = min(per_epoch, begin + last - first)
            for rows in _rows(self.epoch(epoch)[begin * unit : end * unit], unit):
                yield first, rows
                first += len(rows)

    def epoch(self, epoch: int) -> np.ndarray:
        """Return one epoch's order, (samples,) int32, mapped from a file for large data."""
        if self.folder is None or self.num_samples < SHARED_SAMPLES:
            return self._made(epoch)
        # Next to the index folder, not inside: that folder is published as a whole.
        orders = self.folder.with_name(f"{self.folder.name}-orders")
        settings = [getattr(self, field.name) for field in dataclasses.fields(self) if field.name not in _NOT_SETTINGS]
        folder = orders / digest_of(map(str, [VERSION, *settings, epoch]))
        if not folder.exists():
            remove_unused(orders)
        found = mapped(folder, lambda: Mapped({"order": self._made(epoch)}, {}))
        return np.asarray(found.arrays["order"])

    def _made(self, epoch: int) -> np.ndarray:
        if self.how == "file":
            return np.arange(self.num_samples, dtype=np.int32)
        lengths = np.asarray(self.lengths, np.int32)
        if self.how == "bucket":
            return by_length_bucket(lengths, self.batch_size, torch.Generator().manual_seed(self.seed + epoch))
        if self.how == "shards":
            return by_shards(lengths, self.shuffled_together, self.seed, epoch)
        # One generator continues across epochs, and the data loader draws one number before each epoch.
        # Source: transformers' Trainer (4.37) and torch's DataLoader and RandomSampler.
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(epoch):
            self._drawn(lengths, generator)
        return self._drawn(lengths, generator)

    def _drawn(self, lengths: np.ndarray, generator: torch.Generator) -> np.ndarray:
        """Draw the next epoch's order from a generator that has drawn all earlier ones."""
        _number(generator)
        if self.how == "random":
            return _permutation(self.num_samples, torch.Generator().manual_seed(_number(generator)))
        if self.how == "varlen":
            return by_varying_length(lengths, self.batch_size, self.accumulation, generator)
        num_chunks = math.ceil(self.batch_size / self.micro_batch_size)
        if self.how == "length":
            return by_length_next(lengths, self.micro_batch_size, num_chunks, generator)
        group = by_length if self.how == "modality" else by_length_next
        return by_modality_length(lengths, self.micro_batch_size, num_chunks, generator, group)


_NOT_SETTINGS = ("lengths", "folder")  # the folder's name identifies the samples, and `how` their lengths


def _number(generator: torch.Generator) -> int:
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator))


def _permutation(number: int, generator: torch.Generator) -> np.ndarray:
    """Do torch.randperm in half its memory: it draws the same values for every integer type."""
    return torch.randperm(number, generator=generator, dtype=torch.int32).numpy()


def by_length(
    lengths: Sequence[int], micro_batch_size: int, num_micro_batches: int, generator: torch.Generator
) -> np.ndarray:
    """Random steps, with samples spread over the micro-batches so that their total lengths are similar.

    Source: LLaVA's get_length_grouped_indices.
    """
    lengths = np.asarray(lengths, np.int32)
    return _evened_steps(_permutation(len(lengths), generator), lengths, micro_batch_size, num_micro_batches)


def by_length_next(
    lengths: Sequence[int], micro_batch_size: int, num_micro_batches: int, generator: torch.Generator
) -> np.ndarray:
    """Steps of similar length in random order, with samples spread over the micro-batches as in by_length.

    Source: LLaVA-NeXT's get_length_grouped_indices_auto_single, over transformers' get_length_grouped_indices: it sorts
    up to 50 steps together and exchanges the longest sample with the first.
    """
    lengths = np.asarray(lengths, np.int32)
    step_size = micro_batch_size * num_micro_batches
    sorted_together = step_size * max(1, min(len(lengths) // (4 * step_size), 50))
    order = _sorted_parts(_permutation(len(lengths), generator), -lengths, sorted_together)
    longest = sorted_together * int(np.argmax(lengths[order[::sorted_together]]))
    order[0], order[longest] = order[longest], order[0]
    return _shuffled_parts(_evened_steps(order, lengths, micro_batch_size, num_micro_batches), step_size, generator)


def by_varying_length(
    lengths: Sequence[int], step_size: int, accumulation: int, generator: torch.Generator
) -> np.ndarray:
    """Groups of similar length in random order, shuffled within each group.

    Source: LLaVA-NeXT's get_variable_length_grouped_indices and its sampler (it counts accumulation twice).
    """
    places = _permutation(len(lengths), generator)
    longest_first = np.argsort(-np.asarray(lengths, np.int32), kind="stable").astype(np.int32)
    size = step_size * accumulation
    return _shuffled_parts(_sorted_parts(longest_first, -places, 8 * size), size, generator)


def by_modality_length(
    lengths: Sequence[int],
    micro_batch_size: int,
    num_micro_batches: int,
    generator: torch.Generator,
    group: Callable[[Sequence[int], int, int, torch.Generator], np.ndarray] = by_length,
) -> np.ndarray:
    """Steps of one kind each (images: positive lengths; text only: negative), of similar length within a step.

    num_micro_batches: per step over all ranks; group: orders the samples of one kind. The remainders of both kinds form
    the last step, in the files' order.
    Source: LLaVA's get_modality_length_grouped_indices, and with by_length_next LLaVA-NeXT's
    get_modality_length_grouped_indices_auto. They draw from torch's global generator; the same seed gives the same
    order here.
    """
    lengths = np.asarray(lengths, np.int32)
    kinds = [np.flatnonzero(lengths > 0), np.flatnonzero(lengths <= 0)]
    if not all(map(len, kinds)):
        return group(lengths, micro_batch_size, num_micro_batches, generator)  # text only: shortest first, like LLaVA
    batch_size = micro_batch_size * num_micro_batches
    steps, rest = [], []
    for indices in (kind.astype(np.int32) for kind in kinds):
        own = indices[group(np.abs(lengths[indices]), micro_batch_size, num_micro_batches, generator)]
        last = (len(own) - 1) // batch_size * batch_size  # LLaVA takes the last step out even when it is full
        steps.append(own[:last])
        rest.append(own[last:])
    return np.concatenate(
        [_shuffled_parts(np.concatenate(steps), batch_size, generator), np.sort(np.concatenate(rest))]
    )


def by_length_bucket(lengths: Sequence[int], batch_size: int, generator: torch.Generator) -> np.ndarray:
    """Steps of samples of nearly equal length, in random order; an incomplete step comes last.

    The samples are shuffled, sorted by length within BUCKET_STEPS steps' worth, and split into steps.
    """
    order = _permutation(len(lengths), generator)
    whole = len(order) - len(order) % batch_size
    buckets = _sorted_parts(order[:whole], np.asarray(lengths, np.int32), BUCKET_STEPS * batch_size)
    return np.concatenate([_shuffled_parts(buckets, batch_size, generator), order[whole:]])


def shards_in_order(num_shards: int, seed: int, epoch: int) -> np.ndarray:
    """The order in which by_shards takes the shards of an epoch."""
    return _permutation(num_shards, torch.Generator().manual_seed(seed + epoch))


def by_shards(sizes: Sequence[int], together: int, seed: int, epoch: int) -> np.ndarray:
    """Shards in random order, with the samples of `together` consecutive shards shuffled together. Needs no lengths of
    samples.

    sizes: number of samples per shard, laid end to end.
    """
    generator = torch.Generator().manual_seed(seed + epoch)
    shards = _permutation(len(sizes), generator)  # the same draw as shards_in_order
    ends, parts = np.cumsum(sizes), []
    for first in range(0, len(shards), together):
        ranges = [np.arange(ends[i] - sizes[i], ends[i], dtype=np.int32) for i in shards[first : first + together]]
        samples = np.concatenate(ranges)
        parts.append(samples[_permutation(len(samples), generator)])
    return np.concatenate(parts)


def _sorted_parts(order: np.ndarray, keys: np.ndarray, size: int) -> np.ndarray:
    """Sort every part of `size` samples by keys[sample], in place and stable."""
    for rows in _rows(order, size):
        rows[:] = _sorted_by(keys[rows], rows)
    return order


def _sorted_by(keys: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Sort each row by its keys, stable. keys, rows: of the same shape; keys below 2**31.

    Key and position are packed into one number: numpy sorts those several times as fast as argsort.
    """
    places = np.sort(keys.astype(np.int64) * keys.shape[1] + np.arange(keys.shape[1]), axis=1)
    places %= keys.shape[1]
    return np.take_along_axis(rows, places, axis=1)


def _shuffled_parts(order: np.ndarray, size: int, generator: torch.Generator) -> np.ndarray:
    """Shuffle the parts of `size` samples (the last may be shorter)."""
    num_whole, left = divmod(len(order), size)
    drawn = _permutation(num_whole + (left > 0), generator)
    whole = order[: num_whole * size].reshape(num_whole, size)
    if not left:
        return whole[drawn].reshape(-1)
    [at] = np.flatnonzero(drawn == num_whole)
    parts = (whole[drawn[:at]].reshape(-1), order[num_whole * size :], whole[drawn[at + 1 :]].reshape(-1))
    return np.concatenate(parts)


def _evened_steps(order: np.ndarray, lengths: np.ndarray, micro_batch_size: int, num_micro_batches: int) -> np.ndarray:
    """Spread the samples of each step over its micro-batches, in place.

    Within a step, samples are placed longest first, each into the shortest micro-batch with room (LLaVA's split). A
    shorter last step that can't be divided evenly is dealt out in turn.
    """
    size = micro_batch_size * num_micro_batches
    _sorted_parts(order, -lengths, size)
    if 1 in (micro_batch_size, num_micro_batches):
        return order
    for rows in _rows(order, size):
        count = rows.shape[1]
        if count % num_micro_batches:
            chunks = np.arange(count)[None] % num_micro_batches
        else:
            chunks = spread(lengths[rows], num_micro_batches, count // num_micro_batches)
        rows[:] = _sorted_by(np.broadcast_to(chunks, rows.shape), rows)
    return order


def _rows(order: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """Yield views (parts, size) that together cover the order, about SORTED_TOGETHER samples each; a shorter last part
    comes alone."""
    whole = len(order) // size
    together = max(1, SORTED_TOGETHER // size)
    for first in range(0, whole, together):
        last = min(whole, first + together)
        yield order[first * size : last * size].reshape(last - first, size)
    if len(order) > whole * size:
        yield order[whole * size :][None]
