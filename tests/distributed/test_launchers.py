"""Every way to start run/train.py on two machines gives what one launcher with two ranks gives.

Both machines are this one, over loopback. Each has a cache of its own, as machines that share no disk have.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import toys
from launching import DEEPSPEED, ROOT, TRAIN, command_line, ds_config, environment, launch, losses

from llava_ds.runtime.launchers import free_port

STEPS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("launchers")
    flags = {
        **toys.write_base(folder / "base"),
        **toys.write_data(folder / "data", "ititiiti" * 2),
        "deepspeed_config": ds_config(3),
        "model_max_length": 512,
        "train_batch_size": 4,
        "learning_rate": 2e-3,
        "max_steps": STEPS,
        "save_steps": STEPS,
    }
    (folder / "flags.json").write_text(json.dumps(flags))
    (folder / "hostfile").write_text("127.0.0.1 slots=1\nlocalhost slots=1\n")
    return folder


@pytest.fixture(scope="module")
def expected(folder) -> list[float]:
    """The losses of one launcher with two ranks."""
    done = launch(2, TRAIN, *flags_of(folder, "one-launcher", "cache"))
    assert done.returncode == 0, done.stdout + done.stderr
    return losses(folder / "one-launcher")


def flags_of(folder: Path, name: str, cache: str, **more: object) -> list[str]:
    flags = json.loads((folder / "flags.json").read_text())
    return command_line({**flags, "output_dir": folder / name, "cache_dir": folder / cache, **more})


def run_together(*commands: list[str], timeout_s: int = 300, **variables: str) -> list[subprocess.CompletedProcess]:
    """Start commands at the same time, and return when all have ended; what is left of them is killed."""
    started = [
        subprocess.Popen(
            command,
            env={**environment(), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for command in commands
    ]
    try:
        with ThreadPoolExecutor(len(started)) as pool:
            outputs = list(pool.map(lambda process: process.communicate(timeout=timeout_s), started))
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return [subprocess.CompletedProcess(p.args, p.returncode, *output) for p, output in zip(started, outputs)]


def fake_command(folder: Path, name: str) -> str:
    """A PATH on which a cluster's command is the one in tests/workers."""
    bin_folder = folder / f"{name}-bin"
    bin_folder.mkdir()
    path = bin_folder / name
    worker = shlex.join([sys.executable, str(ROOT / "tests" / "workers" / f"fake_{name}.py")])
    path.write_text(f'#!/bin/sh\nexec {worker} "$@"\n')
    path.chmod(0o755)
    return f"{bin_folder}:{environment()['PATH']}"


def check(folder: Path, name: str, expected: list[float], done: list[subprocess.CompletedProcess]) -> None:
    assert all(each.returncode == 0 for each in done), "\n".join(each.stdout + each.stderr for each in done)
    found = losses(folder / name)
    assert len(found) == STEPS
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) <= 1e-6
    # Both wrote their part, into the one folder.
    assert len(list((folder / name / f"checkpoint-{STEPS}").glob("random-*.pt"))) == 2


def no_ssh(folder: Path, node: int, port: int, flags: list[str]) -> list[str]:
    where = ["--hostfile", str(folder / "hostfile"), "--no_ssh", "--node_rank", str(node)]
    return [*DEEPSPEED, *where, "--master_addr", "127.0.0.1", "--master_port", str(port), str(TRAIN), *flags]


@pytest.mark.long
def test_two_launchers_without_ssh(folder, expected):
    port = free_port()
    done = run_together(*(no_ssh(folder, node, port, flags_of(folder, "no-ssh", f"cache-{node}")) for node in range(2)))
    check(folder, "no-ssh", expected, done)


@pytest.mark.long
def test_a_hostfile(folder, expected):
    where = ["--hostfile", str(folder / "hostfile"), "--no_ssh_check", "--master_addr", "127.0.0.1"]
    command = [*DEEPSPEED, *where, "--master_port", str(free_port()), str(TRAIN), *flags_of(folder, "pdsh", "cache")]
    # Only some variables go to the other machines: the others come from this file, in the folder of the launch.
    (folder / "deepspeed_env").write_text("DS_ACCELERATOR=cpu\nOMP_NUM_THREADS=1\n")
    done = run_together(command, PATH=fake_command(folder, "pdsh"), DS_ENV_FILE=str(folder / "deepspeed_env"))
    check(folder, "pdsh", expected, done)


@pytest.mark.long
def test_torchrun_on_each_machine(folder, expected):
    port = free_port()
    where = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *where]
    done = run_together(
        *(
            [*torchrun, "--node-rank", str(node), str(TRAIN), *flags_of(folder, "torchrun", f"cache-{node}")]
            for node in range(2)
        )
    )
    check(folder, "torchrun", expected, done)


@pytest.mark.long
def test_the_slurm_template(folder, expected):
    command = ["bash", str(ROOT / "run" / "slurm.sh"), *flags_of(folder, "slurm", "cache")]
    variables = {
        "PATH": fake_command(folder, "srun"),
        "PYTHON": sys.executable,
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": str(free_port()),
        "SLURM_JOB_NODELIST": "gpu[01-02]",
    }
    check(folder, "slurm", expected, run_together(command, **variables))


@pytest.mark.long
def test_machines_with_other_flags_are_refused_on_all(folder):
    port, rates = free_port(), ({"learning_rate": 1e-3}, {})
    done = run_together(
        *(no_ssh(folder, node, port, flags_of(folder, "differ", "cache", **rates[node])) for node in range(2))
    )
    assert [each.returncode for each in done] == [2, 2]
    assert "--learning_rate differs between ranks: 0.001 on rank 0; 0.002 on rank 1" in done[0].stderr
    assert "Traceback" not in "".join(each.stdout + each.stderr for each in done)
