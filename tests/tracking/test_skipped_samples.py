"""skipped.jsonl holds every record that is not trained on, once, also after a resume."""

import json
from pathlib import Path
from types import SimpleNamespace

import torch

from llava_ds.data.dataset import BrokenSample
from llava_ds.data.loader import Counts
from llava_ds.runtime.ranks import Ranks
from llava_ds.tracking.skipped import SkippedSamples

ALONE = Ranks(0, 0, 1, torch.device("cpu"))
REJECTED = [{"file": "a.json", "line": 3, "index": 2, "id": "r", "reason": "no answer"}]


def log_in(folder: Path, resume_step: int = 0, num_allowed: float = 10) -> SkippedSamples:
    return SkippedSamples(folder / "skipped.jsonl", REJECTED, num_allowed, resume_step, ALONE)


def result(step: int, *ids: str, planned: int = 4):
    """A step's result, as far as the log looks at it."""
    broken = [BrokenSample("a.json", 1, ord(name), name, "torn") for name in ids]
    counts = Counts(planned - len(ids), 9, 9, 1, 9, 1)
    return SimpleNamespace(step=step, num_planned=planned, broken=broken, counts=counts)


def lines(folder: Path) -> list[tuple]:
    rows = map(json.loads, (folder / "skipped.jsonl").read_text().splitlines())
    return [(row["id"], row.get("step")) for row in rows]


def test_rejected_and_broken_records_are_listed(tmp_path, capsys):
    log = log_in(tmp_path)
    assert lines(tmp_path) == [("r", None)]
    log.add([result(1), result(2, "b")])
    log.add([result(3, "c", "d")])
    assert lines(tmp_path) == [("r", None), ("b", 2), ("c", 3), ("d", 3)]
    assert "step 2: left out b: torn" in capsys.readouterr().out


def test_an_id_can_not_steer_the_terminal(tmp_path, capsys):
    broken = [BrokenSample("a.json", 1, 0, "b\x1b[2J", "torn")]
    log_in(tmp_path).add([SimpleNamespace(step=1, num_planned=4, broken=broken, counts=Counts(3, 9, 9, 1, 9, 1))])
    assert capsys.readouterr().out == "step 1: left out b\\x1b[2J: torn\n"
    assert lines(tmp_path)[-1] == ("b\x1b[2J", 1)


def test_a_resumed_run_keeps_what_lies_before_its_checkpoint(tmp_path):
    log_in(tmp_path).add([result(1, "b"), result(2, "c"), result(3, "d")])
    with (tmp_path / "skipped.jsonl").open("a") as file:
        file.write('{"id": "cut sho')
    log_in(tmp_path, resume_step=2).add([result(3, "d")])
    assert lines(tmp_path) == [("r", None), ("b", 1), ("c", 2), ("d", 3)]
    log_in(tmp_path)
    assert lines(tmp_path) == [("r", None)]


def test_too_many_different_ones_are_a_problem(tmp_path):
    log = log_in(tmp_path, num_allowed=2.5)  # one was rejected before
    log.add([result(1, "b")])
    log.add([result(9, "b")])  # the same one in another epoch
    assert log.problem is None
    log.add([result(10, "c")])
    assert log.problem.startswith("2 samples broke while training, and 1 records were left out before: more than")
    assert lines(tmp_path)[-1] == ("c", 10)  # listed all the same
    assert log_in(tmp_path, resume_step=10, num_allowed=2.5).problem == log.problem  # also after a resume
    assert log_in(tmp_path, resume_step=10, num_allowed=3).problem is None


def test_where_none_is_allowed_the_first_one_is_a_problem(tmp_path):
    log = SkippedSamples(tmp_path / "skipped.jsonl", [], 0, 0, ALONE)
    log.add([result(1)])
    assert log.problem is None
    log.add([result(2, "b")])
    assert log.problem is not None
