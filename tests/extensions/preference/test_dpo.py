"""The losses of pairs are the published ones, and a micro-batch's are those of its samples."""

import math
from types import SimpleNamespace

import pytest
import torch

from llava_ds.extensions.preference.dpo import DPO, PairLoss, log_odds, sum_by_sample

LOG_PROBS = torch.tensor([[-4.0, -6.0], [-9.0, -3.0]], dtype=torch.float64)
REFERENCE = torch.tensor([[-5.0, -5.5], [-8.0, -4.0]], dtype=torch.float64)
LENGTHS = torch.tensor([[2.0, 4.0], [3.0, 1.0]], dtype=torch.float64)


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def by_hand(kind: str, pair: int, beta: float, smoothing: float, alpha: float, gamma: float) -> float:
    (chosen, rejected), (old_chosen, old_rejected) = LOG_PROBS[pair].tolist(), REFERENCE[pair].tolist()
    long_chosen, long_rejected = LENGTHS[pair].tolist()
    delta = (chosen - old_chosen) - (rejected - old_rejected)
    own = (1.0 if kind == "orpo" else alpha) * chosen / long_chosen
    if kind == "orpo":
        p, q = math.exp(chosen / long_chosen), math.exp(rejected / long_rejected)
        return -beta * log_sigmoid(math.log(p / (1 - p) / (q / (1 - q)))) - own
    if kind == "hinge":
        return max(0.0, 1 - beta * delta) - own
    if kind == "ipo":
        mean = (chosen - old_chosen) / long_chosen - (rejected - old_rejected) / long_rejected
        return (mean - 1 / (2 * beta)) ** 2 - own
    margin = beta * (chosen - rejected if kind == "cpo" else delta)
    if kind == "simpo":
        margin = beta * (chosen / long_chosen - rejected / long_rejected) - gamma
    return -(1 - smoothing) * log_sigmoid(margin) - smoothing * log_sigmoid(-margin) - own


@pytest.mark.parametrize("alpha", [0.0, 0.7])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("kind", ["sigmoid", "hinge", "ipo", "simpo", "cpo", "orpo"])
def test_the_loss_of_a_pair(kind, smoothing, alpha):
    own = {"cpo_alpha" if kind == "cpo" else "rpo_alpha": alpha}
    loss = PairLoss(kind, beta=0.3, label_smoothing=smoothing, simpo_gamma=0.4, **own)
    found = loss(LOG_PROBS, REFERENCE, LENGTHS).tolist()
    wanted = [by_hand(kind, pair, 0.3, 0.0 if kind in ("hinge", "ipo") else smoothing, alpha, 0.4) for pair in (0, 1)]
    assert found == pytest.approx(wanted, rel=1e-12)


def test_odds_of_certain_and_of_missing_answers_are_finite():
    """A mean of zero is an answer that the model is sure of, or one without tokens on a rank that lacks its image."""
    logs = torch.tensor([0.0, -1e-9, -1e-3, -50.0], dtype=torch.float64, requires_grad=True)
    odds = log_odds(logs)
    odds.sum().backward()
    assert odds[:2].tolist() == pytest.approx([math.log(2**23)] * 2, rel=1e-6)
    assert odds[2:].tolist() == pytest.approx([math.log(1 / math.expm1(1e-3)), -50.0], rel=1e-12)
    assert logs.grad.isfinite().all()


def batch(reference: torch.Tensor | None, samples: int) -> SimpleNamespace:
    """Samples of 1, 2, 3 ... supervised positions, from two sources in turn."""
    return SimpleNamespace(
        cu_seqlens=torch.zeros(samples + 1),
        target_samples=torch.arange(samples).repeat_interleave(torch.arange(1, samples + 1)),
        sources=torch.arange(samples) // 2 % 2,
        extra={} if reference is None else {"reference": reference},
    )


def test_a_micro_batch_gives_the_sum_over_its_pairs_and_trls_metrics():
    made = batch(torch.tensor([-3.0, -4.0, -2.0, -5.0], dtype=torch.float64), 4)
    rows = torch.linspace(-2, -0.1, 10, dtype=torch.float64).requires_grad_()
    sums = torch.stack([part.sum() for part in rows.split([1, 2, 3, 4])]).view(2, 2)
    loss = PairLoss(beta=0.5)
    wanted = loss(sums, made.extra["reference"].view(2, 2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    found = DPO(loss, 2, 1).forward(lambda _, head: rows, made)
    assert found.loss_sum.item() == pytest.approx(wanted.sum().item(), rel=1e-12)
    assert found.by_source[0].tolist() == pytest.approx(wanted.tolist(), rel=1e-12)
    assert found.by_source[1].tolist() == [1.0, 1.0]
    rewards = 0.5 * (sums - made.extra["reference"].view(2, 2))
    assert found.metrics["rewards/chosen"].item() == pytest.approx(rewards[:, 0].sum().item(), rel=1e-12)
    assert found.metrics["rewards/accuracies"].item() == (rewards[:, 0] > rewards[:, 1]).sum().item()
    assert found.metrics["logps/rejected"].item() == pytest.approx(sums[:, 1].sum().item(), rel=1e-12)
    assert not any(value.requires_grad for value in found.metrics.values())


def test_a_rank_without_pairs_takes_part_with_gradients_of_zero():
    rows = torch.zeros(0, dtype=torch.float64, requires_grad=True)
    made = batch(torch.zeros(0, dtype=torch.float64), 1)
    made.target_samples = torch.zeros(0, dtype=torch.int64)
    found = DPO(PairLoss(), 1, 2).forward(lambda _, head: rows, made)
    found.loss_sum.backward()
    assert found.loss_sum.item() == 0 and found.by_source.tolist() == [[0.0], [0.0]]
    assert rows.grad is not None


def test_the_step_is_the_mean_over_all_pairs():
    window = SimpleNamespace(micro_batches=[1, 2, 3])
    counts = torch.tensor([8, 100, 30, 3, 900, 3], dtype=torch.float64)
    scales = DPO(PairLoss(), 1, grad_ranks=2).scales(window, counts)
    assert [scale.item() for scale in scales] == [2 / 8] * 3


def test_sums_by_sample():
    sums, counts = sum_by_sample(torch.arange(6.0, dtype=torch.float64), batch(None, 3))
    assert sums.tolist() == [0.0, 3.0, 12.0] and counts.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(("ahead", "accuracy"), [(0.0, 0.5), (1e-6, 0.5), (-1e-6, 0.5), (1e-3, 1.0), (-1e-3, 0.0)])
def test_rewards_that_differ_by_rounding_are_a_tie(ahead, accuracy):
    """As before the first update, when the policy is the reference."""
    rows = torch.tensor([-3.0 + ahead, -2.0, -2.0], dtype=torch.float64)  # one position chosen, two rejected
    made = batch(torch.tensor([-3.0, -4.0], dtype=torch.float64), 2)
    assert DPO(PairLoss(), 1, 1).forward(lambda _, head: rows, made).metrics["rewards/accuracies"].item() == accuracy


def test_without_a_reference_every_difference_counts():
    made = batch(None, 2)
    rows = torch.tensor([-3.0 + 1e-6, -3.0, -3.0], dtype=torch.float64)
    found = DPO(PairLoss("simpo"), 1, 1).forward(lambda _, head: rows, made)
    assert found.metrics["rewards/accuracies"].item() == 1.0
