"""Micro-batches of ranks with the same samples; tests of axes on ranks have the rest."""

import torch
from random_samples import SQUARE, sample

from llava_ds.data.collate import collate
from llava_ds.data.shared_loader import without


def test_a_sample_that_is_left_out_keeps_its_tokens_and_loses_its_targets():
    whole = collate([sample([1, 2, 3]), sample([4, 5, 6, 7]), sample([8, 9])], SQUARE)
    rest = without(whole, {1})
    assert torch.equal(rest.input_ids, whole.input_ids)
    kept = whole.target_samples != 1
    assert 0 < kept.sum() < len(kept)
    assert torch.equal(rest.targets, whole.targets[kept])
    assert torch.equal(rest.target_positions, whole.target_positions[kept])
