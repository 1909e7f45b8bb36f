"""Start two tasks as srun does on two machines, which are both this one. Options before the command are ignored."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main(folder: Path) -> int:
    command = sys.argv[1:]
    while command[0].startswith("-"):
        command.pop(0)
    scontrol = folder / "scontrol"
    scontrol.write_text("#!/bin/sh\nprintf '127.0.0.1\\n127.0.0.2\\n'\n")
    scontrol.chmod(0o755)
    step = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NODELIST": "127.0.0.[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_LOCALID": "0",
    }
    tasks = [
        subprocess.Popen(command, env={**os.environ, **step, "SLURM_PROCID": str(task), "SLURM_NODEID": str(task)})
        for task in range(2)
    ]
    while any(task.poll() is None for task in tasks) and not any(task.poll() for task in tasks):
        time.sleep(0.1)
    for task in tasks:
        task.kill()  # where one failed, as --kill-on-bad-exit=1
    return max(abs(task.wait()) for task in tasks)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        sys.exit(main(Path(scratch)))
