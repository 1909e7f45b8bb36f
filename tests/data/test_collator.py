"""Samples laid end to end: nothing of one sample reaches into another."""

import dataclasses
import random

import pytest
import torch

from llava_ds.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX
from llava_ds.data.collator import LoadedSample, collate

SIZE = 4
P = 3  # features per picture


def sample(ids: list[int], labels: list[int] | None = None, pictures: int = 0, colour: int = 0) -> LoadedSample:
    """A sample; without labels every text position is supervised."""
    if labels is None:
        labels = [IGNORE_INDEX if token == IMAGE_TOKEN_INDEX else token for token in ids]
    pixels = [torch.full((3, SIZE, SIZE), colour + i, dtype=torch.uint8) for i in range(pictures)]
    return LoadedSample(torch.tensor(ids), torch.tensor(labels), pixels)


def random_samples(seed: int) -> list[LoadedSample]:
    rng = random.Random(seed)
    samples = []
    for i in range(rng.randint(1, 6)):
        pictures = rng.choice([0, 0, 1, 2])
        pieces = [[rng.randint(1, 99) for _ in range(rng.randint(1, 5))] for _ in range(pictures + 1)]
        ids = pieces[0] + [token for piece in pieces[1:] for token in [IMAGE_TOKEN_INDEX] * P + piece]
        labels = [IGNORE_INDEX if token < 0 or rng.random() < 0.5 else token for token in ids]
        cut = rng.randint(1, len(ids))  # model_max_length may cut anywhere, also inside a picture
        samples.append(sample(ids[:cut], labels[:cut], pictures, 10 * i))
    return samples


@pytest.mark.parametrize("seed", range(30))
def test_a_batch_is_its_samples_end_to_end(seed):
    samples = random_samples(seed)
    before = [(one.input_ids.clone(), one.labels.clone()) for one in samples]
    batch = collate(samples, SIZE, P)
    starts = batch.cu_seqlens.tolist()
    assert batch.cu_seqlens.dtype == torch.int32 and starts[0] == 0 and starts[-1] == batch.input_ids.shape[1]
    assert batch.max_seqlen == max(len(one.input_ids) for one in samples) and isinstance(batch.max_seqlen, int)
    targets = dict(zip(batch.target_positions.tolist(), batch.targets.tolist()))
    images = dict(zip(batch.image_positions.tolist(), batch.feature_index.tolist()))
    first_feature = 0
    for one, start, end in zip(samples, starts, starts[1:]):
        ids, labels = one.input_ids.tolist(), one.labels.tolist()
        assert end - start == len(ids)
        assert batch.position_ids[0, start:end].tolist() == list(range(len(ids)))
        assert batch.input_ids[0, start:end].tolist() == [max(token, 0) for token in ids]
        # What is expected at a position is the next token of the same sample, and only where that is supervised.
        expected = {start + i - 1: label for i, label in enumerate(labels) if i > 0 and label != IGNORE_INDEX}
        assert {at: targets[at] for at in targets if start <= at < end} == expected
        # Pictures fill their positions in reading order; a cut picture gives its first features.
        places = [start + i for i, token in enumerate(ids) if token == IMAGE_TOKEN_INDEX]
        assert [images[at] for at in places] == list(range(first_feature, first_feature + len(places)))
        first_feature += P * len(one.pixels)
    assert len(targets) == len(batch.targets) == len(batch.target_positions)
    assert len(images) == sum(int((one.input_ids == IMAGE_TOKEN_INDEX).sum()) for one in samples)
    shown = [picture for one in samples for picture in one.pixels]
    assert len(batch.pixel_values) == max(1, len(shown))
    assert all(torch.equal(a, b) for a, b in zip(batch.pixel_values, shown))
    for one, (ids, labels) in zip(samples, before):
        assert torch.equal(one.input_ids, ids) and torch.equal(one.labels, labels)


def test_a_sample_cut_inside_a_picture_does_not_shift_the_next_samples_features():
    cut = sample([1, *[IMAGE_TOKEN_INDEX] * (P - 1)], pictures=1)
    whole = sample([1, *[IMAGE_TOKEN_INDEX] * P, 5], pictures=1, colour=9)
    batch = collate([cut, whole], SIZE, P)
    assert batch.feature_index.tolist() == [0, 1, 3, 4, 5]
    assert batch.pixel_values[:, 0, 0, 0].tolist() == [0, 9]


def test_the_first_token_of_a_sample_is_no_target_of_the_one_before():
    batch = collate([sample([1, 2, 3]), sample([4, 5])], SIZE, P)
    assert batch.target_positions.tolist() == [0, 1, 3]
    assert batch.targets.tolist() == [2, 3, 5]


def test_text_only_samples_show_one_blank_picture_that_is_placed_nowhere():
    batch = collate([sample([1, 2]), sample([3])], SIZE, P)
    assert batch.pixel_values.shape == (1, 3, SIZE, SIZE) and batch.pixel_values.dtype == torch.uint8
    assert not batch.pixel_values.any()
    assert len(batch.image_positions) == len(batch.feature_index) == 0
    assert batch.feature_index.dtype == batch.image_positions.dtype == torch.int64


def test_an_empty_batch_is_one_token_that_counts_for_nothing():
    batch = collate([], SIZE, P)
    assert batch.input_ids.tolist() == [[0]] and batch.cu_seqlens.tolist() == [0, 1] and batch.max_seqlen == 1
    assert batch.position_ids.tolist() == [[0]]
    assert len(batch.targets) == len(batch.target_positions) == len(batch.image_positions) == 0
    assert batch.pixel_values.shape == (1, 3, SIZE, SIZE)
    full = collate(random_samples(1), SIZE, P)
    for field in dataclasses.fields(batch):
        one, other = getattr(batch, field.name), getattr(full, field.name)
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype and one.ndim == other.ndim, field.name


def test_a_batch_moves_as_a_whole():
    moved = collate(random_samples(2), SIZE, P).to(torch.device("meta"))
    for field in dataclasses.fields(moved):
        value = getattr(moved, field.name)
        assert value.device.type == "meta" if isinstance(value, torch.Tensor) else value == moved.max_seqlen
