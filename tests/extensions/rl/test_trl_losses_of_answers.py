"""The losses are those of TRL's GRPOTrainer: numbers that it gave, without TRL.

run/dev/compare_trl.py --write renews the file, by TRL's own code.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import toys

from llava_ds.constants import IGNORE_INDEX
from llava_ds.data.collate import LoadedSample
from llava_ds.extensions.rl.drawer import RolloutPrompt
from llava_ds.extensions.rl.grpo import GRPO, PolicyLoss, advantages_of
from llava_ds.extensions.rl.policy_batches import Group, policy_batch, totals_of, trained_answers
from llava_ds.runtime.mesh import Mesh
from llava_ds.train.evaluating.sampling import Answer

POLICY = json.loads((Path(toys.__file__).parent / "trl_losses.json").read_text())["policy"]
FLOAT32 = 1e-6  # TRL computes in it, relative to the largest loss of some


def groups() -> list[Group]:
    found = []
    for i, group in enumerate(POLICY["groups"]):
        ids = torch.tensor(group["prompt_ids"])
        prompt = RolloutPrompt(i, str(i), LoadedSample(ids, torch.full_like(ids, IGNORE_INDEX), []), "?", "!")
        answers = [Answer(tuple(a["ids"]), tuple(a["log_probs"]), 0.0, a["ended"]) for a in group["answers"]]
        rewards = np.array(group["rewards"])
        found.append(Group(prompt, answers, rewards[None], rewards))
    return found


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_the_advantages(scale):
    rewards = torch.tensor([group["rewards"] for group in POLICY["groups"]], dtype=torch.float64)
    wanted = next(r["advantages"] for r in POLICY["results"] if r["settings"]["scale_rewards"] == scale)
    found = advantages_of(rewards, scale, rewards.std().item())
    assert found.flatten().tolist() == pytest.approx(wanted, abs=FLOAT32)


@pytest.mark.parametrize(
    "result", POLICY["results"], ids=lambda result: "-".join(map(str, result["settings"].values()))
)
def test_the_loss_of_answers(result, monkeypatch):
    monkeypatch.setattr("llava_ds.extensions.rl.policy_batches.sum_over", lambda group, values: values)
    defaults = {
        "beta": 0.0,
        "entropy_coef": 0.0,
        "epsilon": 0.2,
        "mask_truncated_completions": False,
        "use_bias_correction_kl": False,
    }
    settings = {**defaults, **result["settings"]}
    longest = max(len(answer["ids"]) for group in POLICY["groups"] for answer in group["answers"])
    training = SimpleNamespace(**settings, max_completion_length=longest)
    made = groups()
    masks = settings["mask_truncated_completions"]
    totals = totals_of(made, Mesh(dp=1, dp_rank=0), torch.device("cpu"), only_ended=masks)
    units = trained_answers(made, totals, training)
    every = [one for unit in units for one in unit]
    # Every answer is recognised by the log-probabilities that it was drawn with.
    numbers = [answer["log_probs"] for group in POLICY["groups"] for answer in group["answers"]]
    micro = policy_batch(every, totals, 1.0, training, toys.image_options())
    parts = [part.tolist() for part in micro.batch.extra["drawn"].sampled.split([len(one.answer.ids) for one in every])]
    named = {
        name: torch.tensor([value for part in parts for value in POLICY[name][numbers.index(part)]]).double()
        for name in ("rows", "old", "frozen")
    }
    rows = named.pop("rows")
    batch = micro.batch.with_extra(drawn=micro.batch.extra["drawn"]._replace(**named))
    high = settings.get("epsilon_high", settings["epsilon"])
    others = (settings[name] for name in ("importance_sampling_level", "beta", "use_bias_correction_kl"))
    loss = PolicyLoss(settings["epsilon"], high, *others)
    found = GRPO(loss, 1, 1).forward(lambda _, head: rows, batch).loss_sum.item()
    assert found == pytest.approx(result["loss"], rel=3 * FLOAT32, abs=3 * FLOAT32)
