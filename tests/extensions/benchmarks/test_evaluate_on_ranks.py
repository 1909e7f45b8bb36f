"""A run's folder and its checkpoint, evaluated on one process and on two, and after a kill: one file, byte for byte."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import toys
from launching import ROOT, ds_config, environment, launch, run_many, toy_run

# test_answers.py has what one process can show of it.
pytestmark = pytest.mark.long

EVALUATE = ROOT / "run" / "evaluate.py"
TIMEOUT_S = 1200
COMPARED = ("--compare_without_image", "--compare_blank_image")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(a finished run with a checkpoint at its end, flags that name questions)."""
    folder = tmp_path_factory.mktemp("run")
    data = toys.write_data(folder / "data", "iitittiiit" * 3)
    flags = {**toys.write_base(folder / "base"), **data}
    saved = {"max_steps": 3, "save_strategy": "steps", "save_steps": 3}
    run_many(2, folder, [toy_run(flags, folder / "out", ds_config(3), **saved)], timeout_s=TIMEOUT_S)
    asked = ["--batch_size", "4", "--max_new_tokens", "8", "--cache_dir", folder / "cache"]
    return folder / "out", [*map(str, asked), *(token for name in data for token in (f"--{name}", data[name]))]


def evaluate(model, output, asked, num_ranks: int) -> str:
    arguments = ["--model_path", str(model), "--output", str(output), *COMPARED, *asked]
    if num_ranks > 1:
        done = launch(num_ranks, EVALUATE, *arguments, timeout_s=TIMEOUT_S)
    else:
        command = [sys.executable, str(EVALUATE), *arguments]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def left(output) -> list[bytes]:
    files = [output, *(output.with_suffix(f"{name}.jsonl") for name in ("", ".without_picture", ".blank_image"))]
    assert sorted(file for file in output.parent.iterdir()) == sorted(files)
    return [file.read_bytes() for file in files]


def test_the_number_of_processes_a_kill_and_the_way_from_the_checkpoint_change_nothing(run, tmp_path):
    model, asked = run
    evaluate(model, tmp_path / "one" / "x.json", asked, 1)
    whole = left(tmp_path / "one" / "x.json")
    assert len(set(json.loads(line)["text"] for line in whole[1].splitlines())) > 1
    evaluate(model, tmp_path / "two" / "x.json", asked, 2)
    assert left(tmp_path / "two" / "x.json") == whole

    killed = tmp_path / "killed" / "x.json"
    command = [sys.executable, str(EVALUATE), "--model_path", str(model), "--output", str(killed)]
    process = subprocess.Popen([*command, *COMPARED, *asked], env=environment())
    parts = killed.with_suffix(".partial")
    while process.poll() is None and not any(file.stat().st_size for file in parts.glob("*.jsonl")):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert parts.is_dir()
    assert "questions are answered already" in evaluate(model, killed, asked, 2)
    assert left(killed) == whole

    evaluate(model / "checkpoint-3", tmp_path / "checkpoint" / "x.json", asked, 2)
    rows = [[json.loads(line)["text"] for line in file.splitlines()] for file in whole[1:]]
    found = left(tmp_path / "checkpoint" / "x.json")
    assert [[json.loads(line)["text"] for line in file.splitlines()] for file in found[1:]] == rows
