"""Compact ids and labels for the cache: image features as counts, supervised tokens as start and end positions.

An image takes hundreds of positions with the same id, and a label is either the token's id or IGNORE_INDEX.
"""

import numpy as np
import pyarrow as pa

from llava_ds.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX

# ids: text ids, and -n for n consecutive image features. flips: positions (features included) at which supervision
# starts and ends.
COLUMNS = [("ids", pa.list_(pa.int32())), ("flips", pa.list_(pa.int32()))]

# Runs of supervised tokens with equal loss weights; null if all weights are 1.
WEIGHTS = ("weights", pa.list_(pa.struct([("tokens", pa.int32()), ("weight", pa.float32())])))


def to_columns(ids: list[np.ndarray], labels: list[np.ndarray]) -> dict[str, pa.Array]:
    """Build the Arrow columns of COLUMNS, one row per sample of int32 ids and labels."""
    lengths = np.array([len(row) for row in ids])
    ends = np.cumsum(lengths)
    starts = (ends - lengths)[lengths > 0]
    flat, targets = np.concatenate(ids, dtype=np.int32), np.concatenate(labels, dtype=np.int32)
    is_image, supervised = flat == IMAGE_TOKEN_INDEX, targets != IGNORE_INDEX
    assert np.array_equal(flat[supervised], targets[supervised]), "a label differs from its token's id"
    begins = is_image & _changes(is_image, starts)
    kept = ~is_image | begins
    text = flat[kept]
    text[is_image[kept]] = -np.bincount(np.cumsum(begins)[is_image] - 1)
    flips = _changes(supervised, starts)
    places = np.arange(len(flat)) - np.repeat(ends - lengths, lengths)
    values = ((text, kept), (places[flips], flips))
    return {name: _lists(value, of, ends) for (name, _), (value, of) in zip(COLUMNS, values)}


def from_columns(ids: np.ndarray, flips: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Restore the ids and labels (L,) int64 of a row."""
    ids = ids.astype(np.int64)
    ids = np.repeat(np.where(ids < 0, IMAGE_TOKEN_INDEX, ids), np.where(ids < 0, -ids, 1))
    turns = np.zeros(len(ids), bool)
    turns[flips] = True
    return ids, np.where(np.logical_xor.accumulate(turns), ids, IGNORE_INDEX)


def weights_to_column(weights: list[np.ndarray | None], labels: list[np.ndarray]) -> pa.Array:
    """Build the column WEIGHTS, one row per sample of labels (L,) and of weights (L,) float32 or None."""
    if not any(row is not None for row in weights):
        return pa.nulls(len(weights), WEIGHTS[1])
    return pa.array([_runs(*row) for row in zip(weights, labels)], WEIGHTS[1])


def weights_from_column(runs: list[dict[str, float]] | None, labels: np.ndarray) -> np.ndarray | None:
    """Restore the weights (L,) float32 of a row with these labels, 1 at unsupervised tokens; None without runs."""
    if runs is None:
        return None
    weights = np.ones(len(labels), np.float32)
    weights[labels != IGNORE_INDEX] = np.repeat(
        np.array([run["weight"] for run in runs], np.float32), [run["tokens"] for run in runs]
    )
    return weights


def _runs(weights: np.ndarray | None, labels: np.ndarray) -> list[dict[str, float]] | None:
    values = None if weights is None else weights[labels != IGNORE_INDEX]
    if values is None or (values == 1).all():  # tokens of other weights may have been truncated
        return None
    starts = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))
    return [
        {"tokens": tokens, "weight": weight}
        for tokens, weight in zip(np.diff(starts, append=len(values)).tolist(), values[starts].tolist())
    ]


def _changes(flags: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return True for each flag that differs from the previous one. The flag before a row's start counts as False."""
    before = np.concatenate([[False], flags[:-1]])[: len(flags)]
    before[starts] = False
    return flags != before


def _lists(values: np.ndarray, of: np.ndarray, ends: np.ndarray) -> pa.Array:
    """Split values into one list per row, without converting to Python numbers. of: (tokens,) bool, True at the tokens
    that have a value."""
    offsets = np.concatenate([[0], np.concatenate([[0], np.cumsum(of)])[ends]]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values.astype(np.int32)))
