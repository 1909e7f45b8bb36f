"""run/train.py with one change: on_gpu.py HOW, and then the flags.

HOW: limited (3 % of the GPU's memory, on the CPU 1 GB beyond what is in use), shared (all ranks on the first GPU, over
gloo, for NCCL refuses that), asleep (as shared, and rank 1's loader sleeps for ever from its third micro-batch on).
"""

import functools
import os
import resource
import runpy
import sys
import time
from pathlib import Path

import psutil
import torch

TRAIN = Path(__file__).parents[2] / "run" / "train.py"
SHARE, BEYOND_BYTES = 0.03, 2**30


def limit() -> None:
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(SHARE)
    else:
        most = psutil.Process().memory_info().data + BEYOND_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def share() -> None:
    import deepspeed

    from llava_ds.engine import process_group

    process_group.device_index = lambda *_: 0
    deepspeed.init_distributed = functools.partial(deepspeed.init_distributed, dist_backend="gloo")


def fall_asleep() -> None:
    from llava_ds.data import loader

    collate, calls = loader.micro_batch_of, []

    def asleep(*samples: object, **options: object):
        calls.append(1)
        while len(calls) >= 3:
            time.sleep(1)
        return collate(*samples, **options)

    if os.environ["RANK"] == "1":
        loader.micro_batch_of = asleep


CHANGES = {"limited": (limit,), "shared": (share,), "asleep": (share, fall_asleep)}


def main() -> None:
    how, *flags = [token for token in sys.argv[1:] if not token.startswith("--local_rank")]
    for change in CHANGES[how]:
        change()
    sys.argv = [str(TRAIN), *flags]
    runpy.run_path(str(TRAIN), run_name="__main__")


if __name__ == "__main__":
    main()
