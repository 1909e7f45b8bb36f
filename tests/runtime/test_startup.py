"""A rank whose launcher is gone leaves, whatever it imports; who was started from a shell stays."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from llava_ds.constants import EXIT_STOPPED, ConfigError
from llava_ds.runtime.launchers import check_variables
from llava_ds.runtime.processes import GONE

ROOT = Path(__file__).parents[2]
PLAIN = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("SLURM_", "OMPI_", "TORCHELASTIC_")) and name not in ("RANK", "CROSS_RANK", "LOCAL_SIZE")
}
TWO = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
OF_DEEPSPEED = {**TWO, "CROSS_RANK": "0", "LOCAL_SIZE": "2"}
# A rank: says its number, waits, looks above, says so, and imports for a long time.
RANK = """
import os, sys, time
print(os.getpid(), flush=True)
time.sleep(float(sys.argv[1]))
from llava_ds.runtime.command import begin
begin("rank")
print("began", flush=True)
time.sleep(60)
"""


def words(delay_s: float = 0) -> list[str]:
    return [sys.executable, "-c", RANK, str(delay_s)]


# What stands for a launcher or a runner: its name is what is looked at.
CALLS = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[{first}:]))"
FROM_A_THREAD = """
import subprocess, sys, threading, time
thread = threading.Thread(target=lambda: subprocess.Popen(sys.argv[1:]))
thread.start(); thread.join(); time.sleep(60)
"""


@pytest.fixture
def start(tmp_path):
    """A function that starts a chain of processes whose last is a rank, and returns the first and the rank."""
    started: list[psutil.Process] = []

    def begin(*names: str, delay_s: float = 0, script: str = "", **variables: str):
        before: list[str] = []
        for name in names:
            if name == "launch":  # as `python -m deepspeed.launcher.launch` reads in a list of processes
                (tmp_path / name).write_text(CALLS.format(first=2))
                before += [sys.executable, str(tmp_path / name), "deepspeed.launcher.launch"]
            elif name == "sh":
                before += ["sh", "-c", '"$0" "$@"; true']
            else:
                (tmp_path / name).write_text(script or CALLS.format(first=1))
                before += [sys.executable, str(tmp_path / name)]
        process = subprocess.Popen(
            [*before, *words(delay_s)],
            env={**PLAIN, **variables},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=(tmp_path / "said").open("w"),
            text=True,
            start_new_session=True,
        )
        rank = psutil.Process(int(process.stdout.readline()))
        started.append(rank)
        first = psutil.Process(process.pid)
        started.extend([first, *first.children(recursive=True)])
        return process, rank

    yield begin
    for process in started:
        with contextlib.suppress(psutil.NoSuchProcess):  # one that was killed above takes those below it along
            process.kill()


def ends(process: psutil.Process, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(
    ("names", "victim"),
    [
        (("torchrun",), 0),
        pytest.param(("torchrun", "sh"), 0, marks=pytest.mark.long),
        (("deepspeed", "launch"), 0),
        (("deepspeed", "launch"), 1),
        pytest.param(("deepspeed", "launch", "sh"), 1, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("delay_s", [0.0, 0.3], ids=["after its look", "before its look"])
def test_a_rank_ends_with_its_launcher_and_with_the_runner_above_it(start, tmp_path, names, victim, delay_s):
    variables = {**TWO, "TORCHELASTIC_RUN_ID": "none"} if names[0] == "torchrun" else OF_DEEPSPEED
    first, rank = start(*names, delay_s=delay_s, **variables)
    if not delay_s:
        assert first.stdout.readline() == "began\n"
    chain = [psutil.Process(first.pid), *psutil.Process(first.pid).children(recursive=True)]
    chain[victim].kill()
    first.poll()
    assert ends(rank, 15)
    assert GONE in (tmp_path / "said").read_text()


def test_a_launcher_whose_thread_ended_lives(start):
    first, rank = start("torchrun", script=FROM_A_THREAD, **{**TWO, "TORCHELASTIC_RUN_ID": "none"})
    assert first.stdout.readline() == "began\n"
    assert not ends(rank, 1.2)


@pytest.mark.parametrize("variables", [{}, TWO], ids=["alone", "ranks started by hand"])
@pytest.mark.parametrize("delay_s", [0.0, 0.3])
def test_a_shell_may_end(start, variables, delay_s):
    shell, rank = start("sh", delay_s=delay_s, **variables)
    if not delay_s:
        assert shell.stdout.readline() == "began\n"
    shell.kill()
    assert not ends(rank, 1.2)


def test_a_task_of_srun_ends_with_what_started_it(start):
    first, rank = start("slurmstepd", SLURM_PROCID="0", SLURM_STEP_NUM_TASKS="2")
    assert first.stdout.readline() == "began\n"
    first.send_signal(signal.SIGKILL)
    assert ends(rank, 15)


SCRIPTS = [name for name in ("train", "evaluate", "chat") if (ROOT / "run" / f"{name}.py").exists()]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_command_whose_launcher_is_gone_says_so_before_it_imports_anything(script):
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, f"run/{script}.py"], env={**PLAIN, **OF_DEEPSPEED}, cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (EXIT_STOPPED, "")
    assert f"{GONE} (deepspeed's launcher set CROSS_RANK; " in done.stderr and "Traceback" not in done.stderr
    assert time.monotonic() - began < 10  # the imports alone take longer


WRONG = [
    ({"RANK": "x"}, "RANK is 'x': expected a whole number from 0"),
    ({"RANK": "-1"}, "RANK is '-1': expected a whole number from 0"),
    ({"RANK": ""}, "RANK is '': expected a whole number from 0"),
    ({"RANK": "5"}, "RANK is 5, but WORLD_SIZE is 2: expected 0 to 1"),
    ({"LOCAL_RANK": "1.5"}, "LOCAL_RANK is '1.5': expected a whole number from 0"),
    ({"LOCAL_RANK": "2"}, "LOCAL_RANK is 2, but WORLD_SIZE is 2: expected 0 to 1"),
    ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK is 1, but LOCAL_WORLD_SIZE is 1: expected 0"),
    ({"LOCAL_SIZE": "two"}, "LOCAL_SIZE is 'two': expected a whole number from 1"),
    ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0': expected a whole number from 1"),
    ({"WORLD_SIZE": "9" * 30}, f"WORLD_SIZE is '{'9' * 30}': expected a whole number from 1"),
    ({"MASTER_PORT": "abc"}, "MASTER_PORT is 'abc': expected a whole number from 1 to 65535"),
    ({"MASTER_PORT": "70000"}, "MASTER_PORT is '70000': expected a whole number from 1 to 65535"),
    ({"MASTER_ADDR": " "}, "MASTER_ADDR is empty: expected the name or address of rank 0's machine"),
]


@pytest.mark.parametrize(("change", "line"), WRONG)
def test_variables_that_cannot_be_true_are_refused(change, line):
    with pytest.raises(ConfigError) as error:
        check_variables({**TWO, **change})
    first, *_, last = str(error.value).splitlines()
    assert first.startswith(line) and last.startswith("unset these variables if no launcher set them")


def test_variables_that_can_be_true_are_not():
    check_variables(TWO)
    check_variables(OF_DEEPSPEED)
    check_variables({})
    check_variables({"WORLD_SIZE": "8"})  # left over, without a RANK: a group of one


@pytest.mark.parametrize("script", ["train", "export"])
def test_a_command_says_it_at_once_and_alone(script):
    done = subprocess.run(
        [sys.executable, f"run/{script}.py"],
        env={**PLAIN, **TWO, "RANK": "x", "MASTER_PORT": "abc"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[:2] == [
        f"run/{script}.py: error: RANK is 'x': expected a whole number from 0",
        "MASTER_PORT is 'abc': expected a whole number from 1 to 65535",
    ]
