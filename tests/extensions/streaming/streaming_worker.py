"""Runs with small shards, whose encoding may be held up.

Arguments: records of a shard, a gate, and the flags of a run, or a JSON file with those of several. The gate is a file
with the number of shards that may be encoded, which the test raises; below 0 the reading waits, too. Without the file
there is no limit.
"""

import json
import sys
import time
from pathlib import Path

import torch

from llava_ds.data import shards
from llava_ds.runtime.command import exit_with

sys.path.append(str(Path(__file__).parents[2] / "workers"))

from run_many import leave_no_model, load_train


def hold_up(gate: Path) -> None:
    """Let the encoding wait for the gate."""

    def number() -> float:
        try:
            return float(gate.read_text() or 0)
        except FileNotFoundError:
            return float("inf")

    encode, read = shards._encode, shards._read_shards

    def encode_later(work, shard: int, *rest) -> None:
        while (state := work.state()) is not None and len(state.rows) >= number():
            time.sleep(0.02)
        encode(work, shard, *rest)

    def read_later(*args):
        for shard in read(*args):
            while number() < 0:
                time.sleep(0.02)
            yield shard

    shards._encode, shards._read_shards = encode_later, read_later


def main() -> None:
    size, gate, *flags = (argument for argument in sys.argv[1:] if not argument.startswith("--local_rank"))
    shards.SHARD_RECORDS = int(size)
    hold_up(Path(gate))
    train = load_train()
    leave_no_model()
    for argv in json.loads(Path(flags[0]).read_text()) if len(flags) == 1 else [flags]:
        train.main(argv)
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    exit_with(main, "run/train.py")
