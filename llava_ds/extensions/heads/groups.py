"""Data sets of queries: a sample is a query's row and the rows of its positive and negatives after it."""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np

from llava_ds.data.collate import LoadedSample
from llava_ds.data.dataset import BrokenSample, EncodedDataset
from llava_ds.data.encoded_rows import FIELDS
from llava_ds.data.sample_index import numbers
from llava_ds.extensions.heads.head_records import PART


@dataclass(frozen=True)
class Group:
    """A query, its positive, and its negatives."""

    samples: tuple[LoadedSample, ...]


class Groups(EncodedDataset):
    """An encoded data set whose samples are groups of rows; its lengths and counts are sums over the group."""

    @classmethod
    def of(cls, plain: EncodedDataset) -> Self:
        """Make it from a data set of parts. A record's parts are left out together."""
        texts = plain.table.column(FIELDS).to_pylist()
        parts = np.array([json.loads(text)["embed"][PART] if text else [0, 0, 0] for text in texts], np.int64)
        is_there = np.zeros(len(parts), bool)
        is_there[plain.rows] = True
        sizes = np.maximum(parts[:, 0], 1)
        ends = np.arange(len(parts)) + sizes

        def is_whole(row: int) -> bool:
            own = slice(row, int(ends[row]))
            return int(ends[row]) <= len(parts) and bool(
                is_there[own].all() and (parts[own, 2] == parts[row, 2]).all() and not parts[own, 0][1:].any()
            )

        firsts = [i for i, row in enumerate(plain.rows.tolist()) if parts[row, 0] and is_whole(row)]
        made = plain.part("queries", lambda: np.array(firsts, np.int64))
        made.__class__ = cls
        made._plain, made._ends = copy.copy(plain), ends
        sums = (np.cumsum(numbers(plain.table, name), dtype=np.int64) for name in SUMMED)
        sums = [np.concatenate([[0], each]) for each in sums]
        made._sums = [each[np.minimum(ends, len(parts))] - each[:-1] for each in sums]
        made._left_out = int((parts[plain.rows, 0] > 0).sum()) - len(firsts)
        return made

    @property
    def lengths(self) -> np.ndarray:
        return self.sizes[0]

    @property
    def num_targets(self) -> np.ndarray:
        return self.sizes[1]

    @property
    def sizes(self) -> tuple[np.ndarray, ...]:
        return tuple(each[self.rows] for each in self._sums)

    def counts(self) -> list[str]:
        left = f"; {self._left_out:,} records are left out with a rejected part" if self._left_out else ""
        return [f"{len(self):,} queries; {self.num_records:,} parts of records, {self.num_rejected:,} rejected{left}"]

    def token_counts(self) -> list[str]:
        return [f"{int(self.lengths.sum()):,} tokens, {int(self.lengths.max()):,} at most for a query and its parts"]

    def _sample(self, index: int, load: Callable) -> Group | BrokenSample:
        first = int(self.rows[index])
        own = np.searchsorted(self._plain.rows, np.arange(first, self._ends[first])).tolist()
        found = [self._plain._sample(i, load) for i in own]
        return next((each for each in found if isinstance(each, BrokenSample)), None) or Group(tuple(found))


SUMMED = ("length", "num_targets", "num_tiles", "tile_pairs")
