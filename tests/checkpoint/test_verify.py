"""run/verify.py says which checkpoints are whole, and its exit code says it to scripts."""

import dataclasses
import importlib.util
import json

import pytest
import torch
from launching import ROOT

from llava_ds.checkpoint import commit
from llava_ds.checkpoint.run_identity import RunIdentity
from llava_ds.constants import ConfigError
from llava_ds.runtime.ranks import Ranks

RANKS = Ranks(0, 0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def verify():
    spec = importlib.util.spec_from_file_location("verify", ROOT / "run" / "verify.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


@pytest.fixture
def output_dir(tmp_path):
    identity = dataclasses.asdict(RunIdentity({}, "data", 8, 3, {}))
    for step in (500, 1000):
        scratch = commit.begin(tmp_path / "out", step, RANKS)
        (scratch / "trainer.json").write_text(json.dumps({"step": step, "identity": identity}))
        (scratch / "states.pt").write_bytes(bytes(2_000_000))
        commit.commit(scratch, {}, None, RANKS)
    return tmp_path / "out"


def test_whole_ones_are_described(verify, output_dir, capsys):
    assert verify([str(output_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{output_dir}/checkpoint-1000: whole: step 1,000, 8 ranks, ZeRO-3, 2 files, 0.002 GB"
    assert len(lines) == 2


def test_one_that_is_not_whole_is_told_with_the_reason(verify, output_dir, capsys):
    (output_dir / "checkpoint-500" / "states.pt").unlink()
    assert verify([str(output_dir / "checkpoint-1000"), str(output_dir / "checkpoint-500")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "whole: step 1,000" in lines[0]
    assert lines[1] == f"{output_dir}/checkpoint-500: NOT whole: states.pt is missing"
    (output_dir / "checkpoint-1000" / "manifest.json").unlink()
    assert verify([str(output_dir / "checkpoint-1000")]) == 1


def test_what_can_not_be_verified_is_refused(verify, tmp_path):
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(ConfigError, match=str(path)):
            verify([str(path)])
    with pytest.raises(ConfigError, match="CHECKPOINT"):
        verify([])
