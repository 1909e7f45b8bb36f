"""KTO's loss is TRL's, and a micro-batch's is that of its answers."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import toys

from llava_ds.extensions.preference.kto import KTO, AnswerLoss

ANSWERS = json.loads((Path(toys.__file__).parent / "trl_losses.json").read_text())["answers"]
FLOAT32 = 1e-6  # TRL computes in it


@pytest.mark.parametrize("case", ANSWERS, ids=lambda case: f"{case['beta']}")
def test_the_loss_of_answers(case):
    """run/dev/compare_trl.py --write renews the numbers, by TRL's own code."""
    sums, mismatched = (
        torch.tensor([sum(row) for row in case[name]], dtype=torch.float64) for name in ("rows", "mismatched")
    )
    reference, other = (torch.tensor(case[name], dtype=torch.float64) for name in ("reference", "mismatched_reference"))
    labels = torch.tensor([1.0 if label else -1.0 for label in case["labels"]], dtype=torch.float64)
    kl = (mismatched - other).mean().clamp(min=0)
    assert (kl > 0) == ("far" not in case)
    found = AnswerLoss(case["beta"], *case["weights"])(sums - reference, labels, kl).mean().item()
    assert found == pytest.approx(case["loss"], rel=FLOAT32, abs=FLOAT32)


def batch(**extra: list[float]) -> SimpleNamespace:
    """A pair, and a bad answer from another source: samples of 1, 2 and 3 supervised positions."""
    return SimpleNamespace(
        cu_seqlens=torch.zeros(4),
        target_samples=torch.tensor([0, 1, 1, 2, 2, 2]),
        sources=torch.tensor([0, 0, 1]),
        extra={name: torch.tensor(values, dtype=torch.float64) for name, values in extra.items()},
    )


GIVEN = {
    "label": [1.0, -1.0, -1.0],
    "weight": [0.5, 0.5, 1.0],
    "share": [2.0, 1.0, 1.0],
    "reference": [-2.0, -1.0, -3.0],
}


@pytest.mark.parametrize("kl", [None, 0.25])
def test_a_micro_batch_gives_the_sum_over_its_records_and_trls_metrics(kl):
    rows = torch.linspace(-2, -0.1, 6, dtype=torch.float64).requires_grad_()
    sums = torch.stack([part.sum() for part in rows.detach().split([1, 2, 3])])
    made = batch(**GIVEN)
    if kl is not None:
        made.extra["kl"] = torch.tensor(kl, dtype=torch.float64)
    loss = AnswerLoss(0.5, 1.5, 0.7)
    found = KTO(loss, 2, 1).forward(lambda _, head: rows, made)
    ratios = sums - made.extra["reference"]
    each = loss(ratios, made.extra["label"], kl or 0.0)
    assert found.loss_sum.item() == pytest.approx((each[0] / 2 + each[1] / 2 + each[2]).item(), rel=1e-12)
    assert found.by_source[0].tolist() == pytest.approx([((each[0] + each[1]) / 2).item(), each[2].item()], rel=1e-12)
    assert found.by_source[1].tolist() == [1.0, 1.0]
    means = {name: value.item() / 2 for name, value in found.metrics.items()}  # two records
    chosen, rejected = 0.5 * ratios[0].item(), 0.5 * ratios[1:].mean().item()
    expected = {"rewards/chosen": chosen, "rewards/rejected": rejected, "rewards/margins": chosen - rejected}
    expected |= {"logps/chosen": sums[0].item(), "logps/rejected": sums[1:].mean().item()}
    assert means == pytest.approx(expected | ({} if kl is None else {"kl": kl}), rel=1e-12)
    assert not any(value.requires_grad for value in found.metrics.values())
    found.loss_sum.backward()
    assert (rows.grad != 0).all()


def test_a_rank_without_answers_takes_part_with_gradients_of_zero():
    rows = torch.zeros(0, dtype=torch.float64, requires_grad=True)
    made = batch(kl=0.3)
    made.cu_seqlens, made.target_samples = torch.zeros(2), torch.zeros(0, dtype=torch.int64)
    found = KTO(AnswerLoss(), 2, 2).forward(lambda _, head: rows, made)
    found.loss_sum.backward()
    assert found.loss_sum.item() == 0 and found.by_source.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert rows.grad is not None and found.metrics["kl"].item() == 0
