"""run/slurm.sh by itself, with commands of Slurm's that only note how they were called."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from launching import ROOT

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


def test_srun_gets_the_flags_and_its_exit_code_is_the_jobs(start, tmp_path):
    process = start(f'for a in "$@"; do echo "$a" >> {tmp_path}/srun.txt; done; exit 3')
    assert process.wait(timeout=20) == 3
    called = (tmp_path / "srun.txt").read_text().splitlines()
    assert called[-5:] == ["some-python", "-u", "run/train.py", "--flag", "a b"]
    assert "--kill-on-bad-exit=1" in called and "--cpus-per-task=3" in called


def test_the_signal_before_the_end_puts_the_job_back_and_waits_for_srun(start, tmp_path):
    process = start(f"echo started > {tmp_path}/started.txt; sleep 2; echo ended > {tmp_path}/ended.txt")
    wait_for(tmp_path / "started.txt")
    process.send_signal(signal.SIGUSR1)
    assert wait_for(tmp_path / "scontrol.txt") == "requeue 7\n"
    assert process.wait(timeout=20) == 0 and (tmp_path / "ended.txt").exists()
