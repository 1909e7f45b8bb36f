"""The loss of a reward model over pairs is the published one, token by token too, and a rank may have no pairs."""

import math
from types import SimpleNamespace

import pytest
import torch

from llava_ds.extensions.preference.reward import Reward, RewardLoss

# Supervised tokens of two pairs; the answers of the first begin alike, the last two are equal.
ANSWERS = [[5, 6, 7, 2], [5, 6, 2], [9, 2], [9, 2]]
LENGTHS = [7, 6, 4, 4]  # of the samples, the prompt included


def made(margins: torch.Tensor | None = None) -> SimpleNamespace:
    starts = [sum(LENGTHS[:i]) for i in range(5)]
    places = [starts[i] + LENGTHS[i] - len(own) - 1 + k for i, own in enumerate(ANSWERS) for k in range(len(own))]
    return SimpleNamespace(
        cu_seqlens=torch.tensor(starts),
        target_positions=torch.tensor(places),
        target_tokens=torch.tensor(places) + 1,
        targets=torch.tensor([token for own in ANSWERS for token in own]),
        target_samples=torch.arange(4).repeat_interleave(torch.tensor([len(own) for own in ANSWERS])),
        sources=torch.tensor([0, 0, 1, 1]),
        extra={} if margins is None else {"margin": margins},
    )


NUMBERS = torch.randn(21, generator=torch.Generator().manual_seed(0))  # of every position


def run(loss: RewardLoss, batch: SimpleNamespace):
    rows = NUMBERS.clone().requires_grad_()
    return Reward(loss, 2, 1).forward(lambda _, head: rows[head.at], batch), rows


def cost(gap: float) -> float:
    return math.log1p(math.exp(-gap))


def test_the_score_is_taken_at_the_answers_last_token():
    found, rows = run(RewardLoss(0.1), made(torch.tensor([0.5, 0.0, 0.0, 0.0], dtype=torch.float64)))
    a, b, c, d = (NUMBERS[i].item() for i in (6, 12, 16, 20))  # the last of each sample
    wanted = [cost(a - b - 0.5) + 0.1 * (a + b) ** 2, cost(c - d) + 0.1 * (c + d) ** 2]
    assert found.by_source[0].tolist() == pytest.approx(wanted, rel=1e-6)
    assert found.by_source[1].tolist() == [1.0, 1.0]
    assert found.loss_sum.item() == pytest.approx(sum(wanted), rel=1e-6)
    metrics = {name: value.item() for name, value in found.metrics.items()}
    assert metrics["rewards/accuracies"] == (a > b) + (c > d)
    assert metrics["rewards/margins"] == pytest.approx(a - b + c - d, rel=1e-6)
    assert metrics["min_reward"] == pytest.approx(2 * min(a, b, c, d), rel=1e-6)
    assert metrics["mean_reward"] == pytest.approx((a + b + c + d) / 2, rel=1e-6)
    found.loss_sum.backward()
    assert rows.grad.nonzero()[:, 0].tolist() == [6, 12, 16, 20]


def test_tokens_are_compared_from_the_first_that_differs_on():
    found, _ = run(RewardLoss(reward_loss="tokens"), made())
    chosen, rejected = NUMBERS[3:7].tolist(), NUMBERS[10:13].tolist()
    third, fourth = cost(chosen[2] - rejected[2]), cost(chosen[3] - rejected[2])  # behind its end it stays
    equal = cost(NUMBERS[16].item() - NUMBERS[20].item())  # of equal answers the last
    assert found.by_source[0].tolist() == pytest.approx([(third + fourth) / 2, equal], rel=1e-6)


@pytest.mark.parametrize("kind", ["last", "tokens"])
def test_a_rank_without_pairs_takes_part_with_gradients_of_zero(kind):
    none = torch.zeros(0, dtype=torch.int64)
    batch = SimpleNamespace(
        cu_seqlens=torch.tensor([0, 1]),
        target_positions=none,
        target_tokens=none,
        targets=none,
        target_samples=none,
        sources=torch.zeros(1, dtype=torch.int64),
        extra={},
    )
    found, rows = run(RewardLoss(reward_loss=kind), batch)
    found.loss_sum.backward()
    assert found.loss_sum.item() == 0 and rows.grad is not None and not rows.grad.any()
    assert not any(value.item() for value in found.metrics.values())
