"""The embeddings extension: data sets grouped by query, and the objective."""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
from transformers import PreTrainedTokenizerBase

from llava_ds.config.arguments import Arguments
from llava_ds.constants import DataError
from llava_ds.data.collate import LoadedSample
from llava_ds.data.dataset import BrokenSample, EncodedDataset, open_together
from llava_ds.data.encoded_rows import FIELDS
from llava_ds.data.sample_index import numbers
from llava_ds.extensions.base import EvalMeasure, Extension
from llava_ds.extensions.embed.embed import Embedding, Recall
from llava_ds.extensions.embed.part_records import PART
from llava_ds.geometry import ImageOptions
from llava_ds.model.open.last_states import FrozenOutputLayer
from llava_ds.runtime.mesh import Mesh
from llava_ds.runtime.ranks import Ranks, print_first
from llava_ds.train.objectives.objective import Objective
from llava_ds.train.plan import Plan

SUMMED = ("length", "num_targets", "num_tiles", "tile_pairs")


@dataclass(frozen=True)
class Group:
    """A query, its positive, and its negatives."""

    samples: tuple[LoadedSample, ...]


class Groups(EncodedDataset):
    """An encoded data set in which a sample is a group of rows. Lengths and counts are sums over the group."""

    @classmethod
    def of(cls, plain: EncodedDataset) -> Self:
        """Group a data set of parts. If one part of a record is missing, the whole record is left out."""
        texts = plain.table.column(FIELDS).to_pylist()
        parts = np.array([json.loads(text)["embed"][PART] if text else [0, 0, 0] for text in texts], np.int64)
        is_there = np.zeros(len(parts), bool)
        is_there[plain.rows] = True
        ends = np.arange(len(parts)) + np.maximum(parts[:, 0], 1)

        def is_whole(row: int) -> bool:
            own = slice(row, int(ends[row]))
            return int(ends[row]) <= len(parts) and bool(
                is_there[own].all() and (parts[own, 2] == parts[row, 2]).all() and not parts[own, 0][1:].any()
            )

        firsts = [i for i, row in enumerate(plain.rows.tolist()) if parts[row, 0] and is_whole(row)]
        made = plain.part("queries", lambda: np.array(firsts, np.int64))
        made.__class__ = cls
        made._plain, made._ends = copy.copy(plain), ends
        sums = [np.cumsum(np.append(0, numbers(plain.table, name)), dtype=np.int64) for name in SUMMED]
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


def open_groups(
    args: Arguments, tokenizer: PreTrainedTokenizerBase, image_options: ImageOptions, ranks: Ranks
) -> Groups:
    """Open the training data, grouped by query."""
    return Groups.of(open_together(args, tokenizer, image_options, ranks))


def check_data(plan: Plan, ranks: Ranks) -> EvalMeasure | None:
    """Group the held-out data by query. Collective."""
    for dataset in plan.data_sets:
        if not isinstance(dataset, Groups):  # from --eval_data_path
            dataset.__class__, dataset.__dict__ = Groups, vars(Groups.of(dataset))
        if not len(dataset):
            raise DataError("no record has all of its parts: run/inspect_data.py shows why they were rejected")
    print_first(
        f"a query is compared with the positives and negatives of one micro-batch on {plan.steps.packing.dp} ranks: "
        f"about {plan.steps.batch_size / plan.steps.packing.num_micro_batches:.3g} records; "
        "equal positives are left out of the negatives"
    )
    return None if plan.evals.eval_set is None else EvalMeasure(Recall(ranks), ("recall@1", "recall@5"))


def objective(plan: Plan, mesh: Mesh, plain: Objective) -> Embedding:
    """Return the embedding objective, as a replacement for `plain`."""
    measure = plan.own["embed"]
    return Embedding(
        plain.num_sources,
        mesh.grad_ranks,
        temperature=plan.args.own["embed"].embed_temperature,
        group=mesh.data_group,
        recall=None if measure is None else measure.create,
    )


extension = Extension(open_data=open_groups, complete=check_data, objective=objective, part=FrozenOutputLayer)
