"""Samples laid end to end: nothing of one sample reaches into another."""

import dataclasses

import pytest
import torch
from random_samples import ALL, SIZE, SQUARE, P, random_samples, sample

from llava_ds.batch import Batch
from llava_ds.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX
from llava_ds.data.collate import collate
from llava_ds.geometry import media_layout


@pytest.mark.parametrize("options", ALL)
@pytest.mark.parametrize("seed", range(15))
def test_a_batch_is_its_samples_end_to_end(seed, options):
    samples = random_samples(seed, options)
    before = [(one.input_ids.clone(), one.labels.clone()) for one in samples]
    batch = collate(samples, options)
    starts = batch.cu_seqlens.tolist()
    assert batch.cu_seqlens.dtype == torch.int32 and starts[0] == 0 and starts[-1] == batch.input_ids.shape[1]
    assert batch.max_seqlen == max(len(one.input_ids) for one in samples) and isinstance(batch.max_seqlen, int)
    targets = dict(zip(batch.target_positions.tolist(), batch.targets.tolist()))
    sample_of = dict(zip(batch.target_positions.tolist(), batch.target_samples.tolist()))
    for number, (one, start, end) in enumerate(zip(samples, starts, starts[1:])):
        ids, labels = one.input_ids.tolist(), one.labels.tolist()
        assert end - start == len(ids)
        assert batch.position_ids[0, start:end].tolist() == list(range(len(ids)))
        assert batch.input_ids[0, start:end].tolist() == [max(token, 0) for token in ids]
        # What is expected at a position is the next token of the same sample, and only where that is supervised.
        expected = {start + i - 1: label for i, label in enumerate(labels) if i > 0 and label != IGNORE_INDEX}
        assert {at: targets[at] for at in targets if start <= at < end} == expected
        assert {sample_of[at] for at in expected} <= {number}
    assert len(targets) == len(batch.targets) == len(batch.target_positions)
    shown = [tile for one in samples for tiles, _ in one.media for tile in tiles]
    assert len(batch.pixel_values) == max(1, len(shown))
    assert all(torch.equal(a, b) for a, b in zip(batch.pixel_values, shown))
    for one, (ids, labels) in zip(samples, before):
        assert torch.equal(one.input_ids, ids) and torch.equal(one.labels, labels)


@pytest.mark.parametrize("options", ALL)
@pytest.mark.parametrize("seed", range(15))
def test_every_image_position_gets_what_its_own_layout_says(seed, options):
    samples = random_samples(seed, options)
    batch = collate(samples, options)

    # A feature is told by its number in the batch, a pooled one by its sources and weights, a newline by its name.
    def told(index, weight):
        return tuple(sorted((i, w) for i, w in zip(index.tolist(), weight.tolist()) if w))

    features = len(batch.pixel_values) * P
    table = [*range(features), *(told(i, w) for i, w in zip(batch.placing.pool_index, batch.placing.pool_weight))]
    found = [table[row] for row in batch.placing.features.tolist()]
    found += ["newline"] * (len(batch.placing.positions) - len(found))
    found = dict(zip(batch.placing.positions.tolist(), found))
    start = first = 0
    for one in samples:
        expected = []
        for tiles, layout in one.media:
            own = len(tiles) * P
            pooled = [told(i + first, w) for i, w in zip(layout.pool_index, layout.pool_weight)]
            names = [*range(first, first + own), "newline", *pooled]
            expected += [names[row] for row in layout.rows]
            first += own
        places = [start + i for i, token in enumerate(one.input_ids.tolist()) if token == IMAGE_TOKEN_INDEX]
        # Pictures fill their positions in reading order; a cut picture gives its first features.
        assert [found.pop(at) for at in places] == expected[: len(places)]
        start += len(one.input_ids)
    assert not found


def lookup(batch: Batch, features: torch.Tensor) -> torch.Tensor:
    """(T,): what stands at every position, for features (N * P,), with -1 for newlines and -2 for text."""
    pooled = (features[batch.placing.pool_index] * batch.placing.pool_weight).sum(1)
    table = torch.cat([features, pooled])
    found = torch.full((batch.input_ids.shape[1],), -2.0)
    found[batch.placing.positions] = -1.0
    found[batch.placing.positions[: len(batch.placing.features)]] = table[batch.placing.features]
    return found


@pytest.mark.parametrize("options", ALL)
@pytest.mark.parametrize("seed", range(8))
def test_samples_that_share_images_use_the_same_tiles(seed, options):
    """Two answers to one question: the tiles are there once, and every position finds what a copy would give it."""
    chosen = random_samples(seed, options)
    shared = [each for one in chosen for each in (one, dataclasses.replace(one, labels=one.labels.clone()))]
    copies = [
        dataclasses.replace(one, media=[(tiles.clone(), layout) for tiles, layout in one.media]) for one in shared
    ]
    once, twice = collate(shared, options), collate(copies, options)
    tiles = [tiles for one in chosen for tiles, _ in one.media]
    assert len(once.pixel_values) == max(1, sum(map(len, tiles)))
    assert len(twice.pixel_values) == max(1, 2 * sum(map(len, tiles)))
    # A feature that depends on its tile's pixels and its place in the tile, as the tower's do.
    feature = [(b.pixel_values[:, 0, 0, :1].float() * P + torch.arange(P)).flatten() for b in (once, twice)]
    assert torch.equal(lookup(once, feature[0]), lookup(twice, feature[1]))
    for name in ("input_ids", "target_positions", "targets", "target_samples", "sources", "cu_seqlens"):
        assert torch.equal(getattr(once, name), getattr(twice, name)), name


def test_a_sample_cut_inside_an_image_does_not_shift_the_next_samples_features():
    layout = media_layout("image", ((4, 4),), 1, SQUARE)
    cut = sample([1, *[IMAGE_TOKEN_INDEX] * (P - 1)], layouts=[layout])
    whole = sample([1, *[IMAGE_TOKEN_INDEX] * P, 5], layouts=[layout], colour=9)
    batch = collate([cut, whole], SQUARE)
    assert batch.placing.features.tolist() == [0, 1, 2, 4, 5, 6, 7]
    assert batch.pixel_values[:, 0, 0, 0].tolist() == [0, 9]


def test_the_first_token_of_a_sample_is_no_target_of_the_one_before():
    batch = collate([sample([1, 2, 3]), sample([4, 5])], SQUARE)
    assert batch.target_positions.tolist() == [0, 1, 3]
    assert batch.targets.tolist() == [2, 3, 5]


def test_text_only_samples_show_one_blank_image_that_is_placed_nowhere():
    batch = collate([sample([1, 2]), sample([3])], SQUARE)
    assert batch.pixel_values.shape == (1, 3, SIZE, SIZE) and batch.pixel_values.dtype == torch.uint8
    assert not batch.pixel_values.any()
    assert len(batch.placing.positions) == len(batch.placing.features) == 0
    assert batch.placing.features.dtype == batch.placing.positions.dtype == torch.int64


@pytest.mark.parametrize("options", ALL)
def test_an_empty_batch_is_one_token_that_counts_for_nothing(options):
    batch = collate([], options)
    assert batch.input_ids.tolist() == [[0]] and batch.cu_seqlens.tolist() == [0, 1] and batch.max_seqlen == 1
    assert batch.position_ids.tolist() == [[0]]
    assert len(batch.targets) == len(batch.target_positions) == len(batch.placing.positions) == 0
    assert batch.pixel_values.shape == (1, 3, SIZE, SIZE)
    full = collate(random_samples(1, options), options)
    for field in dataclasses.fields(batch):
        one, other = getattr(batch, field.name), getattr(full, field.name)
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype and one.ndim == other.ndim, field.name


def test_a_batch_moves_as_a_whole():
    moved = collate(random_samples(2), SQUARE).to(torch.device("meta"))
    for field in dataclasses.fields(moved):
        value = getattr(moved, field.name)
        assert not isinstance(value, torch.Tensor) or value.device.type == "meta"
