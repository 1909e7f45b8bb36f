"""Whatever is done to a run's side files and checkpoints: no traceback, no hang, and the older whole one is reached."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import toys
from launching import ROOT, ds_config, environment, run_many, toy_run

pytestmark = pytest.mark.faults

TRIALS = int(os.environ.get("LLAVA_DS_TRIALS", "200"))
WORKER = ROOT / "tests" / "workers" / "damaged.py"


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("damaged")
    given = {**toys.write_base(folder / "base"), **toys.write_data(folder / "data", "iitiitii")}
    flags = {"max_steps": 3, "save_steps": 1, "save_strategy": "steps", "report_to": "none"}
    runs = [toy_run(given, folder / f"zero{stage}", ds_config(stage), **flags) for stage in (2, 3)]
    run_many(1, folder / "launch", runs)
    return {stage: folder / f"zero{stage}" for stage in (2, 3)}


@pytest.mark.parametrize("stage", [2, 3])
def test_random_damage(runs, stage):
    command = [sys.executable, WORKER, runs[stage], "--trials", str(TRIALS // 2), "--seed", str(1000 * stage)]
    env = {**environment(), "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(report["outcomes"], indent=1))
    assert report["trials"] == TRIALS // 2 and report["failures"] == []


DAMAGES = {
    "trainer.json": lambda path: path.write_text("[]"),
    "manifest.json": lambda path: path.write_text("[" * 300_000),
    "layout-0.json": lambda path: (path.unlink(), os.mkfifo(path)),
    "random-0.pt": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_through_the_commands(runs, tmp_path, name):
    run = tmp_path / "zero2"
    shutil.copytree(runs[2], run)
    DAMAGES[name](run / "checkpoint-3" / name)
    for command, code, said in (
        (["run/verify.py", run], 1, "checkpoint-3: NOT whole"),
        (["run/export.py", run / "checkpoint-3", "--output_dir", tmp_path / "out"], 2, "can't be used"),
        (["run/export.py", run / "checkpoint-2", "--output_dir", tmp_path / "older"], 0, "hf: "),
    ):
        done = subprocess.run(
            [sys.executable, *map(str, command)],
            cwd=ROOT,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=300,
        )
        printed = done.stdout + done.stderr
        assert done.returncode == code and said in printed and "Traceback" not in printed, printed
