"""The comparison with TRL records the rollouts that a run draws."""

import sys
from pathlib import Path

import pytest
import toys
from drawing_runs import RULES, flags_of
from launching import ROOT

sys.path.insert(0, str(ROOT / "run" / "dev"))

from benchmark.trl_runs import Sides


@pytest.mark.full
def test_rollouts_of_a_run_are_recorded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rules.py").write_text(RULES)
    given = {**toys.write_base(tmp_path / "base"), **toys.write_data(tmp_path / "data", "iitit" * 3)}
    flags = flags_of(tmp_path, given, "drawn", 2, max_steps=2)
    sides = Sides("", Path(given["model_name_or_path"]), tmp_path)
    found = sides.ours({"drawn": {"flags": flags}})["drawn"]
    assert len(found["rollouts"]) == len(found["log"]) == 2 and found["batches"] == []
    for groups, row in zip(found["rollouts"], found["log"], strict=True):
        assert sum(len(group["answers"]) for group in groups) > 0
        rewards = [reward for group in groups for reward in group["rewards"]]
        assert sum(rewards) / len(rewards) == pytest.approx(row["reward"])
