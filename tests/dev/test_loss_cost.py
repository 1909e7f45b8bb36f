"""Both ways compute the same loss, and the peak counts the bytes that exist at a time."""

import torch
from benchmark.loss_cost import PeakBytes, measure_output_loss


def test_both_ways_compute_the_same_and_ours_takes_less_memory():
    result = measure_output_loss(96, 8, 5000, repeats=1)
    assert result["num_supervised"] == 16
    assert result["loss_difference"] < 1e-6 and result["gradient_difference"] < 1e-5
    logits, weights = 4 * 5000 * 96, 4 * 5000 * 8
    assert result["peak_bytes"]["full"] > 3 * logits  # logits, their logarithms, and the gradient
    assert result["peak_bytes"]["ours"] < logits / 3 + 2 * weights
    assert result["times_less_memory"] > 6 and result["times_faster"] > 0


def test_the_peak_counts_what_lives_at_a_time():
    with PeakBytes() as found:
        for _ in range(3):
            x = torch.ones(1000)
            y = x + 1
            y.add_(1)
            y.view(10, 100)
            del x, y
    assert found.peak == 8000
