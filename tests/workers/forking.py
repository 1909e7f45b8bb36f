"""Starts the two ranks of a run over and over, each time in new processes, without importing everything anew.

Reads tasks from stdin, a JSON object a line: {"argv", "log", "port"}. Writes {"pids"} when both ranks were forked, and
{"codes"} when both have ended.
"""

import json
import os
import runpy
import sys
import traceback
from pathlib import Path

from run_many import TRAIN, load_train

WORLD_SIZE = 2


def become_rank(rank: int, task: dict) -> None:
    """In a forked process: run/train.py as a launcher would start it, to the end of the process."""
    log = os.open(task["log"], os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(log, number)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(WORLD_SIZE),
        LOCAL_SIZE=str(WORLD_SIZE),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(task["port"]),
    )
    sys.argv = [str(TRAIN), f"--local_rank={rank}", *task["argv"]]
    code = 1
    try:
        runpy.run_path(str(TRAIN), run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    load_train()  # all that it imports
    for line in sys.stdin:
        task = json.loads(line)
        Path(task["log"]).touch()
        pids = []
        for rank in range(WORLD_SIZE):
            pid = os.fork()
            if pid == 0:
                become_rank(rank, task)
            pids.append(pid)
        print(json.dumps({"pids": pids}), flush=True)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps({"codes": codes}), flush=True)


if __name__ == "__main__":
    main()
