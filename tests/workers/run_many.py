"""Several runs of run/train.py in the processes of one launch, for starting processes is what costs time.

Last argument: a JSON file with a list of command lines. Each goes through the same main() as a launch of its own; with
--unfinished before it, up to where the finished model would be written.
"""

import importlib.util
import json
import sys
from pathlib import Path

import torch

TRAIN = Path(__file__).parents[2] / "run" / "train.py"


def load_train():
    """run/train.py as a module."""
    spec = importlib.util.spec_from_file_location("train", TRAIN)
    train = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(train)
    return train


def leave_no_model() -> None:
    """Let runs try and export no finished model, which takes as long as a few steps."""
    from llava_ds.train import plan, session

    plan.try_export = session.try_export = lambda *_, **more: "nothing is exported"
    session.export_model = lambda *_: None


def main() -> None:
    train = load_train()
    if "--unfinished" in sys.argv:
        leave_no_model()
    for argv in json.loads(Path(sys.argv[-1]).read_text()):
        train.main(argv)
        torch.distributed.barrier()  # the next run may read what rank 0 has just written
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
