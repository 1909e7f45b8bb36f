"""The losses are those of TRL's DPOTrainer, CPOTrainer and ORPOTrainer: numbers that they gave, without TRL.

run/dev/compare_trl.py --write renews the file, by TRL's own code.
"""

import json
from pathlib import Path

import pytest
import torch
import toys

from llava_ds.extensions.preference.dpo import PairLoss

PAIRS = json.loads((Path(toys.__file__).parent / "trl_losses.json").read_text())["pairs"]
FLOAT32 = 1e-6  # TRL computes in it, relative to the largest loss of some


NAMES = {  # by TRL's trainer and loss type; of one pair aot is the sigmoid, and smoothed
    ("dpo", "aot"): "sigmoid", ("cpo", None): "simpo", ("cpo", "sigmoid"): "cpo", ("orpo", None): "orpo",
}  # fmt: skip


@pytest.mark.parametrize("case", PAIRS, ids=lambda case: f"{case['trainer']}-{'-'.join(case.get('loss_types', []))}")
def test_the_loss_of_pairs(case):
    theirs = case.get("loss_types", [None])[0]
    alpha = (case["loss_weights"] or [1.0, 0.0])[1]
    loss = PairLoss(
        NAMES.get((case["trainer"], theirs), theirs), case["beta"], case["label_smoothing"], alpha, case["simpo_gamma"],
        cpo_alpha=case.get("cpo_alpha", 0.0),
    )  # fmt: skip
    lengths = torch.tensor(case["lengths"], dtype=torch.float64)
    sums = torch.tensor([sum(row) for row in case["rows"]], dtype=torch.float64).view(2, -1).T
    found = loss(sums, torch.tensor(case["reference"], dtype=torch.float64), lengths).mean().item()
    assert found == pytest.approx(case["loss"], rel=FLOAT32, abs=FLOAT32)
