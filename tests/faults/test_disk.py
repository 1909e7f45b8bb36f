"""A disk that fails one rank of two in a save: nobody hangs, the last good checkpoint stays, and the run goes on.

Or it ends with one message.
"""

import itertools
import json
import os
import subprocess
import time
from pathlib import Path

import pytest
import toys
from launching import ROOT, TRAIN, command_line, ds_config, launch, losses, toy_run

from llava_ds.checkpoint import commit, verification

pytestmark = pytest.mark.faults

WORKER = ROOT / "tests" / "workers" / "failing_disk.py"
LIMIT_S, START_S = 90, 300  # to end after a failure; to start
STEPS = 3  # each is saved
ERRORS = ("ENOSPC", "EIO", "EACCES", "EROFS")
# What each rank writes at ZeRO-2, and the calls by which rank 0 makes it a checkpoint.
FILES = {
    0: ["model_states.pt", "optim_states.pt", "random-0.pt", "trainer.json", "manifest.json"],
    1: ["optim_states.pt", "random-1.pt"],
}
PLACES = [
    *((rank, name, call) for rank in FILES for name in FILES[rank] for call in ("open", "write", "fsync")),
    (0, ".tmp", "mkdir"),
    (0, ".tmp", "fsync"),
    (0, ".tmp", "rename"),
]


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("disk")
    return toys.write_base(folder / "base") | toys.write_data(folder / "data", "ittiitti")


def run_cases(folder: Path, given: dict[str, str], cases: list[dict], **more: object) -> tuple[list, str]:
    """The exit code of each case's run, and its output."""
    folder.mkdir()
    for number, case in enumerate(cases):
        flags = {"max_steps": STEPS, "save_steps": 1, "save_strategy": "steps", "seed": 3, **more}
        case["argv"] = command_line(toy_run(given, folder / str(number), ds_config(2), **flags))
    (folder / "cases.json").write_text(json.dumps(cases))
    done = launch(2, WORKER, str(folder / "cases.json"), timeout_s=LIMIT_S + 10 * len(cases))
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "outcomes.json").read_text()), done.stdout


@pytest.mark.parametrize("background", [False, True])
def test_a_save_that_fails_once_costs_that_checkpoint_only(tmp_path, given, background):
    cases = [
        {"rank": rank, "name": name, "call": call, "errno": ERRORS[number % len(ERRORS)], "saves": [2]}
        for number, (rank, name, call) in enumerate(PLACES)
    ]
    outcomes, printed = run_cases(tmp_path / "cases", given, cases, async_save=background, save_total_limit=2)
    assert outcomes == [None] * len(cases)
    assert printed.count("WARNING: checkpoint-2 could not be saved") == len(cases)
    expected = losses(tmp_path / "cases" / "0")
    for number, case in enumerate(cases):
        output_dir = tmp_path / "cases" / str(number)
        left = sorted(path.name for path in output_dir.glob("checkpoint-*"))
        assert left == ["checkpoint-1", "checkpoint-3"], case
        assert all(verification.problem_with(output_dir / name) is None for name in left)
        assert losses(output_dir) == expected  # training did not notice
        assert f"rank {case['rank']} on " in printed and case["errno"] in printed


def test_an_error_that_stays_ends_the_run_with_the_last_good_one(tmp_path, given):
    cases = [
        {"rank": rank, "name": "optim_states.pt", "call": "write", "errno": error, "saves": [2, 3, 4]}
        for rank, error in itertools.product((0, 1), ERRORS)
    ]
    outcomes, _ = run_cases(tmp_path / "cases", given, cases, max_steps=6)
    for number, (case, outcome) in enumerate(zip(cases, outcomes)):
        output_dir = tmp_path / "cases" / str(number)
        assert outcome.startswith("3 saves in a row failed. checkpoint-4 could not be saved")
        assert case["errno"] in outcome and str(output_dir / "checkpoint-1") in outcome
        assert [path.name for path in output_dir.glob("checkpoint-*")] == ["checkpoint-1"]
        assert verification.newest_whole(output_dir) == (output_dir / "checkpoint-1", [])


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own with room for some checkpoints of a toy."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", folder], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("may not mount a file system here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_disk_that_is_really_full_ends_the_run_with_one_message(tmp_path, given, small_disk):
    flags = toy_run(given, small_disk / "out", ds_config(2), max_steps=30, save_steps=1, save_strategy="steps")
    done = launch(2, TRAIN, *command_line({**flags, "cache_dir": tmp_path / "cache"}), timeout_s=START_S + LIMIT_S)
    assert done.returncode == 2
    assert "3 saves in a row failed" in done.stderr and "ENOSPC" in done.stderr and "Traceback" not in done.stderr
    path, refused = verification.newest_whole(small_disk / "out")
    assert path is not None and not refused and str(path) in done.stderr
    assert time.time() - path.stat().st_mtime < LIMIT_S


@pytest.mark.parametrize("config", [2, 3])
def test_a_disk_without_room_for_the_finished_model_ends_the_run_with_one_message(tmp_path, given, small_disk, config):
    (small_disk / "filling").write_bytes(bytes(1_250_000))
    flags = toy_run(given, small_disk / "out", ds_config(config), max_steps=1)
    flags |= {"cache_dir": tmp_path / "cache", "export_format": "llava"}
    done = launch(2, TRAIN, *command_line(flags), timeout_s=START_S + LIMIT_S)
    assert done.returncode == 2, done.stderr
    assert "the finished model could not be written" in done.stderr and "ENOSPC" in done.stderr
    assert "Traceback" not in done.stderr
    (small_disk / "filling").unlink()
    again = launch(2, TRAIN, *command_line(flags), timeout_s=START_S + LIMIT_S)
    assert again.returncode == 0 and (small_disk / "out" / "config.json").exists()


def test_a_disk_that_turns_read_only_ends_the_run_with_one_message(tmp_path, given, small_disk):
    flags = toy_run(given, small_disk / "out", ds_config(2), max_steps=200, save_steps=2, save_strategy="steps")
    # TensorBoard's file stays open for writing, and a file system with such a file can't be turned.
    flags |= {"cache_dir": tmp_path / "cache", "save_total_limit": 1, "report_to": "none"}
    command = command_line(flags)
    starting = launch_in_background(*command)
    while not commit.checkpoints(small_disk / "out"):
        assert starting.poll() is None, starting.communicate()
        time.sleep(0.05)
    # Files that are open for writing at this moment keep it from turning.
    while subprocess.run(["mount", "-o", "remount,ro", small_disk], capture_output=True).returncode != 0:
        time.sleep(0.01)
    started = time.monotonic()
    _, said = starting.communicate(timeout=LIMIT_S)
    assert time.monotonic() - started < LIMIT_S
    assert starting.returncode == 2 and "Traceback" not in said
    assert "EROFS" in said and "3 saves in a row failed" in said
    path, _ = verification.newest_whole(small_disk / "out")
    assert path is not None and str(path) in said


def launch_in_background(*arguments: str) -> subprocess.Popen:
    from launching import DEEPSPEED, environment

    from llava_ds.runtime.launchers import free_port

    command = [*DEEPSPEED, "--num_accelerators", "2", "--master_port", str(free_port()), str(TRAIN), *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env={**os.environ, **environment()}, **pipes)
