# R rows, W weights of a row, B bins
"""Distribute weights over bins greedily, vectorized."""

import heapq

import numpy as np

_CLOSED = 1 << 62  # greater than any bin with room
_FEW, _FEW_OF_BINS = 64, 1 / 16  # minimum number of weights placed at once; below it, placing one by one is faster


def spread(weights: np.ndarray, num_bins: int, room: int | None = None) -> np.ndarray:
    """Assign each weight to the lightest bin with room, the first of equally light bins.

    weights (R, W) int, heaviest first, rows independent; room: maximum number of weights per bin (None: unlimited),
    with num_bins * room >= W. Returns bin indices (R, W) int64. As many weights as possible are placed at once, each
    into the next bin by load, up to a bin that is heavier than one just filled. This takes 0.03 to 0.1 us per weight.
    When few can be placed at once, the remaining weights are placed one by one, at 0.3 us each.
    """
    num_rows, size = weights.shape
    # Each bin is one number, quick to compare, made of its total weight, its index and its number of weights.
    bits = 0 if room is None else room.bit_length()
    steps = np.zeros((num_rows, size + num_bins), np.int64)  # added for each weight
    steps[:, :size] = weights
    steps[:, :size] = steps[:, :size] * (num_bins << bits) + (room is not None)
    bins = np.tile(np.arange(num_bins, dtype=np.int64) << bits, (num_rows, 1))
    taken = np.empty_like(steps)
    rows, done = np.arange(num_rows), np.zeros(num_rows, np.int64)
    while len(rows):
        places = (rows * steps.shape[1] + done)[:, None] + np.arange(num_bins)
        filled = bins + steps.reshape(-1)[places]
        if room is not None:
            filled[filled & ((1 << bits) - 1) == room] = _CLOSED
        fits = np.ones(bins.shape, bool)
        np.less(bins[:, 1:], np.minimum.accumulate(filled, axis=1)[:, :-1], out=fits[:, 1:])
        taken.reshape(-1)[places[fits]] = bins[fits]
        done += fits.sum(1)
        bins = np.where(fits, filled, bins)
        if fits.sum() < _FEW + _FEW_OF_BINS * fits.size:
            for row, first, own in zip(rows, done.tolist(), bins):
                taken[row, first:size] = _one_by_one(own, steps[row, first:size], room)
            break
        left = done < size
        rows, done, bins = rows[left], done[left], np.sort(bins[left], axis=1)
    return (taken[:, :size] >> bits) % num_bins


def _one_by_one(bins: np.ndarray, steps: np.ndarray, room: int | None) -> list[int]:
    """Assign weights one by one. bins, steps: encoded as in spread."""
    heap, taken = np.sort(bins[bins < _CLOSED]).tolist(), []
    mask, full = (0, 1) if room is None else ((1 << room.bit_length()) - 1, room)
    for step in steps.tolist():
        lightest = heap[0]
        taken.append(lightest)
        if (lightest + step) & mask == full:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, lightest + step)
    return taken
