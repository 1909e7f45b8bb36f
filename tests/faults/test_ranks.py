"""One rank of two dies, hangs, pauses or lags, wherever: every process ends within 90 seconds, and the rank is named.

make test-faults; the figures are printed with -s.
"""

import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import toys
from launching import DEEPSPEED, ROOT, command_line, ds_config, environment, toy_run

from llava_ds.constants import EXIT_RANK_LOST
from llava_ds.runtime.launchers import free_port

pytestmark = pytest.mark.faults

FAULTY = ROOT / "tests" / "workers" / "faulty.py"
MOST_S = 90.0
LIMITS = {"watchdog_start_s": 12, "watchdog_step_s": 12, "watchdog_save_s": 12}


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("given")
    return toys.write_base(folder / "base") | toys.write_data(folder / "data", "ittiitti")


def run(given: dict, folder: Path, how: str, when: str, rank: int, launcher: str = "deepspeed", **more: object):
    """The exit code, what was printed, and the seconds from the fault to the launcher's end. No process is left."""
    flags = toy_run(given, folder / "out", ds_config(2), train_batch_size=2, save_strategy="steps", save_steps=4)
    flags = {**flags, "max_steps": 8, **LIMITS, **more}
    starts = {
        "deepspeed": [*DEEPSPEED, "--num_accelerators", "2", "--master_port", str(free_port())],
        "torchrun": [str(Path(sys.executable).parent / "torchrun"), "--nproc-per-node", "2", "--master-port"]
        + [str(free_port())],
    }
    command = [*starts[launcher], str(FAULTY), how, when, str(rank), str(folder / "note"), *command_line(flags)]
    with (folder / "log").open("w") as log:
        done = subprocess.run(command, env=environment(), stdout=log, stderr=subprocess.STDOUT, timeout=900)
    seconds = time.time() - float((folder / "note").read_text())
    output = (folder / "log").read_text()
    print(f"\n{launcher} {how} {when} rank {rank}: exit code {done.returncode}, {seconds:.1f} s after the fault")
    print("".join(f"    {line[:300]}\n" for line in output.splitlines() if "rank " in line or "holds" in line))
    left = [
        each.pid for each in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(each.info["cmdline"] or [])
    ]
    assert left == []
    return done.returncode, output, seconds


PLACES = {"start": "at startup", "step": "in step 3", "save": "saving after step 4"}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("when", PLACES)
def test_a_killed_rank_is_named(given, tmp_path, when, rank):
    code, output, seconds = run(given, tmp_path, "kill", when, rank)
    assert code != 0 and seconds < MOST_S
    (line,) = re.findall(r".*error: rank .*", output)
    assert (
        f"error: rank {rank} on " in line
        and f"died: its process was killed or crashed, when last heard of {PLACES[when]}" in line
    )
    assert "Traceback" not in output
    if when == "step":
        assert re.search(r", on 1 samples \(\w+\)$", line)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("when", PLACES)
def test_a_stopped_rank_is_named_with_the_stacks_of_the_other(given, tmp_path, when, rank):
    code, output, seconds = run(given, tmp_path, "stop", when, rank)
    assert code == EXIT_RANK_LOST and seconds < MOST_S
    (line,) = re.findall(r".*the run hangs.*", output)
    assert f"rank {rank} on " in line and "its process is stopped" in line and PLACES[when] in line
    stacks = (tmp_path / "out" / f"hang-rank{1 - rank}.txt").read_text()
    assert "distributed_c10d" in stacks and "train.py" in stacks


@pytest.mark.parametrize("how", ["raise", "exit"])
@pytest.mark.parametrize("when", PLACES)
def test_a_rank_that_fails_while_the_other_waits_is_named(given, tmp_path, how, when):
    code, output, seconds = run(given, tmp_path, how, when, 1)
    assert code in ({"raise": 1, "exit": 3}[how], EXIT_RANK_LOST) and seconds < MOST_S
    assert "error: rank 1 on " in output and PLACES[when] in output
    assert output.count("RuntimeError: boom") == (how == "raise")
    assert "Connection closed by peer" not in output


@pytest.mark.parametrize("how", ["kill", "raise", "exit"])
def test_a_rank_that_ends_before_the_ranks_meet_ends_the_others(given, tmp_path, how):
    code, _, seconds = run(given, tmp_path, how, "before", 1)
    assert code != 0 and seconds < MOST_S


@pytest.mark.parametrize(("how", "when"), [("kill", "step"), ("stop", "save"), ("raise", "start")])
def test_the_same_under_torchrun(given, tmp_path, how, when):
    code, output, seconds = run(given, tmp_path, how, when, 1, "torchrun")
    assert code != 0 and seconds < MOST_S and "rank 1 on " in output


@pytest.mark.parametrize("when", PLACES)
def test_a_pause_below_the_limit_changes_nothing(given, tmp_path, when):
    code, output, _ = run(
        given, tmp_path, "pause", when, 1, watchdog_start_s=30, watchdog_step_s=30, watchdog_save_s=30
    )
    assert code == 0 and "error" not in output, output


def test_a_slow_rank_is_reported_and_the_run_ends_well(given, tmp_path):
    code, output, _ = run(given, tmp_path, "slow", "step", 1, max_steps=30, save_steps=30)
    assert code == 0
    assert len(re.findall(r"watchdog: rank 1 on .* holds up the others", output)) == 1, output
    assert "watchdog: rank 0" not in output
