"""Weights go to the lightest bin one after another, whatever of it is computed at once."""

import numpy as np
import pytest

from llava_ds.data import spreading
from llava_ds.data.spreading import spread


def lightest_first(row: list[int], num_bins: int, room: int | None) -> list[int]:
    """One weight after another, by the definition."""
    loads, numbers, taken = [0] * num_bins, [0] * num_bins, []
    for weight in row:
        has_room = [b for b in range(num_bins) if room is None or numbers[b] < room]
        lightest = min(has_room, key=lambda b: loads[b])
        loads[lightest] += weight
        numbers[lightest] += 1
        taken.append(lightest)
    return taken


def rows_of(size: int) -> np.ndarray:
    """Rows of like weights, of very different ones, of equal ones, of none, and below 0: heaviest first."""
    rng = np.random.default_rng(0)
    rows = [rng.lognormal(4, spread, size) for spread in (0.3, 1, 3) for _ in range(3)]
    rows += [
        np.full(size, 5),
        np.repeat([9000, 1], [min(5, size), max(0, size - 5)]),
        -rows[0],
        rng.integers(-9, 9, size),
    ]
    return np.array([-np.sort(-row.astype(np.int32)) for row in rows], np.int32)


@pytest.mark.parametrize("some", [slice(0, 6), slice(6, 7), slice(None)])
@pytest.mark.parametrize(
    ("num_bins", "room"), [(96, 3), (128, 6), (40, 40), (8, 16), (2, 64), (1, 7), (128, None), (3, None)]
)
def test_every_weight_goes_to_the_lightest_bin_with_room(num_bins, room, some, monkeypatch):
    one_by_one, left = spreading._one_by_one, []
    monkeypatch.setattr(
        spreading, "_one_by_one", lambda b, steps, r: left.append(len(steps)) or one_by_one(b, steps, r)
    )
    size = num_bins * (room or 7) - (room is None)
    rows = rows_of(size)[some]
    assert spread(rows, num_bins, room).tolist() == [lightest_first(row, num_bins, room) for row in rows.tolist()]
    assert num_bins < 96 or not left or min(left) <= size - num_bins  # the first go at once


@pytest.mark.parametrize("shape", [(0, 12), (3, 0), (1, 1), (2, 5)])
def test_bins_may_be_more_than_weights(shape):
    weights = np.arange(shape[0] * shape[1], 0, -1).reshape(shape)
    assert np.array_equal(spread(weights, 6), np.tile(np.arange(shape[1]), (shape[0], 1)))
