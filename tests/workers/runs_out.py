"""run/train.py on ranks of which one runs out of memory in its third step, in the middle of the model.

First argument: that rank. The others are those of run/train.py.
"""

import runpy
import sys
from pathlib import Path

import torch

from llava_ds.model.projector import Projector

TRAIN = Path(__file__).parents[2] / "run" / "train.py"


def main() -> None:
    local = [word for word in sys.argv[1:] if word.startswith("--local_rank")]
    unlucky, *flags = [word for word in sys.argv[1:] if word not in local]
    forward, calls = Projector.forward, []

    def runs_out(self: Projector, *inputs: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if torch.distributed.get_rank() == int(unlucky) and len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(self, *inputs)

    Projector.forward = runs_out
    sys.argv = [str(TRAIN), *flags]
    runpy.run_path(str(TRAIN), run_name="__main__")


if __name__ == "__main__":
    main()
