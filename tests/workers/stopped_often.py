"""A run that is stopped by SIGTERM at random moments and gone on with, in the processes of one launch.

Last argument: a JSON file with the command line, the number of stops, a seed, and the file for what was seen. Each
start goes through the same main() as a launch of its own; one rank, drawn anew, signals itself at a moment drawn from
the time of three steps. After so many stops the run is left alone.
"""

import json
import os
import random
import signal
import statistics
import sys
import threading
from pathlib import Path

import torch
from run_many import load_train

from llava_ds.checkpoint.commit import step_of
from llava_ds.checkpoint.verification import newest_whole
from llava_ds.files.jsonl import read_metrics
from llava_ds.train import loop


def main() -> None:
    train, task = load_train(), json.loads(Path(sys.argv[-1]).read_text())
    output_dir = Path(task["argv"][task["argv"].index("--output_dir") + 1])
    draw, run_steps, seen, step_s = random.Random(task["seed"]), loop.run_steps, [], 0.1
    code = None
    while code != 0:
        stops = len(seen) < task["stops"]
        rank, delay_s = draw.randrange(int(os.environ["WORLD_SIZE"])), draw.uniform(0, 3) * step_s
        mine = stops and int(os.environ["RANK"]) == rank
        timer = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGTERM)) if mine else None

        def timed(*args: object, timer=timer, **more: object) -> None:
            if timer is not None:
                timer.start()
            run_steps(*args, **more)

        loop.run_steps = timed  # before it, a request ends the run at once
        code = train.main(task["argv"])
        if timer is not None:
            timer.cancel()
        torch.distributed.barrier()
        rows = read_metrics(output_dir / "run" / "metrics.jsonl")
        path, refused = newest_whole(output_dir)
        seen.append({"code": code, "step": rows[-1]["step"], "saved": step_of(path), "refused": refused, "rank": rank})
        step_s = statistics.median(row["step_time_s"] for row in rows[-5:])
        torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        Path(task["report"]).write_text(json.dumps(seen))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
