"""Answers that share their prompt train as answers that don't: GRPO and PPO, with LoRA, at any ZeRO stage."""

import pytest
import toys
from drawing_runs import KINDS, RULES, flags_of, read_rollouts
from launching import run_many

from llava_ds.files.jsonl import read_metrics

STEPS = 2
QUICK = {"held": (2, 3)}  # ranks and ZeRO stage
SLOW = {"plain": (2, 0), "critic": (2, 2), "adapters": (2, 1), "critic-adapters": (1, 3), "refilled": (1, 2)}
SLOW["rloo"] = (2, 3)


@pytest.mark.parametrize("cases", [QUICK, pytest.param(SLOW, marks=pytest.mark.long)], ids=["quick", "slow"])
def test_losses_and_gradients_are_the_same(tmp_path, cases):
    (tmp_path / "rules.py").write_text(RULES)
    cases = {name: case for name, case in cases.items() if name in KINDS}
    given = {**toys.write_base(tmp_path / "base"), **toys.write_data(tmp_path / "data", "iitit")}
    for ranks in {ranks for ranks, _ in cases.values()}:
        todo = [
            flags_of(
                tmp_path, given, f"{name} {shares}", stage,
                **{**KINDS[name], "max_steps": STEPS, "adam_epsilon": 1e-3, "share_prompts": shares},
            )
            for name, (wanted, stage) in cases.items() if wanted == ranks
            for shares in (True, False)
        ]  # fmt: skip
        run_many(ranks, tmp_path / f"launch-{ranks}", todo, finished=False)
    for name in cases:
        folders = [tmp_path / f"{name} {shares}" for shares in (True, False)]
        assert read_rollouts(folders[0]) == read_rollouts(folders[1])
        for row, other in zip(*(read_metrics(folder / "run" / "metrics.jsonl") for folder in folders), strict=True):
            assert row["tokens"] < other["tokens"]
            for number in ("loss", "grad_norm", "entropy", "reward"):
                assert row[number] == pytest.approx(other[number], rel=1e-5, abs=1e-7), (name, row["step"], number)
