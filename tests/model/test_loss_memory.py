"""The output layer's own loss equals cross-entropy over the logits of all tokens, in a fraction of the memory."""

import torch
import torch.nn.functional as F
from peak_bytes import PeakBytes

from llava_ds.constants import IGNORE_INDEX
from llava_ds.model.output_loss import add_loss

TOKENS, HIDDEN, VOCABULARY = 96, 8, 5000


def test_the_loss_is_the_same_and_takes_less_memory():
    torch.manual_seed(0)
    layer = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False)
    hidden = torch.randn(TOKENS, HIDDEN)
    positions = torch.randperm(TOKENS)[:16].sort().values
    labels = torch.full((TOKENS,), IGNORE_INDEX)
    labels[positions] = targets = torch.randint(VOCABULARY, positions.shape)
    add_loss(layer)

    def step(loss_of) -> tuple[float, torch.Tensor, int]:
        layer.weight.grad = None
        states = hidden.clone().requires_grad_()
        with PeakBytes() as found:
            loss = loss_of(states)
            loss.backward()
        return loss.item(), states.grad, found.peak

    ways = (
        lambda states: layer(states.index_select(0, positions), targets=targets)[0],
        lambda states: F.cross_entropy(layer(states), labels, ignore_index=IGNORE_INDEX, reduction="sum"),
    )
    [step(way) for way in ways]  # the first backward allocates more
    (loss, gradient, peak), (full, full_gradient, full_peak) = (step(way) for way in ways)
    assert abs(loss - full) / full < 1e-6
    assert (gradient - full_gradient).abs().max() / full_gradient.abs().max() < 1e-5
    logits, weights = 4 * VOCABULARY * TOKENS, 4 * VOCABULARY * HIDDEN
    assert full_peak > 3 * logits  # logits, their logarithms, and the gradient
    assert peak < logits / 3 + 2 * weights and full_peak / peak > 6


def test_the_peak_counts_what_lives_at_a_time():
    with PeakBytes() as found:
        for _ in range(3):
            x = torch.ones(1000)
            y = x + 1
            y.add_(1)
            y.view(10, 100)
            del x, y
    assert found.peak == 8000
