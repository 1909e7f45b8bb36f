"""Which samples an optimizer step takes: the same ones on any number of ranks."""

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

BUCKET_STEPS = 64  # optimizer steps whose samples are sorted by length together, in the order by buckets
VERSION = 1  # of epochs' orders in files; raise it when the same settings would give another
SHARED_SAMPLES = 200_000  # from so many on, an epoch's order is made once per machine and mapped by its ranks
SORTED_TOGETHER = 1 << 20  # samples, which bounds the memory that sorting takes


@dataclass(frozen=True)
class SampleOrder:
    """The order of all samples, epoch by epoch, cut into optimizer steps.

    Every epoch is drawn from the seed and its number alone: no state needs saving, and any step can be started from.
    "random" and those of LLaVA's and LLaVA-NeXT's sampler give, for a seed, the order of their Trainer in one process,
    on any number of ranks; on several, their own draws do not depend on the seed alone.
    how: "random"; "file", as the files have it; "modality" (LLaVA), "length", "modality_auto" and "varlen"
    (LLaVA-NeXT); "bucket", every step from samples of like length; "shards", by_shards of shuffled_together shards.
    lengths: above 0; for "modality" and "modality_auto" those of samples without pictures are negative; for "shards"
    the number of samples of each shard. micro_batch_size: LLaVA spreads a step's lengths
    over micro-batches. accumulation: micro-batches of a rank in a step, which "varlen" groups by. folder: the index
    that lengths are from, beside which large orders are kept for all processes; None: in memory only.
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
        """Optimizer steps of one pass; the last one may be smaller."""
        return math.ceil(self.num_samples / self.batch_size)

    def steps(self, start_step: int = 0) -> Iterator[list[int]]:
        """Indices of the samples of each optimizer step, from start_step on, without end."""
        epoch, step = divmod(start_step, self.steps_per_epoch)
        while True:
            order = self.epoch(epoch)
            for first in range(step * self.batch_size, self.num_samples, self.batch_size):
                yield order[first : first + self.batch_size].tolist()
            epoch, step = epoch + 1, 0

    def scan(self, unit: int, first: int, last: int) -> Iterator[tuple[int, np.ndarray]]:
        """The samples of many units of one size at a time, from unit `first` to the one before `last` of all epochs.

        Yields the number of the first unit, and (units, samples) int32; an epoch's last unit is alone if it is shorter.
        """
        per_epoch = math.ceil(self.num_samples / unit)
        while first < last:
            epoch, begin = divmod(first, per_epoch)
            end = min(per_epoch, begin + last - first)
            for rows in _rows(self.epoch(epoch)[begin * unit : end * unit], unit):
                yield first, rows
                first += len(rows)

    def epoch(self, epoch: int) -> np.ndarray:
        """The samples' order in one epoch, (samples,) int32; that of large data is in a file."""
        if self.folder is None or self.num_samples < SHARED_SAMPLES:
            return self._made(epoch)
        # Beside the index, not in it: the index appears as a whole.
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
        # One generator goes on from epoch to epoch, and gives the data loader a number before each.
        # Source: transformers' Trainer (4.37) and torch's DataLoader and RandomSampler.
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(epoch):
            self._drawn(lengths, generator)
        return self._drawn(lengths, generator)

    def _drawn(self, lengths: np.ndarray, generator: torch.Generator) -> np.ndarray:
        """The next epoch's order of a generator that has drawn those before it."""
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


_NOT_SETTINGS = ("lengths", "folder")  # the folder's name says which samples these are, and how which of their lengths


def _number(generator: torch.Generator) -> int:
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator))


def _permutation(number: int, generator: torch.Generator) -> np.ndarray:
    """torch.randperm in half its memory: it draws the same for every type of integer."""
    return torch.randperm(number, generator=generator, dtype=torch.int32).numpy()


def by_length(
    lengths: Sequence[int], micro_batch_size: int, num_micro_batches: int, generator: torch.Generator
) -> np.ndarray:
    """Random steps, whose samples are spread over the micro-batches so that these are of like total length.

    Source: LLaVA's get_length_grouped_indices.
    """
    lengths = np.asarray(lengths, np.int32)
    return _evened_steps(_permutation(len(lengths), generator), lengths, micro_batch_size, num_micro_batches)


def by_length_next(
    lengths: Sequence[int], micro_batch_size: int, num_micro_batches: int, generator: torch.Generator
) -> np.ndarray:
    """Steps of like length, in random order, spread over the micro-batches as by_length has it.

    Source: LLaVA-NeXT's get_length_grouped_indices_auto_single, over transformers' get_length_grouped_indices, which
    sorts up to 50 steps together and exchanges the longest sample with the first.
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
    """Groups of like length in random order, random within.

    Source: LLaVA-NeXT's get_variable_length_grouped_indices and its sampler, which counts accumulation twice.
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
    """Steps of one kind (images: positive lengths; text only: negative), of like length within a step.

    num_micro_batches: of a step over all ranks; group: makes the order of each kind. What remains of both kinds is the
    last step, in the files' order.
    Source: LLaVA's get_modality_length_grouped_indices, and with by_length_next LLaVA-NeXT's
    get_modality_length_grouped_indices_auto. They draw from torch's global generator: seeded like the one given here,
    it gives the same order.
    """
    lengths = np.asarray(lengths, np.int32)
    kinds = [np.flatnonzero(lengths > 0), np.flatnonzero(lengths <= 0)]
    if not all(map(len, kinds)):
        return group(lengths, micro_batch_size, num_micro_batches, generator)  # text only: shortest first, as LLaVA
    batch_size = micro_batch_size * num_micro_batches
    steps, rest = [], []
    for indices in (kind.astype(np.int32) for kind in kinds):
        own = indices[group(np.abs(lengths[indices]), micro_batch_size, num_micro_batches, generator)]
        last = (len(own) - 1) // batch_size * batch_size  # LLaVA takes the last one out even when it is whole
        steps.append(own[:last])
        rest.append(own[last:])
    return np.concatenate(
        [_shuffled_parts(np.concatenate(steps), batch_size, generator), np.sort(np.concatenate(rest))]
    )


def by_length_bucket(lengths: Sequence[int], batch_size: int, generator: torch.Generator) -> np.ndarray:
    """Steps of samples of nearly one length, in random order; a step that is not whole comes last.

    The samples are shuffled, sorted by length within BUCKET_STEPS steps' worth, and cut into steps.
    """
    order = _permutation(len(lengths), generator)
    whole = len(order) - len(order) % batch_size
    buckets = _sorted_parts(order[:whole], np.asarray(lengths, np.int32), BUCKET_STEPS * batch_size)
    return np.concatenate([_shuffled_parts(buckets, batch_size, generator), order[whole:]])


def shards_in_order(num_shards: int, seed: int, epoch: int) -> np.ndarray:
    """The order in which by_shards takes the shards of an epoch."""
    return _permutation(num_shards, torch.Generator().manual_seed(seed + epoch))


def by_shards(sizes: Sequence[int], together: int, seed: int, epoch: int) -> np.ndarray:
    """Shards in random order, and the samples of some of them together in random order: known without any length.

    sizes: samples of each shard, which lie one behind the other; together: shards.
    """
    generator = torch.Generator().manual_seed(seed + epoch)
    shards = _permutation(len(sizes), generator)  # as shards_in_order has them
    ends, parts = np.cumsum(sizes), []
    for first in range(0, len(shards), together):
        ranges = [np.arange(ends[i] - sizes[i], ends[i], dtype=np.int32) for i in shards[first : first + together]]
        samples = np.concatenate(ranges)
        parts.append(samples[_permutation(len(samples), generator)])
    return np.concatenate(parts)


def _sorted_parts(order: np.ndarray, keys: np.ndarray, size: int) -> np.ndarray:
    """The order with every part of a size sorted by keys[sample], in place; equal keys stay as they are."""
    for rows in _rows(order, size):
        rows[:] = _sorted_by(keys[rows], rows)
    return order


def _sorted_by(keys: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Each row sorted by its keys, equal ones as they are. keys, rows: of one shape; keys below 2**31.

    Key and place in one number, which numpy sorts several times as fast as it finds the order of keys.
    """
    places = np.sort(keys.astype(np.int64) * keys.shape[1] + np.arange(keys.shape[1]), axis=1)
    places %= keys.shape[1]
    return np.take_along_axis(rows, places, axis=1)


def _shuffled_parts(order: np.ndarray, size: int, generator: torch.Generator) -> np.ndarray:
    """The order with its parts of a size, of which the last may be shorter, in random order."""
    num_whole, left = divmod(len(order), size)
    drawn = _permutation(num_whole + (left > 0), generator)
    whole = order[: num_whole * size].reshape(num_whole, size)
    if not left:
        return whole[drawn].reshape(-1)
    [at] = np.flatnonzero(drawn == num_whole)
    parts = (whole[drawn[:at]].reshape(-1), order[num_whole * size :], whole[drawn[at + 1 :]].reshape(-1))
    return np.concatenate(parts)


def _evened_steps(order: np.ndarray, lengths: np.ndarray, micro_batch_size: int, num_micro_batches: int) -> np.ndarray:
    """The order cut into steps, each spread over its micro-batches, in place.

    The samples of a step go to its micro-batches longest first, each to the shortest that has room (LLaVA's split). A
    last, shorter step that can't be divided evenly is dealt out in turn.
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
    """Views of (parts, size) that together are the order, each of about SORTED_TOGETHER samples; a last, shorter part
    is one of its own."""
    whole = len(order) // size
    together = max(1, SORTED_TOGETHER // size)
    for first in range(0, whole, together):
        last = min(whole, first + together)
        yield order[first * size : last * size].reshape(last - first, size)
    if len(order) > whole * size:
        yield order[whole * size :][None]
