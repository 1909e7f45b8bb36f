# R records of a shard, t ids of all its records (an image counts as one id)
"""Put records that begin with the same tokens and images into one pack, to compute these tokens once."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from llava_ds.data.collate import LoadedSample
from llava_ds.data.dataset import BrokenSample, EncodedDataset, Undecoded
from llava_ds.data.loaded_pairs import common_prompt
from llava_ds.data.packing import plan_by_tokens

_BASE = np.uint64(0x9E3779B97F4A7C15)  # base of the polynomial hash of the ids


class GroupedDataset(EncodedDataset):
    """An encoded data set in which a sample can share its first tokens with the previous sample of the micro-batch.

    plain: the data set to group; by_image: shuffle images instead of samples.
    """

    def __init__(self, plain: EncodedDataset, by_image: bool) -> None:
        vars(self).update(vars(plain))
        parts = [_prefixes(each) for each in self.table.files(["ids", "flips", "media"])]
        self._keys, self._prefixes = (np.concatenate(each) for each in zip(*parts))  # (R,) each
        self._keys[self._prefixes == 0] = np.arange(len(self._keys), dtype=np.uint64)[self._prefixes == 0]
        if by_image:
            self.drawn = "images", 1

    def lengths_for(self, how: str) -> np.ndarray:
        if how != "images":
            return super().lengths_for(how)
        return np.unique(self._keys[self.rows], return_inverse=True)[1].astype(np.int32)

    def summed(self, values: np.ndarray, samples: Sequence[int]) -> int:
        """Sum the samples' values, less the part for tokens that a sample shares with the previous one.

        Assumes equal values per token. Samples may share a few more tokens than are subtracted.
        """
        samples = np.asarray(samples, np.int64)
        rows = self.rows[samples]
        repeated = samples[1:][self._keys[rows[1:]] == self._keys[rows[:-1]]]
        shared = values[repeated].astype(np.int64) * self._prefixes[self.rows[repeated]] // self.lengths[repeated]
        return super().summed(values, samples) - int(shared.sum())

    def packs(
        self, samples: Sequence[int], lengths: np.ndarray, dp: int, max_tokens: int, costs: np.ndarray
    ) -> list[list[list[int]]]:
        rows = self.rows[np.asarray(samples, np.int64)]
        keys, prefixes = self._keys[rows], self._prefixes[rows].astype(np.int64)
        own = lengths - prefixes
        # Split groups that are larger than a pack, or than a rank's share of the step.
        most = min(max_tokens, -(-int(lengths.sum()) // dp))
        groups = [group for each in _equal(keys) for group in _parts(each, prefixes, own, most)]
        sizes = [int(prefixes[group[0]] + own[group].sum()) for group in groups]
        own_costs = np.maximum(1, costs * own // lengths)
        work = [int(costs[group[0]] + own_costs[group[1:]].sum()) for group in groups]
        plan = plan_by_tokens(range(len(groups)), sizes, dp, max_tokens, work)
        return [[[samples[i] for one in micro for i in groups[one]] for micro in rank] for rank in plan]

    def __getitems__(self, indices: Sequence[int]) -> list[LoadedSample | BrokenSample]:
        """Load the samples of a micro-batch, for torch's DataLoader."""
        return list(self._together(indices, Undecoded.decode))

    def undecoded(self, *indices: int) -> list[LoadedSample | BrokenSample]:
        return list(self._together(indices, lambda undecoded: undecoded))

    def _together(self, indices: Sequence[int], load: Callable) -> Iterator[LoadedSample | BrokenSample]:
        """Yield samples. One that begins with the same images as the previous sample shares their tiles and tokens."""
        first, shown = None, []
        for index in indices:
            sample = self._sample(index, lambda undecoded: undecoded)
            names = [(each.media, each.sizes) for each, _ in sample.media]
            if first is not None and names == shown:
                sample = replace(sample, media=first.media)
                sample = replace(sample, shared=common_prompt(first, sample))
            if not sample.shared:
                sample, shown = self._sample(index, load) if names else sample, names
                first = sample if names and not isinstance(sample, BrokenSample) else None
            yield sample


def _prefixes(shard: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Return a hash of each record's images and tokens up to the last image, (R,) uint64, and the number of these
    tokens, (R,) int32: 0 if a record has no image, an answer before the last image, or no token after it."""
    offsets, ids = _lists(shard, "ids")  # (R + 1,), (t,)
    images = np.flatnonzero(ids < 0)
    ends = offsets[:-1].copy()
    ends[np.searchsorted(offsets, images, side="right") - 1] = images + 1  # a row's last image is assigned last
    places = np.arange(len(ids)) - np.repeat(offsets[:-1], np.diff(offsets))
    powers = np.cumprod(np.full(int(places.max(initial=0)) + 1, _BASE, np.uint64))
    hashes, tokens = (
        np.concatenate([np.zeros(1, each.dtype), each.cumsum()])
        for each in (ids.astype(np.uint64) * powers[places], np.where(ids < 0, -ids, 1).astype(np.int64))
    )  # (t + 1,) each
    media = [_digest(text) for text in shard.column("media").to_pylist()]
    keys = (hashes[ends] - hashes[offsets[:-1]]) * _BASE ^ np.array(media, np.uint64)
    sizes = tokens[ends] - tokens[offsets[:-1]]
    starts, flips = _lists(shard, "flips")
    learned = np.append(flips, 0)[starts[:-1]]  # a record's first supervised token
    is_usable = (learned >= sizes) & (np.diff(starts) > 0) & (ends < offsets[1:])
    return keys, np.where(is_usable, sizes, 0).astype(np.int32)


def _lists(shard: pa.Table, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the offsets (R + 1,) and the concatenated values of a column of lists."""
    column = pa.concat_arrays(shard.column(name).chunks)
    offsets, values = column.offsets.to_numpy().astype(np.int64), column.values.to_numpy()
    return offsets - offsets[0], values[offsets[0] : offsets[-1]]


def _digest(text: str | None) -> int:
    return int.from_bytes(hashlib.blake2b((text or "").encode(), digest_size=8).digest(), "little")


def _equal(keys: np.ndarray) -> list[list[int]]:
    """Group the indices of equal keys. Groups are in the order of their first indices."""
    found: dict[int, list[int]] = {}
    for i, key in enumerate(keys.tolist()):
        found.setdefault(key, []).append(i)
    return list(found.values())


def _parts(group: list[int], prefixes: np.ndarray, own: np.ndarray, most: int) -> Iterator[list[int]]:
    """Split a group into parts of at most `most` tokens. A longer sample is a part by itself."""
    part, tokens = [], 0
    for i in group:
        if part and tokens + int(own[i]) > most:
            yield part
            part = []
        tokens = int(own[i]) + (tokens if part else int(prefixes[i]))
        part.append(i)
    yield part
