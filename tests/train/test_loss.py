"""The factors of the micro-batches' losses add up to the mean that was asked for, whatever the ranks really have."""

from types import SimpleNamespace

import pytest
import torch

from llava_ds.train.objectives.sft import SFT


def windows(targets: list[list[int]]):
    """A window per rank with micro-batches of so many supervised tokens, and the counts of all."""
    every = [[SimpleNamespace(num_targets=n) for n in rank] for rank in targets]
    flat = [n for rank in targets for n in rank]
    counts = torch.tensor([len(flat), 100, sum(flat), sum(n > 0 for n in flat), 900, 3], dtype=torch.float64)
    return [SimpleNamespace(micro_batches=micros) for micros in every], counts


@pytest.mark.parametrize("targets", [[[10, 5]], [[10, 5], [3, 2]], [[10, 0], [3, 2]], [[10, 0], [0, 0]]])
@pytest.mark.parametrize("reduction", ["token", "micro_batch"])
def test_the_gradient_is_the_mean_over_all_ranks(targets, reduction):
    """Every token's loss is 1, so the mean is; DeepSpeed divides by the ranks. A micro-batch without any counts not."""
    made, counts = windows(targets)
    total = 0.0
    for window, own in zip(made, targets):
        scales = SFT(reduction, grad_ranks=len(targets)).scales(window, counts)
        assert all(scale.dtype == torch.float64 and scale.ndim == 0 for scale in scales)
        total += sum(n * scale.item() for n, scale in zip(own, scales)) / len(targets)
    assert total == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("reduction", ["token", "micro_batch"])
def test_a_step_without_any_token_is_finite(reduction):
    made, counts = windows([[0, 0], [0]])
    scales = [scale for window in made for scale in SFT(reduction, grad_ranks=2).scales(window, counts)]
    assert torch.isfinite(torch.stack(scales)).all()
