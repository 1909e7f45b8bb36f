"""Answers that the comparison with TRL records, and gives back, train as those that are drawn."""

import json
import sys
from pathlib import Path

import pytest
import toys
from drawing_runs import RULES, flags_of
from launching import ROOT

sys.path.insert(0, str(ROOT / "run" / "dev"))

from benchmark.trl_runs import Sides

SAME = ("loss", "grad_norm", "reward", "sampling_gap")


@pytest.mark.full
def test_recorded_answers_train_as_drawn_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rules.py").write_text(RULES)
    given = {**toys.write_base(tmp_path / "base"), **toys.write_data(tmp_path / "data", "iitit" * 3)}
    flags = flags_of(tmp_path, given, "drawn", 2, max_steps=2)
    sides = Sides("", Path(given["model_name_or_path"]), tmp_path)
    drawn = sides.ours({"drawn": {"flags": flags}})["drawn"]
    assert len(drawn["rollouts"]) == 2 and drawn["tiles"]["drawing"] > 0
    (tmp_path / "given.json").write_text(json.dumps(drawn["rollouts"]))
    again = sides.ours(
        {"again": {"flags": {**flags, "output_dir": tmp_path / "again"}, "rollouts": str(tmp_path / "given.json")}}
    )["again"]
    assert again["tiles"]["drawing"] == 0
    for one, other in zip(drawn["log"], again["log"], strict=True):
        assert {name: one[name] for name in SAME} == {name: other[name] for name in SAME}
