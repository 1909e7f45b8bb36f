"""As srun starts two tasks on two machines, which are both this one. Options before the command are passed over."""

import os
import subprocess
import sys
import time


def main() -> int:
    command = sys.argv[1:]
    while command[0].startswith("-"):
        command.pop(0)
    step = {
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
    sys.exit(main())
