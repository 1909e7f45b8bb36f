"""run/slurm.sh by itself, with commands of Slurm's that only note how they were called."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from launching import ROOT

from llava_ds.constants import EXIT_NOT_RESUMABLE, EXIT_STOPPED

TEMPLATE = ROOT / "run" / "slurm.sh"


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start the template; srun is the given shell script, and scontrol writes its arguments to a file."""

    def started(srun: str) -> subprocess.Popen:
        for name, text in (("srun", srun), ("scontrol", f'echo "$@" > {tmp_path}/scontrol.txt')):
            (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
            (tmp_path / name).chmod(0o755)
        slurm = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "3"}
        environment = {**os.environ, **slurm, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": "some-python"}
        return subprocess.Popen(["bash", str(TEMPLATE), "--flag", "a b"], env=environment, stdout=subprocess.PIPE)

    return started


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + 20
    while not path.exists() or not path.read_text().endswith("\n"):
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.05)
    return path.read_text()


def test_bash_can_read_it_and_sbatch_finds_its_options():
    assert subprocess.run(["bash", "-n", str(TEMPLATE)]).returncode == 0
    text = TEMPLATE.read_text()
    head = text[: text.index("\nset -")]  # sbatch stops at the first command
    options = re.findall(r"^#SBATCH --([a-z-]+)(?:=\S+)?$", head, re.MULTILINE)
    assert len(options) == text.count("#SBATCH") and {"nodes", "ntasks-per-node", "requeue", "signal"} <= set(options)


@pytest.mark.parametrize("code", [3, EXIT_NOT_RESUMABLE])  # what would only start from the beginning does not go on
def test_srun_gets_the_flags_and_its_exit_code_is_the_jobs(start, tmp_path, code):
    process = start(f'for a in "$@"; do echo "$a" >> {tmp_path}/srun.txt; done; exit {code}')
    assert process.wait(timeout=20) == code
    called = (tmp_path / "srun.txt").read_text().splitlines()
    assert called[-5:] == ["some-python", "-u", "run/train.py", "--flag", "a b"]
    assert "--kill-on-bad-exit=1" in called and "--cpus-per-task=3" in called
    assert not (tmp_path / "scontrol.txt").exists()


def test_what_was_told_to_stop_and_saved_goes_back_into_the_queue(start, tmp_path):
    process = start(f"exit {EXIT_STOPPED}")
    assert process.wait(timeout=20) == EXIT_STOPPED
    assert (tmp_path / "scontrol.txt").read_text() == "requeue 7\n"


def test_a_cancelled_job_does_not_come_back(start, tmp_path):
    process = start(f"echo $$ > {tmp_path}/srun.txt; exec sleep 20")
    pid = int(wait_for(tmp_path / "srun.txt"))
    process.send_signal(signal.SIGTERM)  # as scancel does, to the ranks too
    assert process.wait(timeout=20) == -signal.SIGTERM
    os.kill(pid, signal.SIGTERM)
    assert not (tmp_path / "scontrol.txt").exists()
