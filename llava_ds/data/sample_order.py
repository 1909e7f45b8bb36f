"""Order of samples over optimizer steps, the same on any number of ranks."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from llava_ds.data.fingerprint import digest_of
from llava_ds.data.mapped_arrays import Mapped, mapped, remove_unused
from llava_ds.data.permutations import order_rows, permutation

VERSION = 1  # version of saved orders; increment it when the order for the same settings would change
SHARED_SAMPLES = 200_000  # from this size on, an epoch's order is computed once per machine and mapped by its ranks


@dataclass(frozen=True)
class SampleOrder:
    """The order of all samples, epoch by epoch, split into optimizer steps.

    An epoch depends only on the seed and its number: no state is saved, and training can start from any step. For a
    given seed, "random" and the orders of LLaVA's and LLaVA-NeXT's samplers match their Trainer in one process, on any
    number of ranks; on several ranks, theirs depend on more than the seed. how: "random"; "file", the files' order;
    "modality" (LLaVA), "length", "modality_auto" and "varlen" (LLaVA-NeXT); "bucket", steps of samples of similar
    length; "images", the samples of an image in sequence; "shards", by_shards with shuffled_together shards.
    lengths: above 0; for "modality" and "modality_auto" negative for samples without images; for "images" the index of
    each sample's image; for "shards" the number of samples per shard. micro_batch_size: LLaVA's orders balance lengths
    over micro-batches of this size. accumulation: micro-batches of a rank in a step, used by "varlen". folder: index
    folder of the samples, next to which large orders are saved for all processes; None: keep orders in memory.
    """

    num_samples: int
    batch_size: int
    seed: int
    how: Literal[
        "random", "file", "modality", "modality_auto", "length", "varlen", "bucket", "images", "shards"
    ] = "random"  # fmt: skip
    lengths: Sequence[int] = ()
    micro_batch_size: int = 1
    accumulation: int = 1
    folder: Path | None = None
    shuffled_together: int = 1

    @property
    def steps_per_epoch(self) -> int:
        """Number of optimizer steps per epoch; the last step may be smaller."""
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
        """Yield the samples in units of `unit` samples, many units at a time. first, last: range of units (without
        `last`), counted over all epochs.

        Yields the index of the first unit, and (units, samples) int32. A shorter last unit of an epoch is yielded
        alone.
        """
        per_epoch = math.ceil(self.num_samples / unit)
        while first < last:
            epoch, begin = divmod(first, per_epoch)
            end = min(per_epoch, begin + last - first)
            for rows in order_rows(self.epoch(epoch)[begin * unit : end * unit], unit):
                yield first, rows
                first += len(rows)

    def epoch(self, epoch: int) -> np.ndarray:
        """Return one epoch's order, (samples,) int32, memory-mapped for large data."""
        if self.folder is None or self.num_samples < SHARED_SAMPLES:
            return self._made(epoch)
        # Not inside the index folder, because that folder is published as a whole.
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
            from llava_ds.data.length_orders import by_length_bucket

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
        """Return the next epoch's order. generator: must have generated the orders of all earlier epochs."""
        _number(generator)
        if self.how == "random":
            return permutation(self.num_samples, torch.Generator().manual_seed(_number(generator)))
        from llava_ds.data.length_orders import drawn_by_length

        settings = (self.batch_size, self.micro_batch_size, self.accumulation)
        return drawn_by_length(self.how, lengths, *settings, generator)


_NOT_SETTINGS = ("lengths", "folder")  # the folder's name identifies the samples, and `how` their lengths


def _number(generator: torch.Generator) -> int:
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator))


def shards_in_order(num_shards: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order in which by_shards takes the shards of an epoch."""
    return permutation(num_shards, torch.Generator().manual_seed(seed + epoch))


def by_shards(sizes: Sequence[int], together: int, seed: int, epoch: int) -> np.ndarray:
    """Return shards in random order, with the samples of `together` consecutive shards shuffled together. It does not
    depend on the samples' lengths.

    sizes: number of samples per shard, laid end to end.
    """
    generator = torch.Generator().manual_seed(seed + epoch)
    shards = permutation(len(sizes), generator)  # the same order as shards_in_order
    ends, parts = np.cumsum(sizes), []
    for first in range(0, len(shards), together):
        ranges = [np.arange(ends[i] - sizes[i], ends[i], dtype=np.int32) for i in shards[first : first + together]]
        samples = np.concatenate(ranges)
        parts.append(samples[permutation(len(samples), generator)])
    return np.concatenate(parts)
