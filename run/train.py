"""Train a LLaVA model: deepspeed run/train.py --deepspeed_config ds_configs/zero3.json

Without --model_name_or_path it trains the tiny model that ships with the package on generated images.
"""

import sys
from functools import partial

from llava_ds.runtime.command import begin, exit_with
from llava_ds.train.early_flags import read_flags

PROGRAM = globals().get("PROGRAM", "run/train.py")  # run/rl.py gives its own name

if __name__ == "__main__":
    begin(PROGRAM, reads=read_flags)

import torch

from llava_ds.extensions.active import choice
from llava_ds.runtime.main_thread import frozen_gc
from llava_ds.runtime.output_lock import OutputLock
from llava_ds.runtime.stopping import Stopping
from llava_ds.runtime.watchdog import Watchdog
from llava_ds.train.plan import make_plan
from llava_ds.train.start import name_sources, start


def main(argv: list[str]) -> int:
    """Train, and return the exit code: 0, or EXIT_STOPPED or EXIT_NOT_RESUMABLE if the run was asked to stop."""
    with (
        OutputLock() as lock,
        Watchdog() as watchdog,  # like Stopping, it reports this rank's end to the other ranks
        Stopping(on_leaving=watchdog.leaving) as stop,
    ):
        lock.set_ending_check(lambda: stop.is_requested)
        return run(argv, lock, watchdog, stop)


def run(argv: list[str], lock: OutputLock, watchdog: Watchdog, stop: Stopping) -> int:
    """Run all phases, from flags to the exported model."""
    started = start(argv, lock, watchdog)  # read flags, and start the ranks
    # Read and check model, data, DeepSpeed JSON and checkpoint, but build nothing.
    plan = make_plan(started).completed(started.ranks)
    if plan.args.training.dry_run:
        return choice("dry_run", True)(plan, started.ranks)

    from llava_ds.train.hooks import make_hooks
    from llava_ds.train.loop import train
    from llava_ds.train.session import build, finish

    session = build(plan, started, watchdog, stop)  # model, engine, restored state, largest micro-batch tried
    hooks = make_hooks(session)  # actions between steps
    with frozen_gc():
        train(session, hooks)
    return finish(session, hooks)  # export the model, or stop on request


def train_and_leave_group(argv: list[str]) -> int:
    """Train, and leave the process group."""
    code = main(argv)
    torch.distributed.destroy_process_group()
    return code


if __name__ == "__main__":
    exit_with(partial(train_and_leave_group, sys.argv[1:]), PROGRAM, explain=partial(name_sources, sys.argv[1:]))
