"""The cache's form of ids and labels holds all of them, in less space."""

import numpy as np
import pytest

from llava_ds.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX
from llava_ds.data.token_runs import WEIGHTS, from_columns, to_columns, weights_from_column, weights_to_column


def random_row(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Text and images in any order, also none, also at the ends; 0 and large ids; any tokens supervised."""
    parts = [np.empty(0, np.int32)]
    for _ in range(rng.integers(6)):
        length = rng.integers(1, 9)
        parts.append(np.full(length, IMAGE_TOKEN_INDEX) if rng.random() < 0.4 else rng.integers(3, size=length) * 10**6)
    ids = np.concatenate(parts).astype(np.int32)
    hidden = (ids == IMAGE_TOKEN_INDEX) | (rng.random(len(ids)) < 0.5)
    return ids, np.where(hidden, IGNORE_INDEX, ids).astype(np.int32)


@pytest.mark.parametrize("seed", range(5))
def test_what_comes_back_is_what_went_in(seed):
    rng = np.random.default_rng(seed)
    rows = [random_row(rng) for _ in range(200)]
    columns = to_columns([ids for ids, _ in rows], [labels for _, labels in rows])
    for i, row in enumerate(rows):
        found = from_columns(*(columns[name][i].values.to_numpy() for name in ("ids", "flips")))
        assert all(np.array_equal(a, b) and a.dtype == np.int64 for a, b in zip(found, row))


def test_an_image_takes_one_number_and_an_answer_two():
    ids = np.array([1, *[IMAGE_TOKEN_INDEX] * 576, 7, 8, 9, 2], np.int32)
    labels = np.where(np.arange(len(ids)) < 579, IGNORE_INDEX, ids).astype(np.int32)
    nothing = np.empty(0, np.int32)
    columns = to_columns([nothing, ids, nothing, ids], [nothing, labels, nothing, labels])
    assert columns["ids"].to_pylist() == [[], [1, -576, 7, 8, 9, 2]] * 2
    assert columns["flips"].to_pylist() == [[], [579]] * 2  # to the end


def test_images_in_a_row_are_one_but_not_across_samples():
    image = np.full(4, IMAGE_TOKEN_INDEX, np.int32)
    nothing = np.full(4, IGNORE_INDEX, np.int32)
    assert to_columns([image, image], [nothing, nothing])["ids"].to_pylist() == [[-4], [-4]]
    assert to_columns([image[:0]], [nothing[:0]])["ids"].to_pylist() == [[]]


@pytest.mark.parametrize("seed", range(3))
def test_weights_come_back_at_supervised_tokens(seed):
    rng = np.random.default_rng(seed)
    labels = [row[1] for row in (random_row(rng) for _ in range(100))]
    weights = [rng.choice([0.25, 0.5, 1, 3], len(row)).astype(np.float32) for row in labels]
    weights = [None if rng.random() < 0.3 else row for row in weights]
    column = weights_to_column(weights, labels)
    assert column.type == WEIGHTS[1]
    for runs, given, row in zip(column, weights, labels, strict=True):
        found = weights_from_column(runs.as_py(), row)
        wanted = np.where(row == IGNORE_INDEX, 1, 1 if given is None else given)
        assert (found is None) == (wanted == 1).all()
        assert found is None or (np.array_equal(found, wanted) and found.dtype == np.float32)


def test_turns_of_one_weight_take_one_run_and_data_without_weights_none():
    labels = np.array([IGNORE_INDEX, 5, 6, IGNORE_INDEX, 7, 8, 9], np.int32)
    weights = np.array([1, 0.5, 0.5, 1, 0.5, 2, 2], np.float32)
    column = weights_to_column([None, weights], [labels, labels])
    assert column.to_pylist() == [None, [{"tokens": 3, "weight": 0.5}, {"tokens": 2, "weight": 2.0}]]
    plain = weights_to_column([None] * 1000, [labels] * 1000)
    assert plain.type == WEIGHTS[1] and plain.null_count == 1000 and len(plain.values) == 0
